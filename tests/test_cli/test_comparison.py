from __future__ import annotations

import shutil
import sys

import click
import numpy as np
import pytest

from fastcheck_dask.cli.comparison import pair_of
from fastcheck_dask.testing.checkpoints import write_checkpoint, write_joint


def test_diff_says_what_changed_and_by_how_much(saved, run, answer, tmp_path):
    found = answer("diff", saved, "step_500", "step_2500")
    (change,) = found["changed"]
    assert (change["path"], change["changed_share"], round(change["relative_l2"], 6)) == ("model/w", 1.0, 4.0)
    assert (found["unchanged"], found["values"]) == (["model/frozen"], {"step": [500, 2500]})
    png = tmp_path / "x.png"
    text = run("diff", saved, "step_500", "step_2500", "--plot", png).stdout
    assert "1 tensors changed, 1 did not" in text
    assert "value: step: 500 became 2500" in text
    assert png.read_bytes().startswith(b"\x89PNG")


def test_diff_of_two_locations_and_its_exit_code(saved, run, tmp_path):
    shutil.copytree(saved, tmp_path / "copy")
    run("diff", saved, "step_500", "step_500", "--with", tmp_path / "copy", "--exit-code")
    run("diff", saved, "step_500", "step_2500", "--with", tmp_path / "copy", "--exit-code", status=1)


def test_diff_names_a_few_of_many(tmp_path, run):
    for generation in (1, 2):
        state = {f"t{n}": np.full(100, generation) for n in range(60)}
        write_checkpoint(str(tmp_path / "c"), state, f"g{generation}", generation=generation)
    text = run("diff", tmp_path / "c", "g1", "g2").stdout
    assert "... and 20 more (--json names all)" in text
    assert "60 tensors changed" in text


def test_diff_plot_without_matplotlib_says_what_to_install(saved, run, tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "fastcheck_dask.inspection.difference_plot", None)
    arguments = ["diff", saved, "step_500", "step_2500", "--plot", tmp_path / "x.png"]
    assert "pip install matplotlib" in run(*arguments, status=1).stderr


def test_bisect_finds_the_first(saved, run, answer):
    values = np.ones(3000, np.float32)
    values[7] = np.nan
    write_checkpoint(str(saved), {"model": {"w": values}}, "bad", generation=4)
    found = answer("bisect", saved, "model/w", status=1)
    assert (found["findings"][0]["tag"], found["last_good"]) == ("bad", "step_10000")
    assert (
        "first in bad (generation 4); the last one before is step_10000"
        in run("bisect", saved, status=1).stdout
    )
    assert answer("bisect", saved, "--jump", "3.5", status=1)["findings"][0]["tag"] == "step_2500"
    run("bisect", saved, "--jump", "0", status=2)


def test_bisect_finds_nothing(saved, run):
    assert "nothing found in 3 checkpoints" in run("bisect", saved).stdout
    assert "no checkpoint" in run("bisect", saved, "typo", status=1).stderr


def test_diff_and_bisect_of_a_rank(tmp_path, run, answer):
    location = tmp_path / "c"
    for number in (1, 2):
        values = np.ones(500, np.float32)
        values[3] = np.nan if number == 2 else 1
        write_joint(str(location), [{"w": np.ones(500)}, {"w": values}], f"t{number}", number=number)
    assert answer("diff", location, "t1", "t2", "--rank", 0)["changed"] == []
    assert len(answer("diff", location, "t1", "t2", "--rank", 1)["changed"]) == 1
    assert "--rank 0" in run("diff", location, "t1", "t2", status=1).stderr
    found = answer("diff", location / "rank-00000", location / "rank-00001")
    assert found["other_form"]
    assert "nothing found in 2" in run("bisect", location, "--rank", 0).stdout
    assert answer("bisect", location, "--rank", 1, status=1)["last_good"] == "t1"
    assert "--rank 0" in run("bisect", location, status=1).stderr


@pytest.mark.parametrize(
    ("arguments", "before", "after"),
    [
        (["c", "a", "b"], ("c", "a"), ("c", "b")),
        (["c", "other"], ("c", None), ("other", None)),
        (["c", "s3://b/x"], ("c", None), ("s3://b/x", None)),
        (["c", "a", "../d"], ("c", "a"), ("../d", None)),
        (["c", "/d", "b"], ("c", None), ("/d", "b")),
        (["c", "a", "/d", "b"], ("c", "a"), ("/d", "b")),
    ],
)
def test_pair_of_arguments(arguments, before, after):
    assert pair_of(arguments) == (before, after)


@pytest.mark.parametrize(
    ("arguments", "other"),
    [
        (["c"], None),
        (["c", "a", "b", "d"], None),
        (["c", "a", "b", "/d"], None),
        (["c", "/d", "/e"], None),
        (["c", "/d", "a", "b"], None),
        (["c", "a"], "/d"),
        (["c", "a", "/d", "b"], "/d"),
    ],
)
def test_arguments_that_are_no_pair_are_refused(arguments, other):
    with pytest.raises(click.UsageError, match="URL"):
        pair_of(arguments, other)


def test_diff_of_two_urls_with_and_without_tags(saved, run, answer, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(saved, copy)
    run("diff", saved, copy, "--exit-code")
    run("diff", saved, "step_500", copy, "step_500", "--exit-code")
    assert answer("diff", saved, "step_500", copy)["values"] == {"step": [500, 10000]}
    assert answer("diff", saved / "00000001-step_500", copy, "step_2500")["values"] == {"step": [500, 2500]}
    assert "does not exist" in run("diff", saved, "step_500", status=2).stderr
    assert "URL_A [A] URL_B [B]" in run("diff", saved, status=2).stderr
