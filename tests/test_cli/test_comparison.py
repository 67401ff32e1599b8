from __future__ import annotations

import shutil
import sys

import numpy as np

from fastcheck_dask.testing.checkpoints import write_checkpoint


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
