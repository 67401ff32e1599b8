"""Stored bits as numbers that numpy can compute with, whatever the dtype. Pure."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_dask.layout.dtypes import TORCH_ONLY, numpy_dtype
from fastcheck_dask.layout.leaves import Bits

#: Exponent bits, mantissa bits and bias of the narrow floats that numpy lacks, and whether they have
#: infinities, or one NaN in place of the negative zero.
_NARROW = {
    "float8_e4m3fn": (4, 3, 7, "finite"),
    "float8_e4m3fnuz": (4, 3, 8, "one nan"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "one nan"),
}


def as_numbers(bits: Bits, dtype: str) -> npt.NDArray[np.float64] | None:
    """Return the values of stored elements.

    Parameters
    ----------
    bits : ndarray of uint8, shape (n * itemsize,)
        In C order.
    dtype : str
        True dtype.

    Returns
    -------
    ndarray of float64 or None
        Shape (n,); complex numbers give their real and imaginary parts, shape (2n,). Whole numbers beyond
        2**53 are rounded. None if the elements are no numbers (text, times, packed ones).
    """
    if dtype == "bfloat16":
        return _widened((bits.view("<u2").astype(np.uint32) << np.uint32(16)).view(np.float32))
    if dtype in _NARROW:
        return _table(dtype)[bits]
    if dtype == "float8_e8m0fnu":
        return _powers()[bits]
    if dtype == "complex32":
        return _widened(bits.view("<f2"))
    if dtype in TORCH_ONLY:
        return None
    found = numpy_dtype(dtype)
    if found.kind == "c":
        found = np.dtype(f"{found.byteorder}f{found.itemsize // 2}")
    if found.kind not in "fiub":
        return None
    return _widened(bits.view(found))


def _widened(values: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    # Signalling NaNs are what they are.
    with np.errstate(invalid="ignore"):
        return values.astype(np.float64)


@lru_cache(maxsize=8)
def _table(dtype: str) -> npt.NDArray[np.float64]:
    exponent_bits, mantissa_bits, bias, kind = _NARROW[dtype]
    codes = np.arange(256)
    sign = np.where(codes >= 128, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = (codes & (1 << mantissa_bits) - 1) / (1 << mantissa_bits)
    normal = exponent > 0
    values: npt.NDArray[np.float64] = (
        sign * np.where(normal, 1.0 + mantissa, mantissa) * 2.0 ** (np.where(normal, exponent, 1) - bias)
    )
    if kind == "one nan":
        values[128] = np.nan
    elif kind == "finite":
        values[[127, 255]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values = np.where(top, np.where(mantissa == 0, sign * np.inf, np.nan), values)
    return values


@lru_cache(maxsize=1)
def _powers() -> npt.NDArray[np.float64]:
    values: npt.NDArray[np.float64] = np.exp2(np.arange(256) - 127.0)
    values[255] = np.nan
    return values
