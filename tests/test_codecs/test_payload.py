"""What holds for both codecs: exact bits, bounded size, no damage unnoticed, nothing aliased."""

import contextlib
import threading

import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, max_encoded_nbytes, raw_nbytes
from fastcheck_codecs import payload as payload_module
from fastcheck_codecs.bitops import BLOCK_NBYTES
from fastcheck_codecs.dtypes import _KNOWN
from fastcheck_codecs.header import Block, Kind, read_header, write_header
from hypothesis import given, settings
from hypothesis import strategies as st

NAMES = [known.name for known in _KNOWN]
NUMPY = [
    "?",
    "u1",
    "i1",
    "u2",
    "i2",
    "u4",
    "i4",
    "u8",
    "i8",
    "f2",
    "f4",
    "f8",
    "c8",
    "c16",
    "g",
    ">f4",
    "S3",
    "M8[ns]",
]


def codecs(dtype=None):
    return [XorDelta(dtype=dtype), *(PrefixIndex(bits, dtype=dtype) for bits in ("auto", 7, 12))]


def check(codec, data):
    raw = data if isinstance(data, bytes) else data.tobytes()
    payload = codec.encode(data)
    assert payload.dtype == np.uint8
    assert payload.ndim == 1
    assert payload.base is None
    assert payload.size <= len(raw) + len(raw) // 1000 + 64
    assert raw_nbytes(payload) == len(raw)
    decoded = codec.decode(payload)
    assert decoded.dtype == np.uint8
    assert decoded.tobytes() == raw
    out = np.full(len(raw), 0x5A, "u1")
    assert codec.decode(payload, out=out) is out
    assert out.tobytes() == raw
    return payload


def shaped(kind, nbytes, seed):
    """Bytes of a kind that some mode is made for."""
    rng = np.random.default_rng(seed)
    if kind == "zeros":
        return np.zeros(nbytes, "u1")
    if kind == "constant":
        return np.full(nbytes, 0xBF, "u1")
    if kind == "sparse":
        return np.where(rng.random(nbytes) < 0.02, rng.integers(0, 256, nbytes), 0).astype("u1")
    if kind == "floats":
        return (rng.standard_normal(nbytes // 4 + 1) * 1e-3).astype("<f4").view("u1")[:nbytes].copy()
    return rng.integers(0, 256, nbytes, dtype="u1")


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["zeros", "constant", "sparse", "floats", "noise"]),
    st.one_of(st.integers(0, 70), st.integers(71, 40_000)),
    st.integers(0, 5),
)
def test_round_trip_any_dtype_and_size_is_exact(dtype, kind, nbytes, seed):
    data = shaped(kind, nbytes, seed)
    for codec in codecs(dtype):
        check(codec, data)


@settings(deadline=None, max_examples=150)
@given(
    st.sampled_from(NAMES),
    st.sampled_from(["auto", "xor", "difference"]),
    st.sampled_from(["zeros", "sparse", "floats", "noise"]),
    st.integers(0, 20_000),
    st.integers(0, 5),
)
def test_round_trip_any_delta_is_exact(dtype, residual, kind, nbytes, seed):
    base = shaped("floats", nbytes, 99)
    data = base ^ shaped(kind, nbytes, seed)
    codec = XorDelta(base=base, residual=residual, dtype=dtype)
    check(codec, data)
    check(codec, base.copy())


@settings(deadline=None)
@given(st.sampled_from(NAMES), st.binary(max_size=300))
def test_round_trip_arbitrary_bytes_is_exact(dtype, data):
    for codec in codecs(dtype):
        check(codec, data)


@pytest.mark.parametrize("extra", [-9, -1, 0, 1, 9, BLOCK_NBYTES + 3])
@pytest.mark.parametrize("kind", ["zeros", "sparse", "floats", "noise"])
def test_round_trip_around_a_block_is_exact(kind, extra):
    data = shaped(kind, BLOCK_NBYTES + extra, 1)
    for dtype in ("uint8", "bfloat16", "float16", "float32", "float64", "int64"):
        for codec in codecs(dtype):
            check(codec, data)


