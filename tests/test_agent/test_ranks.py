"""What one rank may remove: nothing from the newest checkpoint on that all ranks have."""

from __future__ import annotations

from fastcheck_dask.agent.ranks import RankDuties
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker


def duties(tmp_path, rank):
    return RankDuties(None, str(tmp_path), rank=rank)


def mark(tmp_path, number, generations):
    marker = JointMarker(number, "t", len(generations), 1.0, ("a",) * len(generations), generations)
    JointFolder(str(tmp_path))._store.create(f".fastcheck/joint/{number:08d}-t.json", marker.to_bytes())


def test_proven_generation_is_that_of_the_newest_joint_checkpoint(tmp_path):
    tmp_path.mkdir(exist_ok=True)
    assert duties(tmp_path, 0).proven_generation() is None
    mark(tmp_path, 1, (3, 4))
    mark(tmp_path, 2, (5, 7))
    assert [duties(tmp_path, rank).proven_generation() for rank in range(3)] == [5, 7, None]


def test_proven_generation_is_none_where_markers_cannot_be_listed(tmp_path, caplog):
    gone = duties(tmp_path / "s3:", 0)
    gone._location = "s3://"
    assert gone.proven_generation() is None
    assert "nothing is removed" in caplog.text
