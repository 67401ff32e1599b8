"""Five thousand tensors: errors stay short, and nothing is read that is not asked for."""

from __future__ import annotations

import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli, open_checkpoint
from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.inspection.location import open_folder


def short(text: object) -> bool:
    return len(str(text)) < 1000


@pytest.mark.slow
def test_five_thousand_tensors_are_told_in_few_words_and_in_full_as_json(folder, checkpoints, monkeypatch):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    state = {f"layers.{n}.weight": np.full(40 if n else 400, n, np.float32) for n in range(5000)}
    checkpoints.save(folder, state={"model": state})
    found = open_checkpoint(folder)
    assert len(found) == 5000
    assert short(repr(found))
    with pytest.raises(KeyError) as told:
        found["model/layers.9999.bias"]
    assert short(told.value)
    with pytest.raises(CheckpointNotFoundError) as told:
        open_checkpoint(folder, "typo")
    assert short(told.value)
    run = CliRunner()
    assert len(json.loads(run.invoke(cli.main, ["inspect", folder, "--json"]).stdout)["arrays"]) == 5000
    opened, _ = open_folder(folder)
    opened.store.delete_tree("00000001-t1")
    shown = run.invoke(cli.main, ["verify", folder])
    assert shown.exit_code == 1
    assert shown.stdout.count("\n") < 30
    assert "5003 of 5005 objects are not as saved" in shown.stdout
    told = json.loads(run.invoke(cli.main, ["verify", folder, "--json"]).stdout)
    assert len(told["checkpoints"][0]["problems"]) == 5003
    assert short(run.invoke(cli.main, ["ls", folder]).stdout)
