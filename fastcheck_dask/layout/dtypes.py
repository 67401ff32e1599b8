"""Names of dtypes: the true one, its width, and the one that stock zarr can read."""

from __future__ import annotations

import re
from functools import lru_cache

import numpy as np

from fastcheck_dask.errors import LayoutError

#: Dtypes of torch that numpy lacks, with their width in bytes. zarr stores them as unsigned integers.
TORCH_ONLY = {
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e4m3fnuz": 1,
    "float8_e5m2": 1,
    "float8_e5m2fnuz": 1,
    "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
    "complex32": 4,
    **{f"uint{bits}": 1 for bits in range(1, 8)},
    **{f"int{bits}": 1 for bits in range(1, 8)},
    "bits8": 1,
    "bits16": 2,
    "bits1x8": 1,
    "bits2x4": 1,
    "bits4x2": 1,
}

_PLAIN = frozenset(
    (
        *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
        *("float16", "float32", "float64", "complex64", "complex128"),
    )
)

#: ``dtype.str`` of plain elements. Names come from storage: numpy also parses records and old aliases.
_SPELLED = re.compile(r"[<>|][biufcmMSUV][0-9]{0,9}(\[[0-9]{0,9}[a-zA-Z]{1,7}(/[0-9]{1,9})?\])?\Z")


def is_plain(name: str) -> bool:
    """Say whether stock zarr, numpy and torch all know a dtype by this name."""
    return name in _PLAIN


@lru_cache(maxsize=1024)
def itemsize_of(dtype: str) -> int:
    """Return the bytes of one element of the dtype named `dtype`; `LayoutError` for an unknown name."""
    if dtype in TORCH_ONLY:
        return TORCH_ONLY[dtype]
    return numpy_dtype(dtype).itemsize


@lru_cache(maxsize=1024)
def numpy_dtype(dtype: str) -> np.dtype[np.generic]:
    """Return the numpy dtype of that name (``"float32"``, ``"<M8[ns]"``); `LayoutError` if there is none."""
    if dtype not in _PLAIN and not _SPELLED.match(dtype):
        raise LayoutError(f"unknown dtype {dtype[:64]!r}")
    try:
        found = np.dtype(dtype)
    except (TypeError, ValueError, SyntaxError) as error:
        raise LayoutError(f"unknown dtype {dtype!r}") from error
    if found.str != dtype and dtype not in _PLAIN:
        raise LayoutError(f"dtype {dtype!r} must be spelled {found.str!r}")
    if found.hasobject or found.names is not None or found.subdtype is not None or found.itemsize == 0:
        raise LayoutError(f"dtype {dtype!r} cannot be stored: only plain elements of fixed size can")
    return found


def zarr_dtype(dtype: str) -> str:
    """Return the dtype under which stock zarr reads the array: itself, or unsigned integers of its width."""
    if dtype in _PLAIN:
        return dtype
    width = itemsize_of(dtype)
    return f"uint{8 * width}" if width in (1, 2, 4, 8) else "uint8"


def codec_dtype(dtype: str) -> str:
    """Return the dtype by which the codecs choose how to split the bits."""
    if dtype in _PLAIN or dtype == "bfloat16" or dtype.startswith("float8"):
        return dtype
    return zarr_dtype(dtype)
