import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, RawRoom, XorDelta, checksum, encode_raw_into, raw_parts
from fastcheck_codecs.bitops import BLOCK_NBYTES
from fastcheck_codecs.header import max_encoded_nbytes
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ["float32", "bfloat16", "float64", "uint8", "complex64", "opaque"]
SIZES = [1, 3, 8, 9, 4097, BLOCK_NBYTES, BLOCK_NBYTES + 1, 2 * BLOCK_NBYTES + 13]


def noise(nbytes, seed=0):
    return np.random.default_rng(seed).integers(1, 256, nbytes, np.uint8)


def fill(room, payload):
    """Do what a store does with a payload that has the length of the parts."""
    start = 0
    for part in room.parts:
        part[:] = payload[start : start + part.size]
        start += part.size
    assert start == payload.size == room.nbytes


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nbytes", SIZES)
def test_parts_are_the_payload_that_stores_blocks_raw(nbytes, dtype):
    raw = noise(nbytes)
    parts = raw_parts(raw, dtype=dtype)
    out = np.empty(max_encoded_nbytes(nbytes), np.uint8)
    assert np.array_equal(np.concatenate(parts), out[: encode_raw_into(raw, out, dtype=dtype)])
    assert np.shares_memory(parts[1], raw) or parts[1].size == 0
    known = raw_parts(raw, dtype=dtype, crc=checksum(raw))
    assert all(np.array_equal(mine, theirs) for mine, theirs in zip(known, parts, strict=True))


@given(st.binary(max_size=100), st.sampled_from(DTYPES))
def test_parts_of_any_bytes_decode_and_read_back(data, dtype):
    raw = np.frombuffer(data, np.uint8)
    payload = np.concatenate(raw_parts(raw, dtype=dtype))
    assert bytes(PrefixIndex(dtype=dtype).decode(payload)) == data
    target = np.full(raw.size, 0xAA, np.uint8)
    room = RawRoom(target, dtype)
    fill(room, payload)
    assert room.settle()
    assert target.tobytes() == data


def test_room_payload_of_that_length_that_is_not_raw_is_given_back():
    raw = noise(4096)
    room = RawRoom(np.zeros(4096, np.uint8), "float32")
    delta = XorDelta(base=noise(4096, 1), dtype="float32").encode(raw)
    assert delta.size == room.nbytes
    fill(room, delta)
    assert room.settle() is False
    assert np.array_equal(room.payload(), delta)


def test_room_payload_of_other_words_is_given_back():
    raw = noise(4096)
    room = RawRoom(np.zeros(4096, np.uint8), "float32")
    payload = np.concatenate(raw_parts(raw, dtype="bfloat16"))
    fill(room, payload)
    assert room.settle() is False
    assert np.array_equal(PrefixIndex(dtype="float32").decode(room.payload()), raw)


@pytest.mark.parametrize("place", range(48))
def test_room_damaged_header_is_refused(place):
    payload = np.concatenate(raw_parts(noise(4096), dtype="float32"))
    payload[place] ^= 0x10
    room = RawRoom(np.zeros(4096, np.uint8), "float32")
    fill(room, payload)
    with pytest.raises(CodecError):
        room.settle()
