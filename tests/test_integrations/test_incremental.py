"""IncrementalCheckpointer: real trainings that go on bit for bit, and models that do not fit."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fastcheck_dask import FastCheckManager, IncrementalCheckpointer
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptDataError,
    LayoutError,
    UnsupportedLeafError,
)


def training(seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.2), nn.Linear(16, 32), nn.Linear(32, 4))
    for parameter in model[0].parameters():
        parameter.requires_grad_(False)
    return model, torch.optim.Adam((p for p in model.parameters() if p.requires_grad), lr=1e-3)


def epoch_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Train an epoch; data and dropout come from the global generators."""
    for _ in range(3):
        optimizer.zero_grad()
        model(torch.randint(0, 50, (8,))).square().mean().backward()
        optimizer.step()
        random.random()
        np.random.random()


def bits(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[bytes]:
    state = optimizer.state_dict()["state"]
    moments = [value for of in state.values() for value in of.values()]
    return [t.numpy().tobytes() for t in (*model.state_dict().values(), *moments)]


def test_training_goes_on_from_every_epoch_bit_for_bit(tmp_path: Path) -> None:
    model, optimizer = training()
    checkpointer = IncrementalCheckpointer(model, optimizer, tmp_path / "c", chunk_bytes=1024)
    names, whole = [], []
    for epoch in range(6):
        epoch_of(model, optimizer)
        names.append(checkpointer.save(epoch, is_full=epoch == 2))
        assert checkpointer.last_save is not None
        whole.append(checkpointer.last_save.marker.base is None)
    assert whole == [True, False, True, False, False, False]
    assert checkpointer.last_save.shared
    epoch_of(model, optimizer)
    expected = bits(model, optimizer)
    for path in (None, tmp_path / "c", str(tmp_path / "c" / names[5]), "epoch5", names[5]):
        other, its = training(seed=9)
        loader = IncrementalCheckpointer(other, its, tmp_path / "c")
        assert loader.load(path) == 5
        epoch_of(other, its)
        assert bits(other, its) == expected
    for epoch in range(5):
        other, its = training(seed=9)
        assert checkpointer.load(f"epoch{epoch}", other, its) == epoch
        for _ in range(6 - epoch):
            epoch_of(other, its)
        assert bits(other, its) == expected


def test_load_of_another_folder_and_by_the_manager(tmp_path: Path) -> None:
    model, optimizer = training()
    checkpointer = IncrementalCheckpointer(model, optimizer, tmp_path / "a")
    epoch_of(model, optimizer)
    checkpointer.save(0)
    epoch_of(model, optimizer)
    name = checkpointer.save(1, metrics={"loss": 0.5})
    other = IncrementalCheckpointer(*training(seed=9), tmp_path / "b")
    assert other.load(tmp_path / "a") == 1
    assert other.load(tmp_path / "a" / name) == 1
    assert other.optimizer is not None
    assert bits(other.model, other.optimizer) == bits(model, optimizer)
    with FastCheckManager(tmp_path / "a", local_dir=tmp_path / "shm", encoders=1) as manager:
        assert manager.tags() == ["epoch0", "epoch1"]
        state = manager.load()
    assert state["epoch"] == 1
    assert torch.equal(state["model"]["3.weight"], model.state_dict()["3.weight"])


SCRIPT = """
import sys, os, signal, torch
from fastcheck_dask import IncrementalCheckpointer
torch.manual_seed(0)
model = torch.nn.Linear(40, 40)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
saver = IncrementalCheckpointer(model, optimizer, sys.argv[1])
if len(sys.argv) > 2:
    print(saver.load())
    sys.exit()
for epoch in range(3):
    optimizer.zero_grad()
    model(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    if epoch == 2:
        store, write = saver._run.folder.store, saver._run.folder.store.write
        store.write = lambda *a: (write(*a), os.kill(os.getpid(), signal.SIGKILL))
    saver.save(epoch)
"""


@pytest.mark.slow
def test_training_killed_in_the_middle_of_a_save_loads_the_one_before(tmp_path: Path) -> None:
    arguments = [sys.executable, "-c", SCRIPT, str(tmp_path / "c")]
    assert subprocess.run(arguments, timeout=100).returncode == -9
    found = subprocess.run([*arguments, "load"], timeout=100, capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["1"]


def test_load_refuses_what_does_not_fit_and_changes_nothing(tmp_path: Path) -> None:
    model, optimizer = training()
    epoch_of(model, optimizer)
    saver = IncrementalCheckpointer(model, optimizer, tmp_path / "c")
    saver.save(0)
    larger = nn.Sequential(nn.Embedding(50, 16), nn.Dropout(0.2), nn.Linear(16, 33), nn.Linear(33, 4))
    before = [p.clone() for p in larger.parameters()]
    with pytest.raises(LayoutError, match=r"2\.weight \(saved \(32, 16\), model \(33, 16\)\)"):
        saver.load(None, larger, torch.optim.Adam(larger.parameters()))
    assert all(map(torch.equal, before, larger.parameters()))
    same, _ = training()
    with pytest.raises(LayoutError, match=r"parameters by group: saved \[4\], here \[5\]"):
        saver.load(None, same, torch.optim.Adam(same.parameters()))
    alone = IncrementalCheckpointer(model, None, tmp_path / "d")
    alone.save(3)
    with pytest.raises(LayoutError, match="no optimizer"):
        saver.load(tmp_path / "d")


def test_load_says_what_is_not_there_or_damaged(tmp_path: Path) -> None:
    model, optimizer = training()
    saver = IncrementalCheckpointer(model, optimizer, tmp_path / "c")
    with pytest.raises(CheckpointNotFoundError, match="has no checkpoint"):
        saver.load()
    for epoch in range(2):
        epoch_of(model, optimizer)
        saver.save(epoch)
    with pytest.raises(CheckpointNotFoundError, match=r"epoch9.*epoch1, epoch0"):
        saver.load("epoch9")
    with pytest.raises(ConfigError):
        saver.load("not a tag")
    chunk = next(
        p for p in (tmp_path / "c/00000001-epoch0/model/2.weight").rglob("*") if p.parent.name == "0"
    )
    data = bytearray(chunk.read_bytes())
    data[len(data) // 2] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CorruptDataError, match="00000001-epoch0"):
        saver.load("epoch1")


def test_arguments_that_cannot_be_are_refused(tmp_path: Path) -> None:
    model, optimizer = training()
    wrong: dict[str, Any]
    for wrong in ({"keep_last": 0}, {"max_deltas": -1}, {"full_hours": "x"}, {"unknown": 1}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            IncrementalCheckpointer(model, optimizer, tmp_path / "c", **wrong)
    whole: dict[str, Any] = {"max_deltas": 0, "max_references": 0}
    saver = IncrementalCheckpointer(model, optimizer, tmp_path / "c", keep_last=1, **whole)
    with pytest.raises(TypeError):
        saver.save(1.5)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="loss"):
        saver.save(1, metrics={"loss": "low"})  # type: ignore[dict-item]
    optimizer.param_groups[0]["hook"] = object()
    with pytest.raises(UnsupportedLeafError):
        saver.save(1)
    del optimizer.param_groups[0]["hook"]
    for epoch in range(3):
        epoch_of(model, optimizer)
        saver.save(epoch)
    assert [marker.tag for marker in saver._run.folder.committed()] == ["epoch2"]


def test_generators_are_left_alone_and_come_back(tmp_path: Path) -> None:
    model, optimizer = training()
    saver = IncrementalCheckpointer(model, optimizer, tmp_path / "c")
    before = random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()
    saver.save(0)
    assert (random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()) == before
    drawn = random.random(), np.random.random(), torch.rand(3).tolist()
    saver.load()
    assert (random.random(), np.random.random(), torch.rand(3).tolist()) == drawn
