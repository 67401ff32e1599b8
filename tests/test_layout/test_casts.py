from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from fastcheck_dask.layout import casts
from fastcheck_dask.layout.casts import CAST_DTYPES, cast, is_cast

DTYPES = sorted(CAST_DTYPES)
#: Ties, the largest finite values and what rounds beyond them, subnormals of each dtype, zero, infinity.
EDGES = [
    *(0x3F80_8000, 0x3F81_8000, 0x3F80_7FFF, 0x3F80_8001, 0x3F80_1000, 0x3F80_3000, 0x3F80_0FFF),
    *(0x7F7F_FFFF, 0x7F7F_7FFF, 0x7F7F_8000, 0x477F_EFFF, 0x477F_F000, 0x477F_E000, 0x7F80_0000),
    *(
        0,
        1,
        0x8000,
        0x8001,
        0x7FFF,
        0x1_8000,
        0x007F_FFFF,
        0x0080_0000,
        0x3300_0000,
        0x3300_0001,
        0x3380_0000,
    ),
]
NANS = [0x7FC0_0000, 0x7F80_0001, 0x7FFF_FFFF, 0x7FC1_2345, 0x7FBF_FFFF]
WORDS = st.integers(0, 2**32 - 1) | st.sampled_from([sign | edge for edge in EDGES for sign in (0, 2**31)])


def by_torch(bits, dtype):
    values = torch.from_numpy(bits.view(np.float32).copy())
    return values.to(getattr(torch, dtype)).view(torch.uint8).numpy()


def finite_or_infinite(words):
    return np.where((words & 0x7FFF_FFFF) > 0x7F80_0000, words & np.uint32(0xFF80_0000), words)


@pytest.mark.parametrize("dtype", DTYPES)
@given(arrays(np.uint32, st.integers(1, 70), elements=WORDS).map(finite_or_infinite))
def test_cast_gives_the_bits_of_torch(dtype, words):
    bits = words.view(np.uint8)
    made = cast(bits, dtype)
    assert made.tobytes() == by_torch(bits, dtype).tobytes()
    assert is_cast(bits, made, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_every_upper_half_and_the_edges_of_the_lower_gives_the_bits_of_torch(dtype):
    upper = np.arange(2**16, dtype=np.uint32) << 16
    for lower in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0xFFFF):
        bits = finite_or_infinite(upper | np.uint32(lower)).view(np.uint8)
        assert cast(bits, dtype).tobytes() == by_torch(bits, dtype).tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_into_out_of_several_blocks(dtype, monkeypatch):
    bits = np.random.default_rng(1).normal(size=1000).astype(np.float32).view(np.uint8)
    whole = cast(bits, dtype)
    monkeypatch.setattr(casts, "_BLOCK", 64)
    out = np.zeros(2000, np.uint8)
    assert cast(bits, dtype, out=out) is out
    assert out.tobytes() == whole.tobytes()
    assert is_cast(bits, out, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 199), st.integers(0, 15))
def test_is_cast_one_bit_off_anywhere_is_not(dtype, index, bit):
    bits = np.random.default_rng(1).normal(size=200).astype(np.float32).view(np.uint8)
    made = cast(bits, dtype)
    made.view(np.uint16)[index] ^= np.uint16(1 << bit)
    assert not is_cast(bits, made, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("nan", NANS)
@pytest.mark.parametrize("sign", [0, 2**31])
def test_is_cast_nan_is_not_whoever_made_the_cast(dtype, nan, sign):
    words = np.full(40, 0x3F80_0000, np.uint32)
    words[17] = nan | sign
    bits = words.view(np.uint8)
    assert not is_cast(bits, by_torch(bits, dtype), dtype)
    assert not is_cast(bits, cast(bits, dtype), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_cast_of_nothing(dtype):
    nothing = np.empty(0, np.uint8)
    assert cast(nothing, dtype).size == 0
    assert is_cast(nothing, nothing, dtype)
