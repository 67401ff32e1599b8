from __future__ import annotations

from pathlib import Path

import pytest

from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError
from fastcheck_dask.inspection.location import choose, open_folder
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker, location_of_rank


def test_location_that_is_not_there_is_refused_and_not_made(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        open_folder(str(tmp_path / "typo"))
    with pytest.raises(ConfigError, match="does not exist"):
        open_folder(f"file://{tmp_path}/typo")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="is a file"):
        open_folder(str(tmp_path / "file"))
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize("slash", ["", "/"])
def test_directory_of_a_checkpoint_leads_to_its_location(location, checkpoints, slash):
    checkpoints.save(location)
    base, mark, query = location.partition("?")
    folder, directory = open_folder(f"{base}/00000001-t1{slash}{mark}{query}")
    assert directory == "00000001-t1"
    assert [marker.tag for marker in folder.committed()] == ["t1"]


def test_directory_by_link_and_by_relative_path(folder, checkpoints, tmp_path, monkeypatch):
    checkpoints.save(folder)
    (tmp_path / "latest").symlink_to(Path(folder) / "00000001-t1")
    assert open_folder(str(tmp_path / "latest"))[1] == "00000001-t1"
    monkeypatch.chdir(Path(folder) / "00000001-t1")
    assert open_folder(".")[1] == "00000001-t1"


def test_location_whose_own_name_looks_like_a_checkpoint_is_a_location(tmp_path, checkpoints):
    location = str(tmp_path / "00000007-run")
    checkpoints.save(location)
    found, directory = open_folder(location)
    assert (directory, len(found.committed())) == (None, 1)


def test_directory_taken_away_from_its_location_is_refused_with_what_is_missing(
    folder, checkpoints, tmp_path
):
    checkpoints.save(folder)
    moved = (Path(folder) / "00000001-t1").rename(tmp_path / "00000001-t1")
    with pytest.raises(ConfigError, match="commit marker and the manifest"):
        open_folder(str(moved))


def test_choose_takes_newest_of_a_tag_a_directory_or_the_newest(folder, checkpoints):
    for generation, tag in [(1, "a"), (2, "b"), (3, "a"), (10, "c")]:
        checkpoints.save(folder, tag, generation=generation, state={"x": generation})
    found, _ = open_folder(folder)
    committed = found.committed()
    assert [m.generation for m in committed] == [1, 2, 3, 10]
    assert choose(found, committed, None).generation == 10
    assert choose(found, committed, "a").generation == 3
    assert choose(found, committed, "00000001-a").generation == 1
    assert choose(found, committed, None, directory="00000002-b").generation == 2
    with pytest.raises(CheckpointNotFoundError, match=r"'00000002-b c'; the newest tags are: c, a, b, a$"):
        choose(found, committed, "c", directory="00000002-b")
    with pytest.raises(CheckpointNotFoundError, match="newest tags are: none"):
        choose(found, [], None)


def test_choose_names_a_few_of_many_tags(folder, checkpoints):
    for generation in range(1, 12):
        checkpoints.save(folder, f"t{generation}", generation=generation, state={})
    found, _ = open_folder(folder)
    with pytest.raises(CheckpointNotFoundError, match=r"t11, .* t4 and 3 older ones"):
        choose(found, found.committed(), "x")


def test_location_of_several_ranks_says_where_each_saves(location, checkpoints):
    part = location_of_rank(location, 0)
    manifest = checkpoints.save(part)
    marker = JointMarker(1, "t1", 1, 1.0, (manifest.token,), (1,))
    assert JointFolder(location).publish(marker)
    found, _ = open_folder(location)
    with pytest.raises(CheckpointNotFoundError, match="1 ranks save here") as told:
        choose(found, found.committed(), None)
    assert part.partition("?")[0] in str(told.value)
    of_one, _ = open_folder(part)
    assert choose(of_one, of_one.committed(), None).tag == "t1"
