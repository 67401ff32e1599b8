"""How long does training wait for a save, against one warm memory copy of the same state?

The copy goes tensor by tensor into memory that was touched before. Both are taken in turn, and the save in
flight is over before the next pair, so that only the copying is compared. The aim is at most 1.5 times.
"""

from __future__ import annotations

import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.machine import spread, table
from benchmarks.training import Training, nbytes
from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.cluster import StorageCluster

ROUNDS = 12
WARM_UP = 3


def _tensors(tree: Any) -> list[torch.Tensor]:
    if isinstance(tree, torch.Tensor):
        return [tree]
    children = tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list | tuple) else ()
    return [tensor for child in children for tensor in _tensors(child)]


def measure(width: int) -> list[str]:
    """Return one row of the table."""
    training = Training(width)
    training.steps(5)
    copies, stalls = [], []
    with (
        tempfile.TemporaryDirectory() as name,
        StorageCluster(Path(name) / "nodes", 4) as cluster,
        FastCheckManager(f"{name}/ckpts", coordinator=cluster.coordinator, persist_every=0) as manager,
    ):
        room = [np.zeros(t.shape, t.numpy().dtype) for t in _tensors(training.state())]
        for number in range(ROUNDS + WARM_UP):
            training.steps(1)
            state = training.state()
            started = time.perf_counter()
            for target, tensor in zip(room, _tensors(state), strict=True):
                np.copyto(target, tensor.numpy())
            copied = time.perf_counter() - started
            handle = manager.save_async(state, f"step{number}")
            handle.wait("peers")
            if number >= WARM_UP:
                copies.append(copied)
                stalls.append(handle.stats["stall_seconds"] - handle.stats["busy_seconds"])
    ratios = [stall / copied for stall, copied in zip(stalls, copies, strict=True)]
    return [
        f"{nbytes(state) / 1e6:.0f} MB in {len(room)} tensors",
        spread(copies, "ms", 1e3),
        spread(stalls, "ms", 1e3),
        spread(ratios),
    ]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    table(
        "Stall: what save_async takes of training's time (aim: at most 1.5 copies)",
        ["state", "one warm copy", "save_async", "ratio"],
        [measure(width) for width in (512, 1024, 2048)],
    )


if __name__ == "__main__":
    main()
