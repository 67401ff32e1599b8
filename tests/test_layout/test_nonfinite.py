"""NaN and infinities are found by their exponents, as numpy and torch find them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.layout.nonfinite import has_nonfinite, is_float

PLAIN = ("float16", "float32", "float64", "complex64", "complex128")
OF_TORCH = ("bfloat16", "float8_e4m3fn", "float8_e5m2")


@pytest.mark.parametrize("dtype", PLAIN)
@given(bits=st.binary(max_size=400))
def test_has_nonfinite_agrees_with_numpy(dtype, bits):
    width = np.dtype(dtype).itemsize
    values = np.frombuffer(bits[: len(bits) // width * width], dtype)
    assert has_nonfinite(values.view(np.uint8), dtype) == (not np.isfinite(values).all())


@pytest.mark.parametrize("dtype", OF_TORCH)
def test_has_nonfinite_agrees_with_torch_on_every_value(dtype):
    width = torch.empty(0, dtype=getattr(torch, dtype)).element_size()
    for bits in np.arange(2 ** (8 * width), dtype=f"uint{8 * width}")[:: 1 if width == 1 else 7]:
        value = torch.from_numpy(np.array([bits]).view(f"int{8 * width}")).view(getattr(torch, dtype))
        expected = not bool(torch.isfinite(value.float()).all())
        assert has_nonfinite(np.array([bits]).view(np.uint8), dtype) == expected


def test_has_nonfinite_looks_at_the_last_value_of_a_long_array():
    values = np.ones(200_001, np.float32)
    assert not has_nonfinite(values.view(np.uint8), "float32")
    values[-1] = -np.inf
    assert has_nonfinite(values.view(np.uint8), "float32")


def test_has_nonfinite_of_what_has_no_such_values_is_false():
    ones = np.full(16, 0xFF, np.uint8)
    for dtype in ("int64", "uint8", "bool", "float8_e4m3fnuz", "<U4"):
        assert not has_nonfinite(ones, dtype)
        assert not is_float(dtype)
