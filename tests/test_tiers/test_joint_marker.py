"""Joint markers: what they say, and that none is written before every rank's part is there."""

from __future__ import annotations

import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.errors import CommitConflictError, CorruptDataError, UnknownFormatError
from fastcheck_dask.tiers.commit_marker import CommitMarker
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker, location_of_rank

MARKER = JointMarker(7, "t", 2, 1.5, ("a", "b"), (3, 4))
PATH = ".fastcheck/joint/00000007-t.json"
COPY = "rank-00000/.fastcheck/joint-copies/00000007-t.json"


def put_part(folder: JointFolder, rank: int, token: str) -> None:
    """Put a rank's own commit marker there, as persisting does at its end."""
    marker = CommitMarker(f"r.r{rank}", MARKER.generations[rank], "t", token, "0" * 64, 1, 1.5)
    path = f".fastcheck/commits/{marker.directory}.json"
    assert folder.folder(rank).store.create(path, marker.to_bytes())


@pytest.fixture
def folder(tmp_path: Path) -> JointFolder:
    return JointFolder(str(tmp_path))


def test_publish_only_when_every_part_is_there(folder: JointFolder) -> None:
    assert folder.lacking(MARKER) == [0, 1]
    put_part(folder, 0, "a")
    assert not folder.publish(MARKER)
    assert (folder.markers(), folder.lacking(MARKER)) == ([], [1])
    put_part(folder, 1, "b")
    assert folder.publish(MARKER)
    assert folder.publish(MARKER)
    assert folder.markers() == [MARKER]


def test_publish_part_of_another_save_does_not_count(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "another")
    assert not folder.publish(MARKER)


