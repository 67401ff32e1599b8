from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import xxhash
from fastcheck_codecs import PrefixIndex, XorDelta, checksum, is_delta, max_encoded_nbytes
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine import encode as encode_module
from fastcheck_dask.engine.encode import TaskEncoder, check_cast, digest, look
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.nonfinite import has_nonfinite
from fastcheck_dask.layout.parity import combine


def encode(encoder, current, base, *, dtype="float32", nbytes, **options):
    out = np.full(max_encoded_nbytes(nbytes) + 8, 0xAA, np.uint8)
    payload = encoder.encode(current, base, dtype=dtype, nbytes=nbytes, out=out[:-8], **options)
    assert (out[-8:] == 0xAA).all()
    return payload, out[: payload.nbytes]


def floats(seed, count):
    return np.random.default_rng(seed).normal(size=count).astype(np.float32).view(np.uint8)


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 700_000),
    st.sampled_from(["float32", "float64", "bfloat16", "float8_e4m3fn", "uint8"]),
    st.integers(0, 2**32 - 1) | st.none(),
    st.sampled_from([4096, 256 * 1024, encode_module._LOOK_BYTES]),
)
def test_look_is_what_each_pass_alone_gives(nbytes, dtype, nan_at, block):
    bits = np.resize(np.arange(251, dtype=np.uint8) & 0x3F, nbytes)
    if nan_at is not None and nbytes:
        bits[nan_at % nbytes :][:16] = 0xFF
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encode_module, "_LOOK_BYTES", block)
        found = look(bits, dtype)
    assert (found.digest, found.crc32c) == (digest(bits), checksum(bits))
    assert found.nonfinite is has_nonfinite(bits, dtype)


def test_check_cast_gives_the_digest_only_of_a_cast():
    bits = floats(1, 100)
    narrow = cast(bits, "bfloat16")
    slot = np.concatenate([bits, narrow])
    where = {"source": (0, 400), "narrow": (400, 200)}
    assert check_cast(slot, **where, dtype="bfloat16") == digest(narrow)
    assert check_cast(slot, **where, dtype="float16") is None
    slot[-1] ^= 1
    assert check_cast(slot, **where, dtype="bfloat16") is None


pieces = st.lists(st.tuples(st.integers(0, 300), st.integers(0, 200)), min_size=1, max_size=4).map(tuple)


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 9),
    pieces,
    st.none() | pieces,
    st.sampled_from(["float32", "bfloat16", "uint8", "complex64", "float8_e4m3fn"]),
    st.integers(0, 1),
)
def test_encode_any_pieces_decodes_to_their_sum_and_describes_it(seed, current, base, dtype, exponent):
    slot, old = floats(seed, 125), floats(seed + 100, 125)
    nbytes = max(1, *(length for _, length in current))
    base = None if base is None else tuple((offset, min(length, nbytes)) for offset, length in base)
    want = combine((slot[o : o + n] for o, n in current), np.empty(nbytes, np.uint8), exponent=exponent)
    before = None if base is None else (old, base)
    described, payload = encode(
        TaskEncoder(), (slot, current), before, dtype=dtype, nbytes=nbytes, exponent=exponent
    )
    before = None
    if base is not None:
        parts = (old[o : o + n] for o, n in base)
        before = combine(parts, np.empty(nbytes, np.uint8), exponent=exponent)
    codec = XorDelta(base=before) if is_delta(payload) else PrefixIndex()
    assert bytes(codec.decode(payload)) == want.tobytes()
    assert described.digest == digest(want) == xxhash.xxh3_128_hexdigest(want.tobytes())
    assert described.crc32c == checksum(payload)
    assert base is not None or not is_delta(payload)


def test_encode_similar_bits_choose_delta_and_foreign_ones_whole():
    current = floats(1, 20_000)
    nearby = current.copy()
    nearby[::400] ^= 1
    whole = ((0, current.size),)
    encoder = TaskEncoder()
    _, delta = encode(encoder, (current, whole), (nearby, whole), nbytes=current.size)
    _, alone = encode(encoder, (current, whole), (floats(2, 20_000), whole), nbytes=current.size)
    assert is_delta(delta)
    assert delta.size < current.size // 4
    assert not is_delta(alone)
    assert alone.size < current.size


@pytest.mark.parametrize("parity", [False, True])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "uint8"])
def test_encode_without_compression_is_whole_raw_and_described(parity, dtype):
    slot, old = floats(1, 20_001), floats(2, 20_001)
    pieces = ((0, 40_001), (40_001, 40_003)) if parity else ((3, 40_003),)
    want = combine((slot[o : o + n] for o, n in pieces), np.empty(40_003, np.uint8))
    described, payload = encode(
        TaskEncoder(), (slot, pieces), (old, pieces), dtype=dtype, nbytes=40_003, compress=False
    )
    assert not is_delta(payload)
    assert 40_003 <= payload.size <= 40_003 * 1.001 + 64
    assert PrefixIndex().decode(payload).tobytes() == want.tobytes()
    assert described.digest == digest(want)
    assert described.crc32c == checksum(payload)


def test_encode_parity_with_base_is_always_an_xor_delta():
    slot, old = floats(1, 20_000), floats(2, 20_000)
    two = ((0, 40_000), (40_000, 40_000))
    _, payload = encode(TaskEncoder(), (slot, two), (old, two), dtype="uint32", nbytes=40_000)
    assert is_delta(payload)


def test_encode_single_full_piece_is_read_in_place_and_unchanged():
    slot = floats(1, 1000)
    copy = slot.copy()
    slot.flags.writeable = False
    encode(TaskEncoder(), (slot, ((0, 4000),)), (slot, ((0, 4000),)), nbytes=4000)
    assert (slot == copy).all()


@pytest.mark.parametrize("parity", [0, 1, 2])
def test_encode_again_and_again_allocates_nothing_of_the_size_of_a_chunk(parity):
    n = 2**20
    slot, old = floats(1, n // 2), floats(2, n // 2)
    both = ((0, n), (n, n)) if parity else ((0, n),)
    encoder, out = TaskEncoder(), np.empty(max_encoded_nbytes(n), np.uint8)

    def once():
        exponent = max(0, parity - 1)
        encoder.encode((slot, both), (old, both), dtype="uint32", nbytes=n, out=out, exponent=exponent)

    once()
    scratch = list(encoder._scratch)
    tracemalloc.start()
    try:
        once()
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < n // 2
    assert all(before is after for before, after in zip(scratch, encoder._scratch, strict=True))


def test_encode_smaller_chunk_after_larger_uses_no_stale_scratch():
    encoder = TaskEncoder()
    slot = floats(3, 2000)
    encode(encoder, (slot, ((0, 4000), (4000, 4000))), None, nbytes=4000)
    _, payload = encode(encoder, (slot, ((0, 100), (200, 50))), None, nbytes=120)
    want = combine([slot[:100], slot[200:250]], np.empty(120, np.uint8))
    assert bytes(PrefixIndex().decode(payload)) == want.tobytes()
