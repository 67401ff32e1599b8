import google_crc32c
import numpy as np
import pytest
from fastcheck_codecs import CodecError, checksum
from fastcheck_codecs.bitops import (
    BOOL,
    SCRATCH,
    U16,
    UNSIGNED,
    Checksum,
    as_bytes,
    balance,
    fingerprint,
    give_pair,
    join_pair,
    pack,
    pack_bits,
    packed_nbytes,
    padded_mask,
    positions,
    split_pair,
    take_pair,
    unpack,
    unpack_bits,
    widen,
)
from hypothesis import given
from hypothesis import strategies as st


@pytest.mark.parametrize("width", [1, 2, 4, 8])
def test_balance_small_numbers_of_either_sign_are_zero_above_their_digit(width):
    words = np.array([0, -1, 1, -128, 127], f"i{width}").view(UNSIGNED[width])
    balance(words)
    digits = words.view("i1").reshape(-1, width)
    assert digits[:, 0].tolist() == [0, -1, 1, -128, 127]
    assert not digits[:, 1:].any()


@given(st.sampled_from([1, 2, 4, 8]), st.binary(max_size=400))
def test_balance_digits_add_up_to_the_number(width, data):
    words = np.frombuffer(data[: len(data) // width * width], UNSIGNED[width])
    balanced = words.copy()
    balance(balanced)
    digits = balanced.view("i1").reshape(-1, width).astype("i8")
    places = np.array([1 << 8 * place for place in range(width)], "i8")
    assert ((digits * places).sum(axis=1).astype(words.dtype) == words).all()


def test_fingerprint_is_the_crc_of_the_start_of_each_page():
    data = np.random.default_rng(0).integers(0, 256, 3 * 4096 + 100, dtype="u1")
    looked_at = b"".join(data[start : start + 64].tobytes() for start in (0, 4096, 8192))
    assert fingerprint(data) == google_crc32c.value(looked_at) & 0xFFFFFF
    other = data.copy()
    other[4096 + 63] ^= 1
    assert fingerprint(other) != fingerprint(data)


def test_plain_pair_gives_no_carry_to_the_one_above():
    words = np.array([0x0001FFFF, 0xFFFF8000], "u4")
    pair = np.empty(2, U16)
    take_pair(words, 1, out=pair, signed=True, plain=1)
    assert pair.tolist() == [1, 0xFFFF]
    take_pair(words, 1, out=pair, signed=True)
    assert pair.tolist() == [2, 0]


@pytest.mark.parametrize("width", [2, 4, 8])
def test_pairs_of_words_are_restored(width):
    words = np.random.default_rng(0).integers(0, 256, 99 * width, dtype="u1").view(UNSIGNED[width])
    again = np.full_like(words, 0xAA)
    pair = np.empty(99, U16)
    for position in range(width // 2):
        take_pair(words, position, out=pair)
        assert pair.tobytes() == words.view(U16)[position :: width // 2].tobytes()
        give_pair(again, position, pair=pair)
    assert again.tobytes() == words.tobytes()


@given(st.sampled_from([2, 4, 8]), st.binary(max_size=400))
def test_pairs_of_signed_words_are_restored(width, data):
    words = np.frombuffer(data[: len(data) // width * width], UNSIGNED[width])
    again = np.full_like(words, 0xAA)
    pair = np.empty(words.size, U16)
    for position in range(width // 2):
        take_pair(words, position, out=pair, signed=True)
        give_pair(again, position, pair=pair, signed=True)
    assert again.tobytes() == words.tobytes()


def test_pairs_of_small_signed_words_are_zero_above_the_first():
    words = np.array([-1, -32768, 32767, 5], "i8").view("u8")
    pair = np.empty(4, U16)
    take_pair(words, 0, out=pair, signed=True)
    assert pair.view("i2").tolist() == [-1, -32768, 32767, 5]
    for position in (1, 2, 3):
        take_pair(words, position, out=pair, signed=True)
        assert not pair.any()


@pytest.mark.parametrize("signed", [False, True])
def test_split_pair_is_restored(signed):
    pair = np.arange(65536).astype(U16)
    low, high, again = np.empty(pair.size, "u1"), np.empty(pair.size, "u1"), np.empty_like(pair)
    split_pair(pair.copy(), low=low, high=high, signed=signed)
    join_pair(low, high, out=again, signed=signed)
    np.testing.assert_array_equal(again, pair)
    small = high == 0
    widen(low, out=again, signed=signed)
    np.testing.assert_array_equal(again[small], pair[small])
    assert np.count_nonzero(small) == 256


@given(st.lists(st.booleans(), max_size=300), st.sampled_from([1, 3, 50]))
def test_positions_any_density_are_found(truths, thinning):
    count = len(truths) * thinning
    wanted = np.zeros(count, np.bool_)
    wanted[::thinning] = truths
    SCRATCH.room("mask", count + 8, BOOL)[:] = True
    mask = padded_mask(count)
    mask[:count] = wanted
    np.testing.assert_array_equal(positions(mask), np.flatnonzero(wanted))


@given(st.sampled_from([2, 4]), st.integers(0, 300), st.randoms(use_true_random=False))
def test_packed_values_any_count_are_restored(width, count, random):
    size = packed_nbytes(count, width)
    assert size % 8 == 0
    assert size * 8 >= count * width
    values = np.zeros(size * 8 // width, "u1")
    values[:count] = [random.randrange(1 << width) for _ in range(count)]
    packed, again = np.empty(size, "u1"), np.empty_like(values)
    pack(values, width=width, out=packed)
    unpack(packed, width=width, out=again)
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


@given(st.lists(st.binary(max_size=50)))
def test_checksum_piece_by_piece_is_that_of_the_whole(pieces):
    growing = Checksum()
    for piece in pieces:
        growing.update(np.frombuffer(piece, "u1"))
    assert growing.value == checksum(b"".join(pieces))


def test_as_bytes_strided_memory_is_refused():
    with pytest.raises(CodecError, match="contiguous"):
        as_bytes(np.arange(10)[::2])


def test_as_bytes_objects_are_refused():
    with pytest.raises(TypeError):
        as_bytes(np.array([None, {}], object))