def test_publish_other_parts_under_the_same_number_conflict(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder.publish(MARKER)
    with pytest.raises(CommitConflictError):
        folder.publish(replace(MARKER, tokens=("a", "c")))


def test_markers_damaged_one_is_left_out(folder: JointFolder, caplog: pytest.LogCaptureFixture) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder.publish(MARKER)
    folder._store.create(".fastcheck/joint/00000008-u.json", b"{")
    assert folder.markers() == [MARKER]
    assert "00000008-u.json" in caplog.text


def test_marker_under_another_name_is_damaged(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder.publish(MARKER)
    folder._store.create(".fastcheck/joint/00000009-t.json", MARKER.to_bytes())
    found = folder.survey()
    assert found.markers == (MARKER,)
    assert [d.path for d in found.damaged] == [".fastcheck/joint/00000009-t.json"]


@settings(deadline=None, derandomize=True)
@given(st.integers(0, 200), st.integers(0, 8))
def test_marker_that_is_damaged_in_any_way_is_proven_and_written_anew(where: int, bit: int) -> None:
    data = MARKER.to_bytes()
    at = where % len(data)
    # The last of the nine damages cuts it off there.
    flipped = data[:at] + bytes([data[at] ^ (1 << bit % 8)]) + data[at + 1 :]
    with tempfile.TemporaryDirectory() as name:
        folder = JointFolder(name)
        put_part(folder, 0, "a")
        put_part(folder, 1, "b")
        folder.publish(MARKER)
        folder._store.write(PATH, data[:at] if bit == 8 else flipped)
        sound = [one for one in folder.markers() if not folder.lacking(one)]
        assert not sound
        assert folder.lost(sound) == [MARKER]
        folder.restore(MARKER)
        assert folder.markers() == [MARKER]


def test_marker_that_is_gone_is_proven_only_with_every_part_of_it(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder.publish(MARKER)
    folder._store.delete(PATH)
    assert folder.lost([]) == [MARKER]
    assert folder.lost([MARKER]) == []
    other = folder.folder(1)
    kept = other.store.read(".fastcheck/commits/00000004-t.json")
    other.store.delete(".fastcheck/commits/00000004-t.json")
    assert folder.lost([]) == []
    for changes in ({"token": "c"}, {"generation": 5}):
        wrong = replace(CommitMarker.from_bytes(kept), **changes)
        other.store.write(f".fastcheck/commits/{wrong.directory}.json", wrong.to_bytes())
        assert folder.lost([]) == []
    other.store.write(".fastcheck/commits/00000004-t.json", b"{")
    assert folder.lost([]) == []
    other.store.write(".fastcheck/commits/00000004-t.json", kept)
    folder._store.write(COPY, b"{")
    assert folder.lost([]) == []


def test_publish_writes_a_damaged_marker_anew_and_leaves_a_newer_one(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder.publish(MARKER)
    for damaged in (b"", MARKER.to_bytes()[:40], b"[]"):
        folder._store.write(PATH, damaged)
        assert folder.publish(MARKER)
        assert folder.markers() == [MARKER]
    newer = MARKER.to_bytes().replace(b'"version":1', b'"version":2')
    folder._store.write(PATH, newer)
    with pytest.raises(UnknownFormatError, match="upgrade"):
        folder.publish(MARKER)
    assert folder._store.read(PATH) == newer


def test_bytes_round_trip_and_refusals() -> None:
    data = MARKER.to_bytes()
    assert JointMarker.from_bytes(data) == MARKER
    with pytest.raises(UnknownFormatError, match="upgrade"):
        JointMarker.from_bytes(data.replace(b'"version":1', b'"version":2'))
    for wrong in (b'{"format":"fastcheck-commit"}', b"[]"):
        with pytest.raises(UnknownFormatError):
            JointMarker.from_bytes(wrong)
    for before, after in ((b'"world_size":2', b'"world_size":3'), (b'"number":7', b'"number":-7')):
        with pytest.raises(CorruptDataError):
            JointMarker.from_bytes(data.replace(before, after))


FROZEN = Path(__file__).parent / "frozen/joint_v1.json"
OLD = FROZEN.read_bytes().strip()


def test_frozen_markers_stay_readable_and_the_bytes_the_same() -> None:
    """Written once, without a digest by the first releases; never to be regenerated."""
    data = FROZEN.with_name("joint_v1_digest.json").read_bytes().strip()
    assert MARKER.to_bytes() == data
    assert JointMarker.from_bytes(data) == JointMarker.from_bytes(OLD) == MARKER


@given(st.integers(0, len(MARKER.to_bytes()) - 1), st.integers(1, 255))
def test_bytes_one_changed_is_damaged(at: int, change: int) -> None:
    data = MARKER.to_bytes()
    with pytest.raises(CorruptDataError):
        JointMarker.from_bytes(data[:at] + bytes([data[at] ^ change]) + data[at + 1 :])


def test_bytes_of_an_earlier_release_changed_are_damaged_where_it_can_be_told() -> None:
    for before, after in (
        (b'"created_unix":1.5', b'"created_unix":NaN'),
        (b'"created_unix":1.5', b'"created_unix":"1"'),
        (b'"created_unix":1.5', b'"created_unix":1' + b"0" * 400),
        (b'"version":1', b'"version":1,"sha255":"0"'),
        (b'"tag":"t"', b'"tag": "t"'),
    ):
        with pytest.raises(CorruptDataError):
            JointMarker.from_bytes(OLD.replace(before, after))


def test_settle_gives_a_marker_of_an_earlier_release_its_digest_and_its_copy(folder: JointFolder) -> None:
    put_part(folder, 0, "a")
    put_part(folder, 1, "b")
    folder._store.create(PATH, OLD)
    assert folder.copy_fault(MARKER) is None
    assert folder.settle(MARKER) == [COPY, PATH]
    assert folder.settle(MARKER) == []
    assert folder._store.read(PATH) == folder._store.read(COPY) == MARKER.to_bytes()
    folder._store.write(COPY, MARKER.to_bytes()[:-1])
    assert "not those" in str(folder.copy_fault(MARKER))
    folder._store.delete(COPY)
    assert COPY in str(folder.copy_fault(MARKER))
    assert folder.settle(MARKER) == [COPY]


def test_location_of_rank_in_a_store_with_options() -> None:
    assert location_of_rank("s3://b/run?region=eu", 3) == "s3://b/run/rank-00003?region=eu"
