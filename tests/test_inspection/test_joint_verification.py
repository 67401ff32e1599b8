from __future__ import annotations

import numpy as np
import pytest

from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.inspection.joint_verification import (
    choose_all,
    choose_one,
    each_damaged_marker,
    repair_joint_markers,
    seen_from_above,
    sources_of,
)
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.repair import Sources
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint
from fastcheck_dask.tiers.joint_marker import location_of_rank

JOINT = ".fastcheck/joint/00000002-t2.json"
COPY = "rank-00000/.fastcheck/joint-copies/00000002-t2.json"


def states(step):
    return [{"w": np.full(3000, 10 * step + rank, np.float32)} for rank in range(2)]


@pytest.fixture
def whole(folder):
    write_joint(folder, states(1), "t1", number=1, generations=(1, 4))
    write_joint(folder, states(2), "t2", number=2, generations=(2, 5))
    return open_folder(folder)[0]


def named(chosen):
    return [part.prefix + part.marker.directory for part in chosen.parts]


def test_newest_and_tag_are_of_all_ranks(whole):
    assert named(choose_one(whole, None)) == ["rank-00000/00000002-t2", "rank-00001/00000005-t2"]
    assert named(choose_one(whole, "t1")) == ["rank-00000/00000001-t1", "rank-00001/00000004-t1"]
    with pytest.raises(CheckpointNotFoundError, match="'x' of all ranks; the newest tags are: t2, t1"):
        choose_one(whole, "x")


def test_single_process_that_saved_later_is_the_newest(whole):
    write_checkpoint(whole.store.location, states(1)[0], "t1", generation=1, created_unix=1.8e9)
    assert named(choose_one(whole, None)) == ["00000001-t1"]
    assert named(choose_one(whole, "t2")) == ["rank-00000/00000002-t2", "rank-00001/00000005-t2"]
    assert named(choose_one(whole, None, directory="00000001-t1")) == ["00000001-t1"]
    assert len(choose_all(whole).parts) == 5


def test_missing_part_is_a_problem_and_the_rest_is_verified(whole):
    open_folder(location_of_rank(whole.store.location, 1))[0].remove("00000005-t2")
    for chosen in (choose_one(whole, None), choose_all(whole)):
        (problem,) = chosen.problems
        assert problem.name == "rank-00001/.fastcheck/commits/00000005-t2.json"
        assert problem.fatal
        assert "rank-00000/00000002-t2" in named(chosen)
    assert choose_one(whole, "t1").problems == ()


def test_damaged_markers_are_problems_of_the_newest_and_of_all(whole):
    names = [".fastcheck/joint/00000002-t2.json", "rank-00000/.fastcheck/commits/00000001-t1.json"]
    for name in names:
        whole.store.write(name, b"{}")
    for chosen in (choose_one(whole, None), choose_all(whole)):
        assert {problem.name for problem in chosen.problems} >= set(names)
    seen = []
    each_damaged_marker(whole, lambda _, directory, name: seen.append((directory, name)))
    assert seen == [("00000001-t1", names[1])]
    for name in whole.store.list(".fastcheck/joint"):
        whole.store.write(name, b"{}")
    assert choose_one(whole, None).parts == ()
    assert len(choose_one(whole, None).problems) == 3


def test_lost_marker_of_a_rank_is_told_with_its_folder(whole):
    whole.store.delete("rank-00001/.fastcheck/commits/00000004-t1.json")
    assert [(p.name, p.fault) for p in choose_all(whole).problems] == [
        ("rank-00001/.fastcheck/commits/00000004-t1.json", "unmarked"),
        ("rank-00001/.fastcheck/commits/00000004-t1.json", "missing"),
    ]


def test_problems_of_a_part_are_named_from_the_location(whole):
    whole.store.delete("rank-00001/00000005-t2/w/c/0")
    part = choose_one(whole, None).parts[1]
    found = seen_from_above(verify(part.folder, part.marker), part)
    assert (found.directory, [p.name for p in found.problems]) == (
        "rank-00001/00000005-t2",
        ["rank-00001/00000005-t2/w/c/0"],
    )


def test_other_locations_give_the_folder_of_the_same_rank(whole, tmp_path):
    part = choose_one(whole, None).parts[1]
    (tmp_path / "copy").mkdir()
    other = open_folder(str(tmp_path / "copy"))[0]
    (found,) = sources_of(part, Sources([other])).folders
    assert found.store.location == f"{tmp_path}/copy/rank-00001"


@pytest.mark.parametrize("name", [JOINT, COPY])
@pytest.mark.parametrize("damage", ["flipped", "deleted"])
def test_joint_marker_and_its_copy_are_verified_and_each_is_made_again(whole, name, damage):
    data = whole.store.read(name)
    if damage == "deleted":
        whole.store.delete(name)
    else:
        whole.store.write(name, data.replace(b'"created_unix":1700000002', b'"created_unix":1700000003'))
    for chosen in (choose_one(whole, None), choose_all(whole)):
        assert [problem.name for problem in chosen.problems] == [name]
    assert repair_joint_markers(whole) == [name]
    assert choose_all(whole).problems == ()
    assert whole.store.read(name) == data


def of_an_earlier_release(data):
    """Return a joint marker without its digest."""
    start = data.index(b'"sha256"')
    return data[:start] + data[data.index(b'"tag"') :]


def test_joint_marker_of_an_earlier_release_is_held_against_the_ranks_own_and_gets_a_copy(whole):
    data = whole.store.read(JOINT)
    whole.store.delete(COPY)
    whole.store.write(JOINT, of_an_earlier_release(data))
    assert choose_all(whole).problems == ()
    whole.store.write(JOINT, of_an_earlier_release(data).replace(b"1700000002", b"1700000009"))
    (problem,) = choose_one(whole, None).problems
    assert (problem.name, problem.fatal) == (JOINT, False)
    assert "1700000009" in problem.detail
    assert sorted(repair_joint_markers(whole)) == [JOINT, COPY]
    assert whole.store.read(JOINT) == whole.store.read(COPY) == data
    assert choose_all(whole).problems == ()