@pytest.mark.parametrize("dtype", NUMPY)
def test_round_trip_numpy_dtype_is_inferred(dtype):
    data = np.frombuffer(np.random.default_rng(0).bytes(480), "u1").copy()
    array = (data & 1).view("?") if dtype == "?" else data.view(dtype)
    for codec in codecs():
        check(codec, array)
        check(codec, array.reshape(2, -1))
        check(codec, array[:0])
        check(codec, np.array(array[0], array.dtype))


@pytest.mark.parametrize("dtype", ["f2", "f4", "f8"])
def test_round_trip_special_values_keep_their_bits(dtype):
    unsigned = np.dtype(dtype.replace("f", "u"))
    bits = np.dtype(dtype).itemsize * 8
    top = {2: 0x7C00, 4: 0x7F800000, 8: 0x7FF0000000000000}[np.dtype(dtype).itemsize]
    special = [0, 1, 1 << (bits - 1), top, top | 1 << (bits - 1), top + 1, top + 0x155, (1 << bits) - 1]
    data = np.random.default_rng(0).standard_normal(5000).astype(dtype).view(unsigned)
    data[::7] = np.resize(np.array(special, unsigned), data[::7].size)
    base = np.roll(data, 3)
    for codec in [*codecs(), XorDelta(base=base), XorDelta(base=base, residual="difference")]:
        check(codec, data.view(dtype))


def test_round_trip_real_data_is_smaller(weights, moments):
    base, current = weights
    assert check(XorDelta(base=base), current).size * 1.4 < current.nbytes
    assert check(PrefixIndex(), moments).size * 1.13 < moments.nbytes
    assert check(PrefixIndex(9), moments).size * 1.05 < moments.nbytes
    bfloat16 = (moments.view("u4") >> 16).astype("u2")
    assert check(PrefixIndex(dtype="bfloat16"), bfloat16).size * 1.3 < bfloat16.nbytes
    assert check(PrefixIndex(), moments.astype("f8")).size * 1.5 < moments.nbytes * 2


def test_blocks_of_one_payload_are_stored_each_in_its_way(weights):
    _, current = weights
    count = BLOCK_NBYTES // 4
    noise = np.random.default_rng(0).integers(0, 1 << 32, count, dtype="u4").view("f4")
    mixed = np.concatenate([np.zeros(count, "f4"), current[:count], noise])
    payload = check(PrefixIndex(), mixed)
    assert [entry.block for entry in read_header(payload).entries] == [Block.ELIDED, Block.INDEX, Block.RAW]


@pytest.mark.parametrize("codec", [XorDelta(), PrefixIndex(), PrefixIndex(12)], ids=repr)
def test_input_read_only_or_misaligned_is_neither_changed_nor_aliased(codec, moments):
    memory = np.zeros(moments.nbytes + 1, "u1")
    odd = memory[1:].view("f4")
    odd[:] = moments
    odd.flags.writeable = False
    payload = codec.encode(odd)
    assert not np.may_share_memory(payload, memory)
    np.testing.assert_array_equal(odd.view("u4"), moments.view("u4"))
    target = np.zeros(moments.nbytes + 1, "u1")[1:].view("f4")
    source = np.zeros(payload.size + 3, "u1")[3:]
    source[:] = payload
    source.flags.writeable = False
    codec.decode(source, out=target)
    assert target.tobytes() == moments.tobytes()
    fresh = codec.decode(source)
    assert not np.may_share_memory(fresh, source)


def test_delta_misaligned_everywhere_is_exact(weights):
    def odd(array):
        memory = np.zeros(array.nbytes + 1, "u1")[1:].view(array.dtype)
        memory[:] = array
        return memory

    base, current = weights
    for residual in ("xor", "difference"):
        codec = XorDelta(base=odd(base), residual=residual)
        out = odd(np.zeros_like(current))
        codec.decode(codec.encode(odd(current)), out=out)
        assert out.tobytes() == current.tobytes()


def test_input_fortran_order_keeps_memory_order():
    array = np.asfortranarray(np.random.default_rng(0).standard_normal((30, 40)))
    out = np.empty_like(array, order="F")
    PrefixIndex().decode(PrefixIndex().encode(array), out=out)
    np.testing.assert_array_equal(out, array)


