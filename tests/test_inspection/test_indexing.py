from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, basic_indices

from fastcheck_dask.inspection.indexing import span


@given(st.data())
def test_span_any_index_gives_what_numpy_gives(data):
    shape = data.draw(array_shapes(max_dims=4, max_side=6, min_side=0))
    key = data.draw(basic_indices(shape, allow_newaxis=True, allow_ellipsis=True))
    whole = np.arange(np.prod(shape)).reshape(shape)
    found = span(shape, key)
    block = whole.reshape(-1)[found.start : found.stop].reshape(found.block)
    assert np.array_equal(block[found.rest], whole[key])


@pytest.mark.parametrize(
    ("key", "start", "stop"),
    [
        (3, 30, 40),
        (-1, 90, 100),
        (slice(2, 4), 20, 40),
        (slice(8, 1, -3), 20, 90),
        ((2, 3), 23, 24),
        ((2, slice(3, 5)), 23, 25),
        (np.int64(3), 30, 40),
        (slice(4, 4), 0, 0),
        (Ellipsis, 0, 100),
        ([1, 2], 0, 100),
        (True, 0, 100),
        (np.ones(10, bool), 0, 100),
    ],
)
def test_span_is_no_longer_than_the_index_needs(key, start, stop):
    found = span((10, 10), key)
    assert (found.start, found.stop) == (start, stop)


def test_span_out_of_range_is_refused():
    with pytest.raises(IndexError, match="index 10 is out of bounds for axis 0 with size 10"):
        span((10, 10), 10)
