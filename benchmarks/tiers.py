"""How many bytes travel, and how long do save and recovery take, for one to three data shards?

Each round trains a step, saves to the storage nodes, and loads in a fresh manager whose shared memory is
empty: from the peers, with one node killed (parity), and from the object tier. Beside the times stand those
of torch.save and torch.load of the same state to the same disk, taken in turn.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.machine import spread, table
from benchmarks.training import Training, nbytes
from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.cluster import StorageCluster

ROUNDS = 5


def _timed(call: Callable[[], Any]) -> float:
    started = time.perf_counter()
    call()
    return time.perf_counter() - started


def measure(shards: int, training: Training) -> tuple[list[str], list[str]]:
    """Return one row of each table: bytes and times."""
    saves, torch_saves, sent, whole = [], [], [], 0
    peers, parity, objects, torch_loads = [], [], [], []
    with tempfile.TemporaryDirectory() as name, StorageCluster(Path(name) / "nodes", shards + 1) as cluster:
        options: dict[str, Any] = {
            "coordinator": cluster.coordinator,
            "num_shards": shards,
            "local_dir": f"{name}/local",
            # A fast link would otherwise have large saves go raw, and the bytes depend on the machine.
            "compression": "always",
        }
        file = Path(name) / "torch.pt"
        with FastCheckManager(f"{name}/ckpts", **options) as manager:
            for number in range(ROUNDS + 1):
                training.steps(1)
                state = training.state()
                torch_saves.append(_timed(lambda: torch.save(state, file)))  # noqa: B023
                handle = manager.save_async(state, f"step{number}")
                saves.append(_timed(lambda: handle.wait("peers")))  # noqa: B023
                handle.wait("object")
                if number == 0:
                    whole = handle.stats["sent_bytes"]
                else:
                    sent.append(handle.stats["sent_bytes"])
        for _ in range(ROUNDS):
            torch_loads.append(_timed(lambda: torch.load(file, weights_only=True)))
            with FastCheckManager(f"{name}/ckpts", **options) as manager:
                peers.append(_timed(manager.load))
        cluster.kill("n0")
        for _ in range(ROUNDS):
            with FastCheckManager(f"{name}/ckpts", **options) as manager:
                parity.append(_timed(manager.load))
        for number in range(1, shards + 1):
            cluster.kill(f"n{number}")
        for _ in range(ROUNDS):
            with FastCheckManager(f"{name}/ckpts", **options) as manager:
                objects.append(_timed(manager.load))
    sizes = [f"{nbytes(state) / 1e6:.0f} MB", f"{whole / 1e6:.0f} MB", spread(sent, "MB", 1e-6)]
    times = [saves[1:], torch_saves[1:], peers, parity, objects, torch_loads]
    return [str(shards), *sizes], [str(shards), *(spread(values, "ms", 1e3) for values in times)]


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    training = Training(1024)
    training.steps(20)
    rows = [measure(shards, training) for shards in (1, 2, 3)]
    table(
        "Bytes that travel, parity included; one training step between saves",
        ["N", "raw", "first save", "later ones"],
        [sizes for sizes, _ in rows],
    )
    table(
        "Times on loopback: medians, with their ranges",
        ["N", "save to peers", "torch.save", "load: peers", "one node lost", "object tier", "torch.load"],
        [times for _, times in rows],
    )
    first, last = training.losses[0], sum(training.losses[-5:]) / 5
    print(f"loss of the training behind it: {first:.2f} -> {last:.2f} in {len(training.losses)} steps")


if __name__ == "__main__":
    main()