def test_input_strided_is_refused():
    with pytest.raises(CodecError, match="contiguous"):
        XorDelta().encode(np.arange(10)[::2])


@pytest.mark.parametrize("codec", [XorDelta(), PrefixIndex()], ids=repr)
def test_encode_into_same_bytes_as_encode(codec, moments):
    out = np.full(max_encoded_nbytes(moments.nbytes) + 5, 0x33, "u1")
    used = codec.encode_into(moments, out)
    assert out[:used].tobytes() == codec.encode(moments).tobytes()


def test_encode_into_unfit_memory_is_refused():
    data = np.arange(100, dtype="f4")
    with pytest.raises(CodecError, match="may be needed"):
        XorDelta().encode_into(data, np.empty(max_encoded_nbytes(400) - 1, "u1"))
    fixed = np.empty(1000, "u1")
    with pytest.raises(CodecError, match="overlaps"):
        XorDelta().encode_into(fixed[:400], fixed)
    fixed.flags.writeable = False
    with pytest.raises(CodecError, match="read-only"):
        XorDelta().encode_into(data, fixed)


def test_decode_into_unfit_memory_is_refused():
    data = np.arange(100, dtype="f4")
    payload = XorDelta().encode(data)
    for size in (399, 401, 0):
        with pytest.raises(CodecError, match="out has"):
            XorDelta().decode(payload, out=np.empty(size, "u1"))
    with pytest.raises(CodecError, match="contiguous"):
        XorDelta().decode(payload, out=np.empty(200, "f4")[::2])
    with pytest.raises(CodecError, match="read-only"):
        XorDelta().decode(payload, out=bytes(400))
    base = np.zeros(100, "f4")
    codec = XorDelta(base=base)
    with pytest.raises(CodecError, match="overlaps"):
        codec.decode(codec.encode(data), out=base)
    assert not base.any()


def test_decode_huge_claim_without_out_is_refused(monkeypatch):
    monkeypatch.setattr(payload_module, "MAX_UNASKED_NBYTES", 99)
    payload = XorDelta().encode(bytes(100))
    with pytest.raises(CodecError, match="claims 100"):
        XorDelta().decode(payload)
    assert XorDelta().decode(payload, out=bytearray(100)) == bytes(100)


def test_either_codec_decodes_full_payloads_of_the_other(moments):
    assert XorDelta().decode(PrefixIndex().encode(moments)).tobytes() == moments.tobytes()
    assert PrefixIndex().decode(XorDelta().encode(moments)).tobytes() == moments.tobytes()
    bound = XorDelta(base=np.ones_like(moments))
    assert bound.decode(PrefixIndex().encode(moments)).tobytes() == moments.tobytes()


def small_payloads():
    rng = np.random.default_rng(4)
    floats = (rng.standard_normal(3001) * 1e-3).astype("f4")
    floats[::17] = 0
    base = floats + (rng.standard_normal(3001) * 1e-7).astype("f4")
    sparse = np.where(rng.random(4000) < 0.02, 7, 0).astype("i2")
    return {
        "planes": (XorDelta(), floats),
        "index": (PrefixIndex(), floats),
        "index16": (PrefixIndex(), floats.astype("f2")),
        "index64": (PrefixIndex(), floats.astype("f8")),
        "table": (PrefixIndex(12), floats),
        "xor": (XorDelta(base=base, residual="xor"), floats),
        "difference": (XorDelta(base=base, residual="difference"), floats),
        "sparse": (XorDelta(), sparse),
        "raw": (XorDelta(), rng.integers(0, 256, 500, dtype="u1")),
        "tail": (XorDelta(base=bytes(7), dtype="float64"), b"abcdefg"),
    }


SMALL = small_payloads()


