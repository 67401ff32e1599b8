import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.dtypes import (
    TORCH_ONLY,
    codec_dtype,
    is_plain,
    itemsize_of,
    numpy_dtype,
    zarr_dtype,
)

PLAIN = [
    "bool",
    "int8",
    "uint16",
    "int32",
    "uint64",
    "float16",
    "float32",
    "float64",
    "complex64",
    "complex128",
]


@pytest.mark.parametrize("name", sorted(TORCH_ONLY))
def test_torch_only_dtype_has_the_width_that_torch_gives_it(name):
    width = torch.zeros(0, dtype=torch.uint8).view(getattr(torch, name)).element_size()
    assert itemsize_of(name) == width
    assert zarr_dtype(name) == f"uint{8 * width}"


@pytest.mark.parametrize("name", PLAIN)
def test_plain_dtype_is_read_by_zarr_under_its_own_name(name):
    assert zarr_dtype(name) == name == codec_dtype(name)
    assert itemsize_of(name) == np.dtype(name).itemsize
    assert is_plain(name)


@pytest.mark.parametrize(
    ("name", "stored", "codec"),
    [
        ("bfloat16", "uint16", "bfloat16"),
        ("float8_e4m3fn", "uint8", "float8_e4m3fn"),
        (">f4", "uint32", "uint32"),
        ("<M8[ns]", "uint64", "uint64"),
        ("<U5", "uint8", "uint8"),
        ("complex32", "uint32", "uint32"),
    ],
)
def test_dtype_that_zarr_lacks_is_stored_as_unsigned_integers(name, stored, codec):
    assert zarr_dtype(name) == stored
    assert codec_dtype(name) == codec
    assert np.dtype(stored).itemsize in (1, itemsize_of(name))


@pytest.mark.parametrize(
    "name",
    [
        "",
        "O",
        "|O",
        "object",
        "f4,f4",
        "(2,)f4",
        "<U0",
        "|S0",
        "T",
        "a5",
        "float",
        "i4",
        "=f4",
        "nonsense",
        "f" * 10**6,
        *("<U999999999", "|V9999999999999", "float128", "<f3", "M8[ns", "<M8[xx]", "float32\n"),
    ],
)
def test_dtype_name_unfit_for_storage_raises_layout_error(name):
    with pytest.raises(LayoutError):
        itemsize_of(name)


@given(
    st.one_of(npst.scalar_dtypes(), npst.byte_string_dtypes(min_len=1), npst.unicode_string_dtypes(min_len=1))
)
def test_numpy_dtype_spelled_by_str_comes_back(dtype):
    assert numpy_dtype(dtype.str) == dtype
    assert itemsize_of(dtype.str) == dtype.itemsize


@given(st.text(max_size=12))
def test_numpy_dtype_of_any_text_is_found_or_refused(text):
    try:
        found = numpy_dtype(text)
    except LayoutError:
        return
    assert not found.hasobject
    assert found.itemsize > 0
