"""Payloads that nobody tried to make smaller."""

from __future__ import annotations

import numpy as np
import pytest
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta, encode_raw_into, max_encoded_nbytes, summary
from hypothesis import given
from hypothesis import strategies as st

DTYPES = ["float32", "bfloat16", "float64", "uint8", "int64", "complex64", "float8_e4m3fn", "unknown"]


@given(st.binary(max_size=5000), st.sampled_from(DTYPES), st.integers(0, 7))
def test_encode_raw_any_bytes_come_back_by_either_codec(data, dtype, offset):
    raw = np.frombuffer(bytes(offset) + data, np.uint8)[offset:]
    out = np.empty(max_encoded_nbytes(raw.size), np.uint8)
    payload = out[: encode_raw_into(raw, out, dtype=dtype)]
    assert not summary(payload).is_delta
    for codec in (PrefixIndex(), XorDelta(), XorDelta(base=raw)):
        assert codec.decode(payload).tobytes() == data


@pytest.mark.parametrize("nbytes", [2**20 - 1, 2**20, 2**20 + 1, 3 * 2**20 + 5])
def test_encode_raw_around_the_block_size_is_as_long_as_the_bits(nbytes):
    raw = np.full(nbytes, 7, np.uint8)
    out = np.empty(max_encoded_nbytes(nbytes), np.uint8)
    length = encode_raw_into(raw, out, dtype="float32")
    assert nbytes <= length <= 1.001 * nbytes + 64
    assert (PrefixIndex().decode(out[:length]) == raw).all()


def test_encode_raw_flipped_bit_is_an_error():
    raw = np.arange(1000, dtype=np.uint16).view(np.uint8)
    out = np.empty(max_encoded_nbytes(raw.size), np.uint8)
    payload = out[: encode_raw_into(raw, out, dtype="uint16")]
    payload[-100] ^= 4
    with pytest.raises(CodecError):
        PrefixIndex().decode(payload)


def test_encode_raw_too_small_out_is_an_error():
    with pytest.raises(CodecError):
        encode_raw_into(np.ones(100, np.uint8), np.empty(100, np.uint8), dtype="uint8")
