from dataclasses import replace

import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, dtypes, holes
from fastcheck_codecs.header import Block, read_header, write_header
from fastcheck_codecs.sections import Sink, Source
from hypothesis import given
from hypothesis import strategies as st

RNG = np.random.default_rng(11)


def noise(count, dtype="u4"):
    return np.frombuffer(RNG.bytes(count * np.dtype(dtype).itemsize), dtype) | np.dtype(dtype).type(1)


def with_holes(words, share):
    return np.where(RNG.random(words.size) < share, words.dtype.type(0), words)


@given(filled=st.lists(st.booleans(), min_size=1, max_size=70), width=st.sampled_from([4, 8]))
def test_words_that_are_not_zero_and_their_places_are_restored(filled, width):
    mask = np.array(filled)
    mask[0] = True
    words = np.where(mask, noise(mask.size, f"<u{width}"), np.zeros(1, f"<u{width}"))
    memory = np.empty(1000, "u1")
    sink = Sink(memory)
    dense = holes.take_out(sink, words)
    np.testing.assert_array_equal(dense, words[mask])
    source = Source(memory[: sink.position])
    bits, kept = holes.get_bits(source, mask.size)
    source.finish()
    assert kept == dense.size
    out = np.full_like(words, 7)
    holes.put_back(bits, dense.copy(), out=out)
    np.testing.assert_array_equal(out, words)


@pytest.mark.parametrize("share", [0.1, 0.5, 0.99])
def test_zeros_among_noise_pay(share):
    assert holes.pay(with_holes(noise(100_000), share))


@pytest.mark.parametrize(
    "words",
    [
        noise(100_000),
        with_holes(noise(100_000), 0.01),
        with_holes(noise(100), 0.5),
        with_holes(noise(100_000, "u2"), 0.5),
        # Zeros show in one plane alone, which says it as well.
        with_holes(noise(100_000) & np.uint32(0xF), 0.3),
        np.zeros(100_000, "u4"),
    ],
    ids=["none", "rare", "short", "narrow", "one plane", "all"],
)
def test_what_gains_little_does_not_pay(words):
    assert not holes.pay(words)


@pytest.mark.parametrize("dtype", ["float32", "float64", "complex64"])
def test_block_of_values_with_holes_is_smaller_than_without_and_restored(dtype):
    values = RNG.standard_normal(200_000).astype(dtype)
    holed = np.where(np.arange(values.size) % 7 == 0, values.dtype.type(0), values)
    payload = PrefixIndex().encode(holed)
    assert {entry.block for entry in read_header(payload).entries} == {Block.HOLED_INDEX}
    assert payload.size < 0.87 * PrefixIndex().encode(values).size
    assert PrefixIndex().decode(payload).tobytes() == holed.tobytes()


@pytest.mark.parametrize("residual", ["xor", "difference", "auto"])
def test_delta_of_words_of_which_many_did_not_change_is_restored(residual):
    base = RNG.standard_normal(200_000).astype("f4")
    words = np.where(np.arange(base.size) % 3 == 0, base, base + RNG.standard_normal(base.size).astype("f4"))
    payload = XorDelta(base=base, residual=residual).encode(words)
    assert {entry.block for entry in read_header(payload).entries} == {Block.HOLED_PLANES}
    assert XorDelta(base=base).decode(payload).tobytes() == words.tobytes()


@pytest.mark.parametrize(
    "bits", [np.zeros(2, "u1"), np.array([1, 128], "u1")], ids=["none", "behind the end"]
)
def test_places_that_cannot_be_are_refused(bits):
    memory = np.zeros(100, "u1")
    sink = Sink(memory)
    holes.put_plane(sink, bits)
    with pytest.raises(CodecError, match="words among holes"):
        holes.get_bits(Source(memory[: sink.position]), 15)


@pytest.mark.parametrize(("dtype", "block"), [("uint16", "HOLED_PLANES"), ("uint32", "HOLED_INDEX")])
def test_block_with_holes_of_words_that_have_none_is_refused(dtype, block):
    payload = PrefixIndex().encode(with_holes(noise(20_000), 0.2).view("f4"))
    header = read_header(payload)
    entries = tuple(replace(entry, block=Block[block]) for entry in header.entries)
    write_header(payload, replace(header, word_type=dtypes.by_name(dtype), entries=entries))
    with pytest.raises(CodecError, match=f"damaged header: a {block.removeprefix('HOLED_')}|a {block} block"):
        PrefixIndex().decode(payload)
