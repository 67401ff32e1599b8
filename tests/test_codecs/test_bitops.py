import numpy as np
import pytest
from fastcheck_codecs import CodecError, checksum
from fastcheck_codecs.bitops import (
    U16,
    UNSIGNED,
    as_bytes,
    give_pair,
    join_pair,
    nibble_nbytes,
    pack_bits,
    pack_nibbles,
    split_pair,
    take_pair,
    unpack_bits,
    unpack_nibbles,
    unzigzag,
    zigzag,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_zigzag_small_magnitudes_get_small_codes(width):
    dtype = UNSIGNED[width]
    words = np.array([0, -1, 1, -2, 2], f"i{width}").view(dtype)
    zigzag(words, spare=np.empty_like(words))
    assert words.tolist() == [0, 1, 2, 3, 4]


@given(st.sampled_from([1, 2, 4, 8]), st.binary(max_size=400))
def test_zigzag_any_bits_are_restored(width, data):
    words = np.frombuffer(data[: len(data) // width * width], UNSIGNED[width]).copy()
    before, spare = words.tobytes(), np.empty_like(words)
    zigzag(words, spare=spare)
    unzigzag(words, spare=spare)
    assert words.tobytes() == before


@pytest.mark.parametrize("width", [4, 8])
def test_pairs_of_words_are_restored(width):
    words = np.random.default_rng(0).integers(0, 256, 99 * width, dtype="u1").view(UNSIGNED[width])
    again = np.full_like(words, 0xAA)
    pair = np.empty(99, U16)
    for position in range(width // 2):
        take_pair(words, position, out=pair)
        assert pair.tobytes() == words.view(U16)[position :: width // 2].tobytes()
        give_pair(again, position, pair=pair)
    assert again.tobytes() == words.tobytes()


def test_split_pair_is_restored():
    pair = np.arange(0, 65536, 7, dtype=U16)
    low, high, again = np.empty(pair.size, "u1"), np.empty(pair.size, "u1"), np.empty_like(pair)
    split_pair(pair.copy(), low=low, high=high)
    join_pair(low, high, out=again)
    np.testing.assert_array_equal(again, pair)
    np.testing.assert_array_equal(high, pair >> 8)


@given(st.integers(0, 200), st.randoms(use_true_random=False))
def test_nibbles_any_count_are_restored(count, random):
    half = nibble_nbytes(count)
    values = np.zeros(2 * half, "u1")
    values[:count] = [random.randrange(16) for _ in range(count)]
    packed, again = np.empty(half, "u1"), np.empty(2 * half, "u1")
    pack_nibbles(values, out=packed)
    unpack_nibbles(packed, out=again)
    np.testing.assert_array_equal(again, values)


@given(st.integers(0, 16), st.lists(st.integers(0, 65535), max_size=100))
def test_bits_any_width_are_restored(width, numbers):
    values = np.array(numbers, U16) & np.uint16((1 << width) - 1)
    packed = np.empty(width * -(-values.size // 8), "u1")
    pack_bits(values, width=width, out=packed)
    again = np.full_like(values, 7)
    unpack_bits(packed, width=width, out=again)
    np.testing.assert_array_equal(again, values)


def test_checksum_known_value():
    assert checksum(b"123456789") == 0xE3069283
    assert checksum(np.frombuffer(b"12345678", "f8").reshape(1, 1)) == checksum(b"12345678")
    assert checksum(b"") == 0


def test_as_bytes_strided_memory_is_refused():
    with pytest.raises(CodecError, match="contiguous"):
        as_bytes(np.arange(10)[::2])


def test_as_bytes_objects_are_refused():
    with pytest.raises(TypeError):
        as_bytes(np.array([None, {}], object))
