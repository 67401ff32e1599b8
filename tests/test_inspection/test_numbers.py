from __future__ import annotations

import numpy as np
import pytest
import torch

from fastcheck_dask.inspection.numbers import as_numbers

NARROW = ["float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz", "float8_e8m0fnu"]


@pytest.mark.parametrize("dtype", NARROW)
def test_every_code_of_eight_bits_is_what_torch_makes_of_it(dtype):
    codes = np.arange(256, dtype=np.uint8)
    wanted = torch.from_numpy(codes).view(getattr(torch, dtype)).to(torch.float64).numpy()
    assert np.array_equal(as_numbers(codes, dtype), wanted, equal_nan=True)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_code_of_sixteen_bits_is_what_torch_makes_of_it(dtype):
    codes = np.arange(65536, dtype=np.uint16)
    wanted = torch.from_numpy(codes).view(getattr(torch, dtype)).to(torch.float64).numpy()
    assert np.array_equal(as_numbers(codes.view(np.uint8), dtype), wanted, equal_nan=True)


@pytest.mark.parametrize(
    "values",
    [
        np.float32([1.5, -0.0, np.inf, np.nan]),
        np.array([1.5, 2.5], ">f8"),
        np.array([-3, 7], np.int16),
        np.array([True, False]),
        np.uint64([2**63, 1]),
    ],
    ids=lambda values: values.dtype.str,
)
def test_plain_dtypes_are_converted(values):
    name = values.dtype.name if values.dtype.isnative else values.dtype.str
    assert np.array_equal(as_numbers(values.view(np.uint8), name), values.astype(np.float64), equal_nan=True)


def test_complex_gives_its_parts_and_text_nothing():
    values = np.complex64([1 + 2j, 3 - 4j])
    assert as_numbers(values.view(np.uint8), "complex64").tolist() == [1, 2, 3, -4]
    assert as_numbers(np.float16([1, 2]).view(np.uint8), "complex32").tolist() == [1, 2]
    for dtype in ("<U1", "<M8[s]", "bits8", "float4_e2m1fn_x2"):
        assert as_numbers(np.zeros(8, np.uint8), dtype) is None
