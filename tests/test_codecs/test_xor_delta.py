import functools

import numcodecs
import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, is_delta
from fastcheck_codecs.bitops import fingerprint
from fastcheck_codecs.header import Block, Residual, read_header
from hypothesis import given
from hypothesis import strategies as st


def residuals(payload):
    return {entry.residual for entry in read_header(payload).entries}


def test_delta_without_base_is_refused(weights):
    base, current = weights
    payload = XorDelta(base=base).encode(current)
    assert is_delta(payload)
    for codec in (XorDelta(), PrefixIndex()):
        with pytest.raises(CodecError, match="no base"):
            codec.decode(payload)


@pytest.mark.parametrize("check", [True, False])
def test_delta_with_wrong_base_is_refused(weights, check):
    base, current = weights
    payload = XorDelta(base=base).encode(current)
    other = base.copy()
    other[-1] += 1
    with pytest.raises(CodecError, match="wrong base"):
        XorDelta(base=other, checksum=check).decode(payload)
    with pytest.raises(CodecError, match="wrong base"):
        XorDelta(base=base[:-1], checksum=check).decode(payload)


def test_delta_with_wrong_base_leaves_out_alone(weights):
    base, current = weights
    out = np.full_like(current, 7)
    with pytest.raises(CodecError):
        XorDelta(base=current).decode(XorDelta(base=base).encode(current), out=out)
    assert (out == 7).all()


@pytest.mark.parametrize("check", [True, False])
def test_wrong_base_that_a_glance_does_not_tell_is_refused(weights, check):
    base, current = weights
    payload = XorDelta(base=base).encode(current)
    other = base.copy()
    other[500] += 1  # neither in the first 64 bytes of 4 KiB nor in the last word
    assert fingerprint(other.view("u1")) == fingerprint(base.view("u1"))
    with pytest.raises(CodecError, match="wrong base"):
        XorDelta(base=other, checksum=check).decode(payload)


def test_encode_base_of_another_size_is_refused():
    with pytest.raises(CodecError, match="base has"):
        XorDelta(base=bytes(8)).encode(bytes(9))


def test_base_of_another_dtype_lends_its_bits(weights):
    base, current = weights
    payload = XorDelta(base=base.view("u1")).encode(current)
    assert XorDelta(base=base.view("i4").reshape(1, -1)).decode(payload).tobytes() == current.tobytes()


def test_without_base_payload_is_full(weights):
    payload = XorDelta().encode(weights[0])
    assert not is_delta(payload)
    assert residuals(payload) == {Residual.NONE}


def test_residual_auto_takes_the_difference_for_weights(weights):
    base, current = weights
    auto = XorDelta(base=base).encode(current)
    assert residuals(auto) == {Residual.DIFFERENCE}
    assert auto.size < XorDelta(base=base, residual="xor").encode(current).size


def test_residual_auto_takes_xor_for_flipped_bits():
    rng = np.random.default_rng(0)
    base = rng.integers(0, 1 << 32, 50_000, dtype="u4")
    assert residuals(XorDelta(base=base).encode(base ^ np.uint32(0x40000001))) == {Residual.XOR}


@pytest.mark.parametrize("wanted", ["xor", "difference"])
def test_residual_wanted_is_kept_to(weights, wanted):
    base, current = weights
    noise = np.random.default_rng(0).integers(0, 1 << 32, base.size, dtype="u4")
    for data in (current, base, noise.view("f4")):
        codec = XorDelta(base=base, residual=wanted)
        payload = codec.encode(data)
        assert residuals(payload) == {Residual[wanted.upper()]}
        assert codec.decode(payload).tobytes() == data.tobytes()


def test_residual_xor_raw_block_holds_the_xor_itself():
    rng = np.random.default_rng(0)
    base, current = rng.integers(0, 256, (2, 4096), dtype="u1")
    payload = XorDelta(base=base, residual="xor").encode(current)
    assert read_header(payload).entries[0].block is Block.RAW
    assert payload[48:].tobytes() == (base ^ current).tobytes()


