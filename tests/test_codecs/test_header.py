import numpy as np
import pytest
from fastcheck_codecs import (
    CodecError,
    PrefixIndex,
    XorDelta,
    is_delta,
    is_identity,
    max_encoded_nbytes,
    raw_nbytes,
)
from fastcheck_codecs.header import HEADER_NBYTES


def test_questions_full_payload():
    payload = XorDelta().encode(np.ones(300, np.float32))
    assert not is_delta(payload)
    assert not is_identity(payload)
    assert raw_nbytes(payload) == 1200


def test_questions_zeros_are_no_identity():
    assert not is_identity(PrefixIndex().encode(np.zeros(300)))


@pytest.mark.parametrize("count", [0, 1, 3, 4, 9, (1 << 20) + 7])
def test_questions_unchanged_bytes_are_an_identity(count):
    data = np.random.default_rng(0).integers(1, 256, count, dtype="u1")
    payload = XorDelta(base=data.copy(), dtype="float32").encode(data)
    assert is_delta(payload)
    assert is_identity(payload)
    assert raw_nbytes(payload) == count


@pytest.mark.parametrize("place", [0, 4095, 4096, 4097, 4098])
def test_questions_one_changed_bit_is_no_identity(place):
    base = np.random.default_rng(0).integers(0, 256, 4099, dtype="u1")
    data = base.copy()
    data[place] ^= 1
    assert not is_identity(XorDelta(base=base, dtype="float32").encode(data))


@pytest.mark.parametrize("ask", [is_delta, is_identity, raw_nbytes])
def test_questions_damaged_header_is_refused(ask):
    payload = XorDelta().encode(np.arange(300, dtype=np.float32))
    for place in range(HEADER_NBYTES + 8):
        for bit in range(8):
            broken = payload.copy()
            broken[place] ^= 1 << bit
            with pytest.raises(CodecError):
                ask(broken)


@pytest.mark.parametrize(
    "garbage", [b"", b"x", b"FCKZ", bytes(40), b"FCKZ" + bytes(100), b"FCKZ\x01" + b"\xff" * 200]
)
def test_questions_garbage_is_refused(garbage):
    with pytest.raises(CodecError):
        raw_nbytes(garbage)


def test_questions_trailing_byte_is_refused():
    payload = XorDelta().encode(b"abc")
    with pytest.raises(CodecError, match="adds up"):
        raw_nbytes(payload.tobytes() + b"\0")


@pytest.mark.parametrize("nbytes", [0, 1, 7, 8, 1 << 20, (1 << 20) + 1, 5 << 20, 10**12])
def test_max_encoded_nbytes_stays_in_its_bound(nbytes):
    assert nbytes < max_encoded_nbytes(nbytes) <= nbytes + nbytes // 1000 + 64
