from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask import open_checkpoint
from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError
from fastcheck_dask.inspection.garbage import collect_all
from fastcheck_dask.inspection.leftovers import Kind
from fastcheck_dask.inspection.location import open_folder, open_part
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.ranks import survey_ranks
from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint
from fastcheck_dask.tiers.joint_marker import location_of_rank


def states(step: int, ranks: int = 2) -> list[dict[str, object]]:
    return [{"step": step, "w": np.full(3000, 10 * step + rank, np.float32)} for rank in range(ranks)]


def look(location):
    return overview(open_folder(location)[0])


@pytest.fixture
def joint(location):
    """Return a location in which two ranks saved twice, with generations of their own."""
    write_joint(location, states(1), "t1", number=1, generations=(1, 4))
    write_joint(location, states(2), "t2", number=2, generations=(2, 5))
    return location


def test_one_line_for_each_checkpoint_of_all_ranks(joint):
    found = look(joint)
    assert [(c.number, c.tag, c.world_size, len(c.there), c.step) for c in found.joint] == [
        (1, "t1", 2, 2, 1),
        (2, "t2", 2, 2, 2),
    ]
    assert found.sound
    assert (found.checkpoints, found.unjoined, found.leftovers) == ((), (), ())
    assert found.joint[0].raw_bytes == 2 * 12000
    assert [part.generation for part in found.joint[1].there] == [2, 5]


def test_part_that_is_not_there_and_part_that_is_incomplete_are_named(joint):
    one, two = (open_folder(location_of_rank(joint, rank))[0] for rank in range(2))
    two.remove("00000005-t2")
    one.store.delete("00000001-t1/w/c/0")
    first, second = look(joint).joint
    assert first.problem.startswith("rank 0: w/c/0")
    assert second.problem == "the part of rank 1 is not there; 1 of 2 ranks have theirs"
    assert not look(joint).sound


def test_checkpoint_of_which_no_rank_has_a_part_was_removed_unless_it_is_the_newest(joint):
    folders = [open_folder(location_of_rank(joint, rank))[0] for rank in range(2)]
    folders[0].remove("00000001-t1")
    folders[1].remove("00000004-t1")
    assert [c.tag for c in look(joint).joint] == ["t2"]
    folders[0].remove("00000002-t2")
    folders[1].remove("00000005-t2")
    assert [(c.tag, c.complete) for c in look(joint).joint] == [("t1", False), ("t2", False)]


def test_what_one_rank_alone_committed_is_shown_apart(joint):
    write_checkpoint(location_of_rank(joint, 1), states(3)[1], "t3", generation=6)
    found = look(joint)
    assert found.unjoined == ("rank-00001/00000006-t3",)
    assert found.sound
    # It is nothing that can be loaded by all.
    assert open_checkpoint(joint, rank=1).tag == "t2"


def test_damaged_markers_of_ranks_and_of_all_are_named(joint):
    store = open_folder(joint)[0].store
    store.write(".fastcheck/joint/00000002-t2.json", store.read(".fastcheck/joint/00000001-t1.json"))
    store.write("rank-00001/.fastcheck/commits/00000004-t1.json", b"{}")
    found = look(joint)
    assert [d.path for d in found.damaged] == [
        ".fastcheck/joint/00000002-t2.json",
        "rank-00001/.fastcheck/commits/00000004-t1.json",
    ]
    assert "is the marker of t1" in found.damaged[0].reason
    assert [(c.tag, c.complete) for c in found.joint] == [("t1", False)]


def test_leftovers_of_ranks_are_shown_and_collected(joint):
    write_checkpoint(location_of_rank(joint, 1), states(3)[1], "dead", generation=6, publish=False)
    assert [(f.kind, f.name) for f in look(joint).leftovers] == [
        (Kind.UNFINISHED, "rank-00001/00000006-dead")
    ]
    folder, _ = open_folder(joint)
    assert [f.name for f, _ in collect_all(folder).kept] == ["rank-00001/00000006-dead"]
    done = collect_all(folder, now=lambda: 4e9)
    assert [f.name for f in done.removed] == ["rank-00001/00000006-dead"]
    assert look(joint).leftovers == ()
    assert look(joint).sound


def test_part_of_a_rank_opens(joint):
    assert open_checkpoint(joint, rank=1)["w"][0] == 21
    assert open_checkpoint(joint, "t1", rank=0)["w"][0] == 10
    assert open_checkpoint(joint, "00000004-t1", rank=1)["w"][0] == 11
    folder, committed, marker = open_part(joint, None, rank=1)
    assert ([m.tag for m in committed], marker.generation) == (["t1", "t2"], 5)
    assert "/rank-00001" in folder.store.location


def test_rank_that_is_missing_or_wrong_is_refused_with_what_to_do(folder, checkpoints):
    write_joint(folder, states(1), "t1", number=1)
    for tag in (None, "t1"):
        with pytest.raises(CheckpointNotFoundError, match=r"2 ranks save here.*\(--rank 0\).*rank-00000"):
            open_checkpoint(folder, tag)
    with pytest.raises(ConfigError, match="ranks 0 to 1; there is no rank 2"):
        open_checkpoint(folder, rank=2)
    with pytest.raises(CheckpointNotFoundError, match="'x'; the newest tags are: t1"):
        open_checkpoint(folder, "x", rank=0)
    with pytest.raises(ConfigError, match="leave the rank out"):
        open_checkpoint(location_of_rank(folder, 0), rank=0)
    shutil.rmtree(Path(folder) / "rank-00001")
    with pytest.raises(CheckpointNotFoundError, match="no part of any checkpoint of all ranks"):
        open_checkpoint(folder, rank=1)


def test_newest_of_a_single_process_is_not_taken_for_the_newest_of_all(folder):
    write_checkpoint(folder, {"w": np.zeros(100)}, "alone", generation=1, created_unix=1.7e9)
    write_joint(folder, states(1), "t1", number=1)
    with pytest.raises(CheckpointNotFoundError, match=r"'t1' of 2 ranks.*'alone'"):
        open_checkpoint(folder)
    assert open_checkpoint(folder, "alone").tag == "alone"
    write_checkpoint(folder, {"w": np.zeros(100)}, "later", generation=2, created_unix=1.8e9)
    assert open_checkpoint(folder).tag == "later"


def test_location_of_a_single_process_has_no_ranks(location, checkpoints):
    checkpoints.save(location)
    folder, _ = open_folder(location)
    found = survey_ranks(folder, folder.store.list(""))
    assert (found.joint, found.unjoined, found.damaged) == ((), (), ())
