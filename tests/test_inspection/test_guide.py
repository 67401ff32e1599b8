"""What the guide prints has to run as printed, and its commands have to be all that there are."""

from __future__ import annotations

import re
from pathlib import Path

import torch

from fastcheck_dask import cli

GUIDE = Path(__file__).parents[2] / "docs/guides/inspection.md"


def test_example_runs_as_printed(tmp_path, checkpoints, monkeypatch):
    weight = torch.arange(2000.0).reshape(20, 100)
    checkpoints.save(str(tmp_path / "ckpts"), "step_1", state={"model": {"weight": weight}, "step": 1})
    found = re.search(r"<!-- tested: inspection -->\n```python\n(.*?)```", GUIDE.read_text(), re.DOTALL)
    assert found
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(found[1], names)
    assert names["step"] == 1
    assert torch.equal(names["tensor"], weight)


def test_every_command_is_one_that_there_is():
    named = set(re.findall(r"^\| `fastcheck (\w+) URL", GUIDE.read_text(), re.MULTILINE))
    assert named == {"ls", "inspect", "verify", "diff", "bisect", "export", "gc"}
    assert named < set(cli.main.commands)
