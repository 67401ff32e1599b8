from __future__ import annotations

import io
import json
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError
from fastcheck_dask.inspection.safetensors import Tensor, header, read_header

TENSORS = st.lists(
    st.builds(
        Tensor,
        st.text(min_size=1, max_size=9).filter(lambda name: name != "__metadata__" and name.isprintable()),
        st.sampled_from(["float32", "bfloat16", "bool", "int64", "float8_e4m3fn", "complex64"]),
        st.lists(st.integers(0, 4), max_size=3).map(tuple),
    ),
    unique_by=lambda tensor: tensor.name,
)


@given(TENSORS, st.dictionaries(st.text(max_size=5), st.text(max_size=5), max_size=2))
def test_header_reads_back_and_is_aligned(tensors, metadata):
    data = header(tensors, metadata)
    assert len(data) % 8 == 0
    size = len(data) + sum(tensor.nbytes for tensor in tensors)
    found = read_header(io.BytesIO(data), size, where="file")
    assert sorted((t for t, _ in found.tensors), key=str) == sorted(tensors, key=str)
    assert found.metadata == metadata


def read(document, size=None, *, text=None, length=None):
    data = (json.dumps(document) if text is None else text).encode()
    data = struct.pack("<Q", len(data) if length is None else length) + data
    return read_header(io.BytesIO(data), len(data) + 8 if size is None else size, where="f.safetensors")


def entry(first=0, last=8, **changed):
    return {"dtype": "F32", "shape": [2], "data_offsets": [first, last]} | changed


@pytest.mark.parametrize("length", [0, 1, 2**63, 2**64 - 1, 100_000_001, 10_000])
def test_length_that_does_not_fit_is_refused_before_anything_is_read(length):
    with pytest.raises(UnknownFormatError, match="no safetensors file"):
        read({}, length=length)


@pytest.mark.parametrize(
    ("document", "said"),
    [
        ({"a": entry(0, 4)}, "wanted 8 from 0"),
        ({"a": entry(4, 12)}, "wanted 8 from 0"),
        ({"a": entry(), "b": entry()}, "wanted 8 from 8"),
        ({"a": entry(), "b": entry(16, 24)}, "wanted 8 from 8"),
        ({"a": entry(shape=[-2])}, "damaged"),
        ({"a": entry(shape=[2.0])}, "damaged"),
        ({"a": entry(shape=[True, 2])}, "damaged"),
        ({"a": entry(shape=[2**61, 2**61])}, "wanted"),
        ({"a": entry(dtype="F4")}, "not known"),
        ({"a": entry(dtype=["F32"])}, "not known"),
        ({"a": entry(more=1)}, "damaged"),
        ({"a": []}, "damaged"),
        ({}, "adds up to"),
        ([], "no JSON object"),
        ({"__metadata__": {"a": 1}}, "is not text"),
    ],
)
def test_entry_that_cannot_be_is_refused(document, said):
    with pytest.raises(CorruptDataError, match=said):
        read(document)


def test_name_that_stands_twice_is_refused():
    one = json.dumps(entry())
    with pytest.raises(CorruptDataError, match="twice"):
        read(None, text=f'{{"a": {one}, "a": {one}}}')


def test_dtype_that_the_format_lacks_and_equal_names_are_refused():
    with pytest.raises(LayoutError, match="w: safetensors has no dtype for complex128"):
        header([Tensor("w", "complex128", (1,))], {})
    with pytest.raises(LayoutError, match="'w'"):
        header([Tensor("w", "bool", (1,))] * 2, {})