def test_residual_xor_of_parity_merges_like_data():
    """P(t) = P(t-1) xor (D1 xor ... xor DN): the node that holds parity merges as the others do."""
    rng = np.random.default_rng(8)
    old = rng.standard_normal((3, 10_007)).astype("f4").view("u4")
    new = (old.view("f4") + rng.standard_normal(old.shape).astype("f4") * np.float32(1e-5)).view("u4")
    parity_old, parity_new = (functools.reduce(np.bitwise_xor, group) for group in (old, new))
    payload = XorDelta(base=parity_old, residual="xor", dtype="uint32").encode(parity_new)
    data = [
        XorDelta(base=before, residual="xor").decode(XorDelta(base=before, residual="xor").encode(after))
        for before, after in zip(old, new, strict=True)
    ]
    merged = XorDelta(base=parity_old).decode(payload)
    assert merged.tobytes() == functools.reduce(np.bitwise_xor, data).tobytes() == parity_new.tobytes()
    changes = functools.reduce(np.bitwise_xor, [*old, *new])
    full = XorDelta(residual="xor").encode(changes)
    assert (XorDelta().decode(full).view("u4") ^ parity_old).tobytes() == parity_new.tobytes()


def test_nan_that_appears_and_disappears_is_exact():
    base = np.linspace(-1, 1, 5000, dtype="f4")
    current = base.copy()
    base.view("u4")[::5] = 0x7FC00123
    current.view("u4")[::7] = 0xFF800001
    current[::11] = -0.0
    for residual in ("auto", "xor", "difference"):
        codec = XorDelta(base=base, residual=residual)
        assert codec.decode(codec.encode(current)).tobytes() == current.tobytes()


def test_config_builds_the_codec_again_without_its_base():
    codec = XorDelta(base=bytes(4), base_id="step 7", residual="xor", dtype="bfloat16")
    config = codec.get_config()
    assert config == {
        "id": "fastcheck.xor_delta",
        "base_id": "step 7",
        "residual": "xor",
        "dtype": "bfloat16",
    }
    again = numcodecs.get_codec(config)
    assert isinstance(again, XorDelta)
    assert again == codec
    with pytest.raises(CodecError, match="no base"):
        again.decode(codec.encode(b"abcd"))


def test_residual_unknown_is_refused():
    with pytest.raises(CodecError, match="residual"):
        XorDelta(residual="sum")


@pytest.mark.parametrize("kept", [0.0, 0.35, 0.9, 0.999, 1.0])
def test_auto_residual_is_within_half_a_percent_of_the_better_one(kept, moments):
    base = moments[:200_000]
    now = (np.float32(kept) * base + np.float32(1 - kept) * moments[200_000:400_000]).astype("f4")
    sizes = {how: XorDelta(base=base, residual=how).encode(now).size for how in ("auto", "xor", "difference")}
    assert sizes["auto"] <= 1.005 * min(sizes["xor"], sizes["difference"])


@given(
    before=st.binary(max_size=300),
    seed=st.integers(0, 2**32 - 1),
    residual=st.sampled_from(["auto", "xor", "difference"]),
    dtype=st.sampled_from(["float32", "bfloat16", "float64", "uint8"]),
    repeat=st.sampled_from([1, 40]),
)
def test_undo_any_delta_gives_what_was_before(before, seed, residual, dtype, repeat):
    base = np.frombuffer(before * repeat, np.uint8)
    rng = np.random.default_rng(seed)
    current = np.where(rng.random(base.size) < 0.1, rng.integers(0, 256, base.size), base).astype(np.uint8)
    payload = XorDelta(base=base, residual=residual, dtype=dtype).encode(current)
    assert XorDelta().undo(payload, current).tobytes() == base.tobytes()


@pytest.mark.parametrize("residual", ["auto", "xor", "difference"])
def test_undo_delta_of_several_blocks_gives_what_was_before(weights, residual):
    base, current = weights
    current = current.copy()
    current[:300_000] = base[:300_000]
    current[:300_000:999] *= -1
    payload = XorDelta(base=base, residual=residual).encode(current)
    assert XorDelta(checksum=False).undo(payload, current).tobytes() == base.tobytes()


def test_undo_of_other_bits_or_of_a_full_payload_is_refused(weights):
    base, current = weights
    payload = XorDelta(base=base).encode(current)
    with pytest.raises(CodecError, match="other bits"):
        XorDelta().undo(payload, base)
    with pytest.raises(CodecError, match="have 4 bytes"):
        XorDelta().undo(payload, bytes(4))
    for full in (XorDelta().encode(current), PrefixIndex().encode(current)):
        with pytest.raises(CodecError, match="stands alone"):
            XorDelta().undo(full, current)
