from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine.snapshot import as_base, describe, parse
from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout.chunks import ArraySpec, chunk_shape_for, place
from fastcheck_dask.layout.state import flatten

SLOT = Path("/shm/slot0")

specs = st.builds(
    lambda path, dtype, shape: ArraySpec(path, dtype, shape, chunk_shape_for(shape, 4, 64)),
    st.text("abc/", min_size=1, max_size=8),
    st.sampled_from(["float32", "bfloat16", "<U3"]),
    st.lists(st.integers(0, 9), max_size=3).map(tuple),
)


@settings(max_examples=80, deadline=None)
@given(st.lists(specs, max_size=4, unique_by=lambda spec: spec.path).map(tuple), st.floats(0, 2e9))
def test_parse_undoes_describe(arrays, moment):
    tree = {"t": "dict", "v": [[1, "é"]]}
    document = describe(token="a", tag="t1", created_unix=moment, tree=tree, arrays=arrays)
    snapshot = parse(SLOT, document)
    assert (snapshot.slot, snapshot.token, snapshot.tag, snapshot.created_unix) == (SLOT, "a", "t1", moment)
    assert snapshot.tree == tree
    assert snapshot.content.arrays == arrays
    assert snapshot.content.placement == place(arrays)
    assert snapshot.content.layout is None
    assert snapshot.raw_bytes == sum(spec.nbytes for spec in arrays)


def test_describe_state_with_nan_and_infinity_is_strict_json():
    flat = flatten({"loss": float("nan"), "best": float("inf"), "w": np.zeros(100)}, chunk_bytes=4096)
    document = describe(token="a", tag="t", created_unix=1.0, tree=flat.tree, arrays=flat.arrays)
    assert json.loads(document, parse_constant=pytest.fail)["arrays"] == [["w", "float64", [100], [100]]]


def test_describe_nan_as_time_is_refused():
    with pytest.raises(ValueError, match="JSON"):
        describe(token="a", tag="t", created_unix=float("nan"), tree=None, arrays=())


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.pop("token"),
        lambda d: d.pop("arrays"),
        lambda d: d.update(arrays=[["w", "float32", [3]]]),
        lambda d: d.update(arrays=[["w", "no-such-dtype", [3], [3]]]),
        lambda d: d.update(arrays=[["w", "float32", 3, 3]]),
        lambda d: d.update(arrays=7),
    ],
    ids=["no token", "no arrays", "three fields", "unknown dtype", "no shapes", "no list"],
)
def test_parse_damaged_document_says_where(change):
    document = json.loads(
        describe(
            token="a", tag="t", created_unix=1.0, tree=None, arrays=(ArraySpec("w", "float32", (3,), (3,)),)
        )
    )
    change(document)
    with pytest.raises(CorruptDataError, match="/shm/slot0"):
        parse(SLOT, json.dumps(document).encode())


@pytest.mark.parametrize("document", [b"", b"{", b"[]", b"null", b'{"token":1,"token":2}'])
def test_parse_no_document_is_corrupt(document):
    with pytest.raises(CorruptDataError):
        parse(SLOT, document)


def test_as_base_knows_where_each_chunk_lies(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    base = as_base(run.base.slot, saved.manifest)
    data = run.slot_of(base).data
    for name, value in states.of(1).items():
        if isinstance(value, np.ndarray):
            keys = [key for key, chunk in saved.manifest.chunks.items() if chunk.path == name]
            found = b"".join(
                bytes(data[offset : offset + nbytes]) for offset, nbytes in map(base.content.piece, keys)
            )
            assert found == value.tobytes()
