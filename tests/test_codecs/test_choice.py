import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, delta_is_smaller

RNG = np.random.default_rng(9)
MOMENT = RNG.standard_normal(60_000) * 1e-3


def later(share):
    """The same moment after steps that leave `share` of its change to new gradients."""
    fresh = RNG.standard_normal(MOMENT.size) * 1e-3
    return MOMENT * (1 - share) + share * fresh


@pytest.mark.parametrize(("share", "wanted"), [(0.0001, True), (0.01, True), (0.9, False)])
@pytest.mark.parametrize("dtype", ["f4", "f8", "f2"])
def test_choice_follows_how_much_changed(dtype, share, wanted):
    base, current = MOMENT.astype(dtype), later(share).astype(dtype)
    name = base.dtype.name
    assert delta_is_smaller(current, base, dtype=name) is wanted
    delta = XorDelta(base=base).encode(current).size
    assert (delta < PrefixIndex().encode(current).size) is wanted


def test_choice_sees_through_the_bits_of_bfloat16():
    base = (MOMENT.astype("f4").view("u4") >> 16).astype("u2")
    assert delta_is_smaller(base ^ (RNG.random(base.size) < 0.01), base, dtype="bfloat16")
    assert not delta_is_smaller(RNG.permutation(base), base, dtype="bfloat16")


def test_choice_unchanged_noise_is_a_delta_and_new_noise_is_not():
    noise = RNG.integers(0, 256, (2, 70_001), dtype="u1")
    assert delta_is_smaller(noise[0], noise[0].copy(), dtype="uint8")
    assert not delta_is_smaller(noise[0], noise[1], dtype="uint8")


@pytest.mark.parametrize("nbytes", [0, 1, 3])
def test_choice_without_a_whole_word_is_no_delta(nbytes):
    assert not delta_is_smaller(bytes(nbytes), bytes(nbytes), dtype="float32")


def test_choice_of_one_word_is_made():
    assert delta_is_smaller(b"abcd", b"abcd", dtype="float32") in (True, False)


def test_choice_sizes_that_differ_are_refused():
    with pytest.raises(CodecError, match="base has 8"):
        delta_is_smaller(bytes(4), bytes(8), dtype="float32")


def test_choice_misaligned_memory_is_read():
    memory = np.zeros(MOMENT.nbytes + 1, "u1")
    memory[1:] = MOMENT.view("u1")
    assert delta_is_smaller(memory[1:], MOMENT, dtype="float64")
