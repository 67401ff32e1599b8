from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination import CommitRecord, NodeInfo
from fastcheck_dask.errors import UnknownFormatError

texts = st.text(max_size=20)
nodes = st.builds(
    NodeInfo, name=texts, address=texts, rack=texts, host=texts, capacity_bytes=st.integers(), state=texts
)
records = st.builds(
    CommitRecord,
    run=texts,
    generation=st.integers(0, 10**10 - 1),
    tag=texts,
    token=texts,
    manifest_digest=texts,
    nodes=st.lists(texts, max_size=3).map(tuple),
    addresses=st.lists(texts, max_size=3).map(tuple),
    shards=st.integers(0, 5),
    parity=st.integers(0, 2),
    raw_bytes=st.integers(0),
    created_unix=st.floats(allow_nan=False, allow_infinity=False),
    persisted=st.booleans(),
)


@given(nodes)
def test_node_info_any_text_round_trips(info):
    assert NodeInfo.from_bytes(info.to_bytes()) == info


@given(records)
def test_commit_record_any_fields_round_trip(record):
    assert CommitRecord.from_bytes(record.to_bytes()) == record


@pytest.mark.parametrize(("parity", "written"), [(0, b"false"), (1, b"true"), (2, b"2")])
def test_commit_record_says_of_one_parity_shard_what_older_versions_said(parity, written):
    record = CommitRecord("run", 1, "t", "k", "", ("a",), ("b",), 1, parity, 1, 1.0)
    data = record.to_bytes()
    assert b'"parity":' + written + b"," in data
    found = CommitRecord.from_bytes(data)
    assert (found.parity, type(found.parity), found.to_bytes()) == (parity, int, data)


def test_node_info_field_of_newer_version_is_dropped():
    info = NodeInfo("a", "fcs://h:1", "r", "h", 1)
    newer = json.dumps({**json.loads(info.to_bytes()), "colour": "red"}).encode()
    assert NodeInfo.from_bytes(newer) == info


@pytest.mark.parametrize(
    "data",
    [b"", b"[]", b"{}", b"\xff", b'{"name":"a"}', NodeInfo("a", "b", "c", "d", True).to_bytes()],
)
def test_node_info_wrong_bytes_is_unknown_format(data):
    with pytest.raises(UnknownFormatError):
        NodeInfo.from_bytes(data)
