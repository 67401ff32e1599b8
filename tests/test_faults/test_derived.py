"""Mixed-precision training on real storage nodes: the bf16 weights are the cast of their fp32 masters."""

from __future__ import annotations

import copy
import hashlib
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from fastcheck_dask.layout.state import flatten
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.training import TrainingHost

#: Only zarr and what it finds by itself.
_STOCK_ZARR = """
import hashlib, sys, zarr
group = zarr.open_group(sys.argv[1], mode="r")
for path in sys.argv[2:]:
    print(path, hashlib.sha256(group[path][:].tobytes()).hexdigest())
"""


class Training:
    """A network in bfloat16 with two tied layers; AdamW works on float32 masters."""

    def __init__(self) -> None:
        torch.manual_seed(1)
        self.model = nn.Sequential(nn.Linear(64, 300), nn.ReLU(), nn.Linear(300, 64)).bfloat16()
        self.tied = self.model[0].weight
        self.masters = [nn.Parameter(p.detach().float()) for p in self.model.parameters()]
        self.optimizer = torch.optim.AdamW(self.masters, lr=1e-3)
        self.data = torch.Generator().manual_seed(2)

    def step(self) -> None:
        inputs = torch.randn(16, 64, generator=self.data).bfloat16()
        (self.model(inputs) - inputs).square().mean().backward()
        for weight, master in zip(self.model.parameters(), self.masters, strict=True):
            assert weight.grad is not None
            master.grad, weight.grad = weight.grad.float(), None
        self.optimizer.step()
        self.cast()

    def cast(self) -> None:
        with torch.no_grad():
            for weight, master in zip(self.model.parameters(), self.masters, strict=True):
                weight.copy_(master)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model.state_dict(),
            "tied": self.tied,
            "masters": self.masters,
            "optimizer": self.optimizer.state_dict(),
            "data": self.data.get_state(),
        }

    def restore(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        with torch.no_grad():
            for master, found in zip(self.masters, state["masters"], strict=True):
                master.copy_(found)
        self.optimizer.load_state_dict(state["optimizer"])
        self.data.set_state(state["data"])


def digest_of(state: Any) -> str:
    """Return a digest of every bit and value of a state, tied tensors included."""
    flat = flatten(state)
    found = hashlib.sha256(repr(flat.tree).encode())
    for source in flat.sources:
        found.update(source.detach().contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def derived_bytes_of(training: Training) -> int:
    """Return the bytes of the bf16 weights; the biases of 64 elements stand in the manifest."""
    return sum(2 * p.numel() for p in training.model.parameters() if p.numel() > 128)


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "nodes", 3) as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2}) as made:
        yield made


def test_bf16_training_comes_back_from_every_tier_and_goes_on_bit_for_bit(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    training = Training()
    manager = host.manager()
    for step in range(4):
        training.step()
        handle = manager.save_async(training.state(), f"s{step}").wait("object", timeout=60)
        assert handle.stats["derived_bytes"] == derived_bytes_of(training)
        assert (handle.stats["deltas"] > 0) is (step > 0)
    saved = digest_of(training.state())
    expected = Training()
    # An optimizer keeps the very tensors that it is given.
    expected.restore(copy.deepcopy(training.state()))
    expected.step()

    state = manager.load()
    assert manager.last_load is not None
    assert manager.last_load.source == "local"
    assert digest_of(state) == saved
    host.lose_memory()
    for victim in (None, *handle.stats["nodes"]):
        if victim is not None:
            cluster.kill(victim)
        state, report = host.load_elsewhere()
        assert digest_of(state) == saved, victim
        assert report.raw_bytes["derived"] == derived_bytes_of(training)
        assert state["tied"].data_ptr() == state["model"]["0.weight"].data_ptr()
    assert report.source == "object"

    found = Training()
    found.restore(state)
    found.step()
    assert digest_of(found.state()) == digest_of(expected.state())
    directory = host.objects / f"{handle.generation:08d}-s3"
    printed = subprocess.run(
        [sys.executable, "-W", "error", "-c", _STOCK_ZARR, directory, "model/0.weight", "model/2.weight"],
        capture_output=True,
        text=True,
        check=True,
        cwd=host.folder,
    ).stdout.splitlines()
    for line, name in zip(printed, ("0.weight", "2.weight"), strict=True):
        bits = training.model.state_dict()[name].view(torch.int16).numpy().tobytes()
        assert line == f"model/{name} {hashlib.sha256(bits).hexdigest()}"


def test_equality_that_ends_and_begins_again_between_saves_is_exact_with_any_node_killed(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    training = Training()
    manager = host.manager(persist_every=0)
    for step, off in enumerate((False, True, True, False, True, False)):
        training.step()
        state = training.state()
        if off:
            # One bit, in the last element of one of the tensors.
            with torch.no_grad():
                training.tied.view(-1).view(torch.int16)[-1] ^= 1
        handle = manager.save_async(state, f"s{step}").wait(timeout=60)
        kept = training.tied.numel() * 2 if off else 0
        assert handle.stats["derived_bytes"] == derived_bytes_of(training) - kept
        found, report = host.load_elsewhere(objects=False)
        assert digest_of(found) == digest_of(state)
        assert report.source == "peers"
        training.cast()
    with torch.no_grad():
        training.tied.view(-1).view(torch.int16)[-1] ^= 1
    handle = manager.save_async(training.state(), "last").wait(timeout=60)
    cluster.kill(handle.stats["nodes"][0])
    found, report = host.load_elsewhere(objects=False)
    assert digest_of(found) == digest_of(training.state())
    assert report.source == "peers+parity"
