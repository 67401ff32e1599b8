"""Commit markers: what is not one is refused with a known error."""

from __future__ import annotations

import json
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, FastCheckError
from fastcheck_dask.tiers.commit_marker import BaseLink, CommitMarker

FROZEN = Path(__file__).parent / "frozen/marker_v2.json"
MARKER = CommitMarker("run", 3, "t", "author", "0" * 64, 17, 1.5)


def bad_markers():
    good = json.loads(MARKER.to_bytes())
    changes = {
        "generation": [-1, 3.0, True, "3", None, 2**80],
        "tag": ["../x", 3, ""],
        "run": [None, "a/b"],
        "token": [None, 5],
        "manifest_sha256": ["", "0" * 63, "Z" * 64, 5],
        "raw_bytes": [-1, None, 1.5],
        "created_unix": ["now", None, True, 10**400],
        "format": ["other", None],
        "version": [5, "1", None],
    }
    for name, values in changes.items():
        yield from (json.dumps(good | {name: value}).encode() for value in values)
        yield json.dumps({key: value for key, value in good.items() if key != name}).encode()
    yield from (b"", b"{}", b"[]", b"null", b"[" * 100_000, b'{"format":1,"format":1}')
    yield from (MARKER.to_bytes()[:n] for n in (1, 50, len(MARKER.to_bytes()) - 1))
    yield pickle.dumps(MARKER)


BAD_MARKERS = list(bad_markers())


@pytest.mark.parametrize("data", BAD_MARKERS, ids=range(len(BAD_MARKERS)))
def test_marker_damaged_is_refused_and_the_file_named(data):
    with pytest.raises(CorruptDataError, match="the file"):
        CommitMarker.from_bytes(data, where="the file")


@given(st.binary() | st.integers(0, len(MARKER.to_bytes()) - 1).map(lambda n: MARKER.to_bytes()[:n]))
def test_marker_from_any_other_bytes_raises_a_known_error(data):
    with pytest.raises(CorruptDataError):
        CommitMarker.from_bytes(data)


@given(st.integers(0, len(MARKER.to_bytes()) - 1), st.integers(0, 255))
def test_marker_one_byte_changed_raises_a_known_error_or_is_well_formed(position, value):
    data = bytearray(MARKER.to_bytes())
    data[position] = value
    try:
        marker = CommitMarker.from_bytes(bytes(data))
    except FastCheckError:
        return
    assert CommitMarker.from_bytes(marker.to_bytes()) == marker


def test_marker_round_trip_keeps_every_field():
    assert CommitMarker.from_bytes(MARKER.to_bytes()) == MARKER
    assert MARKER.directory == "00000003-t"


DELTA = replace(
    MARKER,
    base=BaseLink(2, "s", "theirs", "1" * 64),
    metrics={"loss": float("-inf"), "top1": 0.5},
    flags=("nonfinite",),
)


def test_marker_with_base_metrics_and_flags_comes_back_and_is_of_version_2():
    assert CommitMarker.from_bytes(DELTA.to_bytes()) == DELTA
    for one in (replace(MARKER, base=DELTA.base), replace(MARKER, flags=DELTA.flags), DELTA):
        assert json.loads(one.to_bytes())["version"] == 2
        assert CommitMarker.from_bytes(one.to_bytes()) == one
    assert json.loads(MARKER.to_bytes())["version"] == 1
    assert "base" not in json.loads(MARKER.to_bytes())


REFERRING = replace(MARKER, refs=(BaseLink(1, "r", "theirs", "2" * 64), BaseLink(2, "s", "mine", "3" * 64)))


def test_marker_with_references_comes_back_and_is_of_version_3():
    for one in (REFERRING, replace(REFERRING, base=DELTA.base), replace(REFERRING, flags=DELTA.flags)):
        assert json.loads(one.to_bytes())["version"] == 3
        assert CommitMarker.from_bytes(one.to_bytes()) == one
    assert REFERRING.needs.shown == "00000001-r"


ELSEWHERE = BaseLink(3, "t", "author", "4" * 64, "/shared/run-7-0a1b/backbone")


def test_marker_that_refers_to_another_location_comes_back_and_is_of_version_4():
    for one in (replace(MARKER, refs=(ELSEWHERE,)), replace(REFERRING, refs=(ELSEWHERE, *REFERRING.refs))):
        assert json.loads(one.to_bytes())["version"] == 4
        assert CommitMarker.from_bytes(one.to_bytes()) == one
    assert replace(MARKER, refs=(ELSEWHERE,)).needs.shown == "/shared/run-7-0a1b/backbone/00000003-t"
    assert "location" not in REFERRING.to_bytes().decode()


def test_frozen_marker_that_refers_to_another_location_stays_readable_and_its_bytes_the_same():
    """Written once by version 4 of the format; never to be regenerated."""
    data = FROZEN.with_name("marker_v4.json").read_bytes().strip()
    one = replace(REFERRING, base=DELTA.base, refs=(ELSEWHERE, *REFERRING.refs))
    assert CommitMarker.from_bytes(data) == one
    assert one.to_bytes() == data


@pytest.mark.parametrize(
    "changes",
    [
        {"refs": [vars(ELSEWHERE) | {"location": location}]}
        for location in ("", "shared", "../shared", 7, ["/shared"])
    ]
    + [{"base": vars(ELSEWHERE) | {"generation": 1}}, {"refs": [vars(ELSEWHERE) | {"generation": 4}]}],
)
def test_marker_that_refers_to_no_place_or_to_later_ones_is_refused(changes):
    document = json.loads(MARKER.to_bytes()) | {"version": 4} | changes
    with pytest.raises(CorruptDataError):
        CommitMarker.from_bytes(json.dumps(document).encode())


def test_frozen_marker_with_references_stays_readable_and_its_bytes_the_same():
    """Written once by version 3 of the format; never to be regenerated."""
    data = FROZEN.with_name("marker_v3.json").read_bytes().strip()
    both = replace(REFERRING, base=DELTA.base, older=("embeddings", "head"))
    assert CommitMarker.from_bytes(data) == both
    assert both.to_bytes() == data
    assert json.loads(replace(MARKER, older=("g",)).to_bytes())["version"] == 3


def test_frozen_marker_stays_readable_and_its_bytes_the_same():
    """Written once by version 2 of the format; never to be regenerated."""
    assert CommitMarker.from_bytes(FROZEN.read_bytes().strip()) == DELTA
    assert DELTA.to_bytes() == FROZEN.read_bytes().strip()


@pytest.mark.parametrize(
    "damage",
    [
        {"base": 3},
        {"base": {"generation": 2}},
        {"base": {"generation": 3, "tag": "s", "token": "x", "manifest_sha256": "1" * 64}},
        {"base": {"generation": 2, "tag": "../s", "token": "x", "manifest_sha256": "1" * 64}},
        {"base": {"generation": 2, "tag": "s", "token": 4, "manifest_sha256": "1" * 64}},
        {"base": {"generation": 2, "tag": "s", "token": "x", "manifest_sha256": "1"}},
        {"metrics": {"loss": "low"}},
        {"flags": 7},
        {"flags": [7]},
        {"older": 7},
        {"older": [7]},
        {"refs": 7},
        {"refs": [7]},
        {"refs": {"generation": 2}},
        {"refs": [{"generation": 3, "tag": "s", "token": "x", "manifest_sha256": "1" * 64}]},
    ],
)
def test_marker_with_a_base_or_notes_that_cannot_be_is_refused(damage):
    data = json.dumps(json.loads(DELTA.to_bytes()) | damage).encode()
    with pytest.raises(CorruptDataError):
        CommitMarker.from_bytes(data)
