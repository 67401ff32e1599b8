from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint


def test_ls_goes_by_generation_not_by_text(saved, answer, run):
    found = answer("ls", saved)
    assert [c["tag"] for c in found["checkpoints"]] == ["step_500", "step_2500", "step_10000"]
    assert [c["step"] for c in found["checkpoints"]] == [500, 2500, 10000]
    assert all(c["complete"] for c in found["checkpoints"])
    text = run("ls", saved).stdout
    assert text.index("step_500") < text.index("step_2500") < text.index("step_10000")
    assert "24.00 kB" in text


def test_ls_shows_what_is_damaged_unfinished_or_incomplete(saved, answer, run):
    write_checkpoint(str(saved), {"w": np.ones(500)}, "attempt", generation=4, publish=False)
    (saved / "00000001-step_500/model/w/c/0").unlink()
    (saved / ".fastcheck/commits/00000002-step_2500.json").write_bytes(b"?")
    (saved / "00000003-step_10000/.tmp-left").write_bytes(b"x")
    found = answer("ls", saved, status=1)
    assert [(c["tag"], c["complete"]) for c in found["checkpoints"]] == [
        ("step_500", False),
        ("step_10000", True),
    ]
    assert [m["path"] for m in found["damaged"]] == [".fastcheck/commits/00000002-step_2500.json"]
    assert [(f["kind"], f["name"]) for f in found["leftovers"]] == [
        ("temporary", "00000003-step_10000/.tmp-left"),
        ("unfinished", "00000004-attempt"),
    ]
    text = run("ls", saved, status=1).stdout
    for said in (
        "incomplete: 00000001-step_500: model/w/c/0",
        "damaged marker",
        "unfinished: 00000004-attempt",
    ):
        assert said in text


def test_ls_of_nothing_and_of_no_folder(tmp_path, run):
    (tmp_path / "empty").mkdir()
    assert "no committed checkpoint" in run("ls", tmp_path / "empty").stdout
    assert "does not exist" in run("ls", tmp_path / "typo", status=2).stderr
    assert not (tmp_path / "typo").exists()


def test_inspect_names_the_tensors_and_values(saved, answer, run):
    found = answer("inspect", saved, "step_2500")
    assert (found["tag"], found["values"]) == ("step_2500", {"step": 2500, "name": "x"})
    tensor = found["arrays"][0]
    assert (tensor["path"], tensor["dtype"], tensor["shape"], tensor["nbytes"]) == (
        "model/w",
        "float32",
        [3000],
        12000,
    )
    assert tensor["ratio"] == pytest.approx(12000 / tensor["stored_nbytes"], rel=1e-3)
    assert tensor["codec"] == "prefix_index"
    text = run("inspect", saved).stdout
    assert "model/frozen" in text
    assert "step_10000: generation 3 of run" in text
    assert answer("inspect", saved / "00000001-step_500")["tag"] == "step_500"


def test_inspect_missing_tag_lists_those_there_are(saved, run):
    error = run("inspect", saved, "step_9", status=1).stderr
    assert "'step_9'; the newest tags are: step_10000, step_2500, step_500" in error
    assert error.count("\n") == 1


def test_paths_that_look_like_markup_are_shown_as_they_are(tmp_path, run):
    write_checkpoint(str(tmp_path), {"[red]x": np.ones(100), "[/]": 1}, "t", generation=1)
    text = run("inspect", tmp_path).stdout
    assert "[red]x" in text
    assert "[%2F] = 1" in text


@pytest.mark.slow
def test_inspect_two_gigabytes_needs_little_memory_and_no_data(tmp_path):
    """Chunks of zeros: the sizes count, the contents do not."""
    write_checkpoint(
        str(tmp_path), {"a": np.zeros(2**28), "b": np.ones(100)}, "t", generation=1, chunk_bytes=2**26
    )
    code = """
import resource, sys
from fastcheck_dask import cli, open_checkpoint
from fastcheck_dask.tiers.folder_store import FolderStore
import fastcheck_dask.cli.listing, fastcheck_dask.engine.tuning
read = FolderStore.read
asked = {}
def watched(self, path):
    data = read(self, path)
    asked[path] = len(data)
    return data
FolderStore.read = watched
FolderStore.read_into = None
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
cli.main(["inspect", sys.argv[1], "--json"], standalone_mode=False)
grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
assert not [path for path in asked if "/c/" in path], asked
assert 0 < sum(asked.values()) < 100_000, asked
print(grown, file=sys.stderr)
"""
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path.cwd(),
    )
    assert '"nbytes": 2147483648' in done.stdout
    assert int(done.stderr.splitlines()[-1]) < 20_000


def test_ls_and_inspect_of_several_ranks(tmp_path, answer, run):
    states = [{"w": np.full(500, rank, np.float32), "step": 7} for rank in range(2)]
    write_joint(str(tmp_path), states, "t1", number=1)
    text = run("ls", tmp_path).stdout
    assert "2/2" in text
    assert "yes" in text
    (found,) = answer("ls", tmp_path)["joint"]
    assert (found["tag"], found["complete"], found["step"], len(found["parts"])) == ("t1", True, 7, 2)
    assert "--rank 0" in run("inspect", tmp_path, status=1).stderr
    assert answer("inspect", tmp_path, "--rank", 1)["arrays"][0]["path"] == "w"
    assert "there is no rank 2" in run("inspect", tmp_path, "--rank", 2, status=2).stderr
    write_checkpoint(str(tmp_path / "rank-00001"), states[1], "t2", generation=2)
    (tmp_path / "rank-00000/00000001-t1/w/c/0").unlink()
    text = run("ls", tmp_path, status=1).stdout
    assert "incomplete: number 1 (t1): rank 0: w/c/0" in text
    assert "not of all ranks: rank-00001/00000002-t2" in text