@pytest.mark.parametrize("name", SMALL)
def test_fuzz_flipped_bits_are_noticed_or_harmless(name):
    codec, data = SMALL[name]
    payload, raw = codec.encode(data), bytes(data)
    rng = np.random.default_rng(6)
    bits = payload.size * 8
    noticed = 0
    for place in {*range(min(bits, 900)), *rng.integers(0, bits, 1500).tolist()}:
        broken = payload.copy()
        broken[place // 8] ^= 1 << (place % 8)
        try:
            assert codec.decode(broken).tobytes() == raw
        except CodecError:
            noticed += 1
    assert noticed > 300


@pytest.mark.parametrize("name", SMALL)
def test_fuzz_overwritten_bytes_are_noticed_or_harmless(name):
    codec, data = SMALL[name]
    payload, raw = codec.encode(data), bytes(data)
    rng = np.random.default_rng(7)
    for _ in range(500):
        broken = payload.copy()
        start, length = rng.integers(0, payload.size), rng.integers(1, 12)
        broken[start : start + length] = rng.choice([0, 255, int(rng.integers(256))])
        try:
            assert codec.decode(broken).tobytes() == raw
        except CodecError:
            continue


@pytest.mark.parametrize("name", SMALL)
def test_fuzz_any_truncation_is_refused(name):
    codec, data = SMALL[name]
    payload = codec.encode(data)
    for size in {*range(min(payload.size, 200)), *range(0, payload.size, 37), payload.size - 1}:
        with pytest.raises(CodecError):
            codec.decode(payload[:size])


@settings(deadline=None, max_examples=200)
@given(st.binary(max_size=300), st.sampled_from(sorted(SMALL)))
def test_fuzz_forged_blocks_are_refused(body, name):
    """A header that is in order vouches for nothing behind it."""
    codec, data = SMALL[name]
    payload = codec.encode(data)
    header = read_header(payload)
    start = 40 + 8 * len(header.entries)
    if not header.entries:
        return
    forged = payload.copy()
    forged[start : start + len(body)] = np.frombuffer(body, "u1")[: payload.size - start]
    with contextlib.suppress(CodecError):
        assert codec.decode(forged).tobytes() == bytes(data)


@settings(deadline=None, max_examples=300)
@given(st.sampled_from(sorted(SMALL)), st.sampled_from(_KNOWN), st.sampled_from(Block), st.integers(0, 255))
def test_fuzz_forged_headers_are_refused(name, word_type, block, prefix_bits):
    """Every decoder meets words and sections that were not made for it."""
    codec, data = SMALL[name]
    payload = codec.encode(data).copy()
    header = read_header(payload)
    if not header.entries or not raw_nbytes(payload) // word_type.word_nbytes:
        return
    entries = tuple(type(entry)(entry.length, block, entry.residual) for entry in header.entries)
    changed = {"word_type": word_type, "prefix_bits": prefix_bits, "entries": entries}
    write_header(payload, type(header)(**{**vars(header), **changed}))
    with contextlib.suppress(CodecError):
        assert codec.decode(payload).tobytes() == bytes(data)


def test_full_payload_with_a_residual_is_refused():
    codec, data = SMALL["xor"]
    payload = codec.encode(data)
    header = read_header(payload)
    write_header(payload, type(header)(**{**vars(header), "kind": Kind.FULL}))
    with pytest.raises(CodecError, match="refers to a base"):
        codec.decode(payload)


def test_unchecked_decode_still_finds_damage_of_the_frame():
    payload = XorDelta().encode(SMALL["raw"][1])
    payload[100] ^= 1
    assert XorDelta(checksum=False).decode(payload).size == 500
    with pytest.raises(CodecError, match="once decoded"):
        XorDelta().decode(payload)
    with pytest.raises(CodecError):
        XorDelta(checksum=False).decode(payload[:-1])


def test_threads_sharing_one_codec_do_not_meet(weights, moments):
    base, current = weights
    delta, index = XorDelta(base=base), PrefixIndex()
    failures, start = [], threading.Barrier(4)

    def work(place):
        start.wait(timeout=30)
        codec, data = ((delta, current), (index, moments))[place % 2]
        got = [codec.decode(codec.encode(data)).tobytes() for _ in range(4)]
        failures.extend(place for one in got if one != data.tobytes())

    threads = [threading.Thread(target=work, args=(place,)) for place in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures
    assert not any(thread.is_alive() for thread in threads)
