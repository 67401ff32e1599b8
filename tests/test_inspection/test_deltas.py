"""Checkpoints that are stored against others, looked at, verified and repaired."""

from __future__ import annotations

import numpy as np
import pytest

from fastcheck_dask import open_checkpoint
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.folder_run import FolderRun
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.repair import Sources, repair, repair_marker
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import Plan
from fastcheck_dask.tiers.folder_store import FolderStore


def state_of(step):
    weights = np.random.default_rng(1).normal(size=3000).astype(np.float32)
    drift = np.random.default_rng(step).integers(0, 2, weights.size, np.uint32)
    return {
        "weights": (weights.view(np.uint32) ^ drift).view(np.float32),
        "frozen": np.arange(2000.0),
        "step": step,
    }


@pytest.fixture
def folder(tmp_path):
    """Return a location with a whole checkpoint and two deltas."""
    found = CheckpointFolder(FolderStore(str(tmp_path)))
    run = FolderRun(found, run="r", policy=ChainPolicy(), retention=Retention(), chunk_bytes=4096)
    for step in range(3):
        run.save(state_of(step), f"s{step}")
    return found


def damage(folder, path):
    data = bytearray(folder.store.read(path))
    data[len(data) // 2] ^= 1
    folder.store.write(path, data)


def test_open_checkpoint_reads_through_the_chain(folder):
    for step in range(3):
        checkpoint = open_checkpoint(folder.store.location, f"s{step}")
        for name in ("weights", "frozen"):
            assert checkpoint[name].numpy().tobytes() == state_of(step)[name].tobytes()
        assert checkpoint["weights"][1500:1510].tolist() == state_of(step)["weights"][1500:1510].tolist()
        assert checkpoint["weights"].codec == ("delta" if step else "prefix_index")


def test_deltas_are_complete_and_intact(folder):
    listed = overview(folder).checkpoints
    assert [(c.complete, c.base) for c in listed] == [
        (True, None),
        (True, "00000001-s0"),
        (True, "00000002-s1"),
    ]
    for marker in folder.committed():
        found = verify(folder, marker, strict=True)
        assert found.problems == ()


def test_damage_is_named_where_it_is_and_repaired_there(folder):
    first, second, third = folder.committed()
    damage(folder, "00000001-s0/frozen/c/0")
    for marker in (first, second, third):
        found = verify(folder, marker)
        assert not found.restorable
        assert [problem.name for problem in found.problems] == ["00000001-s0/frozen/c/0"]
    done = repair(folder, third, verify(folder, third), Sources())
    assert (done.repaired, done.left) == ([], ["00000001-s0/frozen/c/0"])


def test_delta_that_is_damaged_is_written_anew_whole(folder, tmp_path_factory):
    third = folder.committed()[2]
    other = CheckpointFolder(FolderStore(str(tmp_path_factory.mktemp("other"))))
    copy = FolderRun(other, run="r", policy=ChainPolicy(0), retention=Retention(), chunk_bytes=4096)
    copy.save(state_of(2), "copy")
    damage(folder, "00000003-s2/weights/c/0")
    damage(folder, "00000003-s2/weights/zarr.json")
    found = verify(folder, third)
    assert {problem.name for problem in found.problems} == {
        "00000003-s2/weights/c/0",
        "00000003-s2/weights/zarr.json",
    }
    done = repair(folder, third, found, Sources(folders=(other,)))
    assert len(done.repaired) == 2
    assert verify(folder, third).problems == ()


def test_base_that_is_gone_is_told(folder):
    folder.remove("00000001-s0")
    assert [c.complete for c in overview(folder).checkpoints] == [False, False]
    for marker in folder.committed():
        assert not verify(folder, marker).restorable
    assert "stored against 00000001-s0, which is not in" in overview(folder).checkpoints[0].problem


def test_marker_is_made_again_only_if_its_base_is_known(folder):
    second = folder.committed()[1]
    path = ".fastcheck/commits/00000002-s1.json"
    folder.store.write(path, b"damaged")
    assert not repair_marker(folder, second.directory)
    folder.plan(second.directory, second.token, Plan(second.needs))
    assert repair_marker(folder, second.directory)
    assert folder.store.read(path) == second.to_bytes()
