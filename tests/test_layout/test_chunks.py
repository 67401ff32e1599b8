import math

import numpy as np
import pytest
import zarr
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.chunks import ALIGNMENT, ArraySpec, chunk_shape_for, is_contiguous, place

SHAPES = st.lists(st.integers(0, 9), max_size=4).map(tuple)


def spec_of(shape, chunk_bytes, dtype="float32"):
    itemsize = np.dtype(dtype).itemsize
    return ArraySpec("w", dtype, shape, chunk_shape_for(shape, itemsize, chunk_bytes))


@given(SHAPES, st.integers(1, 400), st.sampled_from(["uint8", "float32", "complex128"]))
def test_chunks_of_any_shape_cover_the_array_in_order_within_the_limit(shape, chunk_bytes, dtype):
    spec = spec_of(shape, chunk_bytes, dtype)
    end = 0
    for chunk in spec.chunks:
        assert chunk.offset == end
        assert 0 < chunk.nbytes <= max(chunk_bytes, spec.itemsize)
        end += chunk.nbytes
    assert end == spec.nbytes == math.prod(shape) * spec.itemsize
    assert len(spec.chunks) == spec.chunk_count
    assert len({chunk.key for chunk in spec.chunks}) == len(spec.chunks)
    assert is_contiguous(spec.shape, spec.chunk_shape)


@given(SHAPES, st.integers(1, 120))
def test_chunks_of_any_shape_are_the_chunks_of_zarr(shape, chunk_bytes):
    """Cut the bits as the specification says, and let the index in each key say where zarr would cut."""
    spec = spec_of(shape, chunk_bytes, "uint8")
    array = np.arange(math.prod(shape), dtype=np.uint32).astype(np.uint8).reshape(shape)
    bits = array.tobytes()
    for chunk in spec.chunks:
        index = [int(i) for i in chunk.key.split("/")[2:]]
        where = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, spec.chunk_shape, strict=True))
        assert bits[chunk.offset : chunk.offset + chunk.nbytes] == array[where].tobytes()


def test_chunks_put_under_their_keys_are_read_by_stock_zarr():
    spec = spec_of((3, 8, 5), 80, "int32")
    data = np.arange(120, dtype="<i4").reshape(spec.shape)
    held = {}
    store = zarr.storage.MemoryStore(store_dict=held)
    zarr.create_array(
        store,
        name="w",
        shape=spec.shape,
        chunks=spec.chunk_shape,
        dtype="int32",
        compressors=None,
        filters=None,
    )
    for chunk in spec.chunks:
        piece = data.tobytes()[chunk.offset : chunk.offset + chunk.nbytes]
        held[chunk.key] = zarr.core.buffer.cpu.Buffer.from_bytes(piece)
    assert len(spec.chunks) == 6
    np.testing.assert_array_equal(zarr.open_array(store, path="w", mode="r")[:], data)


@given(SHAPES, st.lists(st.integers(0, 9), max_size=4).map(tuple))
def test_contiguous_chunk_shape_gives_chunks_that_add_up(shape, chunk_shape):
    if is_contiguous(shape, chunk_shape):
        spec = ArraySpec("w", "uint8", shape, chunk_shape)
        array = np.arange(math.prod(shape), dtype=np.uint32).astype(np.uint8).reshape(shape)
        for chunk in spec.chunks:
            index = [int(i) for i in chunk.key.split("/")[2:]]
            where = tuple(slice(i * c, (i + 1) * c) for i, c in zip(index, chunk_shape, strict=True))
            assert array.tobytes()[chunk.offset : chunk.offset + chunk.nbytes] == array[where].tobytes()


@pytest.mark.parametrize("chunk_shape", [(5, 5), (2, 9), (10,), (10, 10, 1), (0, 10)])
def test_chunk_shape_that_is_no_run_of_one_axis_is_not_contiguous(chunk_shape):
    assert not is_contiguous((10, 10), chunk_shape)


@pytest.mark.parametrize("nbytes", [2**31 - 1, 2**31, 2**31 + 17, 2**40 + 1])
def test_chunks_of_array_beyond_two_gib_stay_below_the_limit(nbytes):
    spec = spec_of((nbytes,), 8 * 2**20, "uint8")
    assert sum(chunk.nbytes for chunk in spec.chunks) == nbytes
    assert max(chunk.nbytes for chunk in spec.chunks) <= 8 * 2**20
    assert spec.chunks[-1].offset + spec.chunks[-1].nbytes == nbytes


@pytest.mark.parametrize("shape", [(0,), (0, 5), (3, 0, 2), (2**61, 0, 2**61)])
def test_chunks_of_array_without_elements_are_none(shape):
    spec = spec_of(shape, 100)
    assert spec.chunks == ()
    assert spec.chunk_count == spec.nbytes == 0
    assert min(spec.chunk_shape) >= 1


def test_chunk_key_of_array_without_axes_is_that_of_zarr():
    assert [chunk.key for chunk in spec_of((), 100).chunks] == ["w/c"]


def test_chunk_count_of_huge_axis_is_exact():
    assert ArraySpec("w", "uint8", (2**61 + 1,), (2,)).chunk_count == 2**60 + 1


def test_chunk_shape_with_limit_below_one_raises():
    with pytest.raises(LayoutError, match="chunk_bytes"):
        chunk_shape_for((3,), 4, 0)


@given(st.lists(SHAPES, max_size=6))
def test_placement_of_arrays_is_aligned_and_free_of_overlap(shapes):
    specs = [ArraySpec(str(i), "float32", s, chunk_shape_for(s, 4, 64)) for i, s in enumerate(shapes)]
    found = place(specs)
    end = 0
    for spec in specs:
        begin = found.offsets[spec.path]
        assert begin % ALIGNMENT == 0
        assert begin >= end
        end = begin + spec.nbytes
    assert end <= found.total_bytes < end + ALIGNMENT
