"""Checkpoints of many tensors: errors stay short, all comes back, and no more is read than is asked for."""

from __future__ import annotations

import asyncio
import json
import os

import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli, open_checkpoint
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.tiers.local import LocalTier


def load(folder, tmp_path):
    """Load as a manager on a fresh host does."""
    with LocalTier("run", tmp_path / "shm") as local:
        recovered = asyncio.run(Recovery(local, folder, lambda *_: pytest.fail("no nodes")).load(()))
        assert recovered.report.damaged == []
        return recovered.state


def resnet152():
    """Return tensors of the shapes that torchvision's ResNet-152 has."""
    shapes = {"conv1.weight": (64, 3, 7, 7), "fc.weight": (1000, 2048), "fc.bias": (1000,)}

    def norm(name, width):
        shapes.update(
            {f"{name}.{part}": (width,) for part in ("weight", "bias", "running_mean", "running_var")}
        )
        shapes[f"{name}.num_batches_tracked"] = ()

    norm("bn1", 64)
    inner = 64
    for layer, (blocks, width) in enumerate([(3, 64), (8, 128), (36, 256), (3, 512)], 1):
        for block in range(blocks):
            name = f"layer{layer}.{block}"
            for number, (size, into) in enumerate(
                [((1, inner), width), ((3, width), width), ((1, width), 4 * width)], 1
            ):
                shapes[f"{name}.conv{number}.weight"] = (into, size[1], size[0], size[0])
                norm(f"{name}.bn{number}", into)
            if block == 0:
                shapes[f"{name}.downsample.0.weight"] = (4 * width, inner, 1, 1)
                norm(f"{name}.downsample.1", 4 * width)
            inner = 4 * width
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) * np.float32(0.02) for name, shape in shapes.items()}


@pytest.mark.slow
def test_checkpoint_of_a_resnet152_comes_back_and_is_inspected_without_its_data(
    folder, checkpoints, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    state = resnet152()
    # As of torchvision: 60,192,808 parameters, and the statistics of 155 layers of batch norm.
    assert (len(state), sum(v.size for v in state.values())) == (932, 60_344_387)
    checkpoints.save(folder, state=state, chunk_bytes=8 * 2**20)
    opened, _ = open_folder(folder)
    read, asked = opened.store.read, []
    monkeypatch.setattr(type(opened.store), "read", lambda _, path: asked.append(data := read(path)) or data)
    found = open_checkpoint(folder)
    assert sum(array.stored_nbytes for array in found.values()) > 150e6
    assert len(asked) == 2
    assert sum(map(len, asked)) < 1e6
    loaded = load(opened, tmp_path)
    assert all(loaded[name].tobytes() == value.tobytes() for name, value in state.items())


def short(text: object) -> bool:
    return len(str(text)) < 1000


@pytest.mark.slow
def test_five_thousand_tensors_come_back_and_are_told_in_few_words(
    folder, checkpoints, monkeypatch, tmp_path
):
    monkeypatch.setattr(os, "fsync", lambda _: None)
    state = {f"layers.{n}.weight": np.full(40 if n else 400, n, np.float32) for n in range(5000)}
    checkpoints.save(folder, state={"model": state})
    found = open_checkpoint(folder)
    assert len(found) == 5000
    opened, _ = open_folder(folder)
    assert verify(opened, opened.committed()[0]).intact
    loaded = load(opened, tmp_path)
    assert all(loaded["model"][name].tobytes() == value.tobytes() for name, value in state.items())
    assert short(repr(found))
    with pytest.raises(KeyError) as told:
        found["model/layers.9999.bias"]
    assert short(told.value)
    with pytest.raises(CheckpointNotFoundError) as told:
        open_checkpoint(folder, "typo")
    assert short(told.value)
    run = CliRunner()
    assert len(json.loads(run.invoke(cli.main, ["inspect", folder, "--json"]).stdout)["arrays"]) == 5000
    opened.store.delete_tree("00000001-t1")
    shown = run.invoke(cli.main, ["verify", folder])
    assert shown.exit_code == 1
    assert shown.stdout.count("\n") < 30
    assert "5003 of 5005 objects are not as saved" in shown.stdout
    told = json.loads(run.invoke(cli.main, ["verify", folder, "--json"]).stdout)
    assert len(told["checkpoints"][0]["problems"]) == 5003
    assert short(run.invoke(cli.main, ["ls", folder]).stdout)
