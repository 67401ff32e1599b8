"""Documents that look like trees."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st

JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.sampled_from(["w", "a", "float32", "AAAAAA=="]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["t", "v", "k", "path", "dtype", "shape", "bits"]), inner, max_size=4
        )
        | st.builds(
            lambda t, v, k: {"t": t, "v": v, "k": k}, st.sampled_from(["dict", "Counter"]), inner, inner
        )
        | st.builds(
            lambda t, v: {"t": t, "v": v}, st.sampled_from(["tuple", "set", "int", "numpy", "path"]), inner
        )
        | st.builds(
            lambda d, s: {"t": "tensor", "path": "x", "dtype": d, "shape": s, "bits": "AAAAAA=="},
            inner,
            inner,
        )
    ),
    max_leaves=12,
)


@pytest.fixture(scope="session")
def any_tree() -> st.SearchStrategy[Any]:
    """Return a strategy for JSON documents, some of which are nearly the tree of a state."""
    return JSON
