"""What does a storage node that is lost in the middle cost a save, and one that hangs a load?

Saves with all nodes alive and saves during which a node is killed are taken in turn, and so are loads with
all nodes alive and with one of them stopped. The aim for a save is at most twice an undisturbed one (a killed
node is detected at once); a load should not take as long as the deadline of a message, which is its size at
the floor bandwidth plus 2 s.
"""

from __future__ import annotations

import statistics
import tempfile
import threading
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import console, describe, spread, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.cluster import StorageCluster

ROUNDS = 5
SHARDS = 3
NBYTES = 192 * 2**20


def _state(number: int) -> dict[str, np.ndarray]:
    """Return noise, which does not compress: the links and the nodes are what is measured."""
    random = np.random.default_rng(number)
    count = 12
    return {f"w{i}": random.integers(0, 2**32, NBYTES // 4 // count, np.uint32) for i in range(count)}


def _save(manager: FastCheckManager, number: int) -> tuple[float, list[str]]:
    handle = manager.save_async(_state(number), f"step{number}").wait("peers")
    return handle.stats["save_seconds"], handle.stats["nodes"]


def saves(cluster: StorageCluster, manager: FastCheckManager) -> tuple[list[float], list[float]]:
    """Return the seconds of undisturbed saves and of those that lost a node."""
    undisturbed: list[float] = []
    disturbed: list[float] = []
    _, nodes = _save(manager, 0)
    number = 0
    while len(disturbed) < ROUNDS:
        number += 1
        seconds, nodes = _save(manager, number)
        undisturbed.append(seconds)
        victim = nodes[number % len(nodes)]
        state = _state(1000 + number)
        handle = manager.save_async(state, f"lost{number}")
        killing = threading.Timer(0.5 * statistics.median(undisturbed), cluster.kill, [victim])
        killing.start()
        handle.wait("peers")
        if handle.stats["replaced"]:
            disturbed.append(handle.stats["save_seconds"])
        killing.join()
        cluster.start_node(victim, rack=victim)
    return undisturbed[1:], disturbed


def loads(cluster: StorageCluster, folder: str, nodes: list[str]) -> tuple[list[float], list[float]]:
    """Return the seconds of loads with all nodes alive and with one of them stopped."""
    taken: tuple[list[float], list[float]] = ([], [])
    for number in range(ROUNDS):
        for stopped in (False, True):
            with FastCheckManager(
                f"{folder}/ckpts",
                coordinator=cluster.coordinator,
                local_dir=f"{folder}/other{number}{stopped}",
                persist_every=0,
                num_shards=SHARDS,
            ) as manager:
                victim = nodes[number % SHARDS]
                if stopped:
                    cluster.pause(victim)
                try:
                    started = time.perf_counter()
                    manager.load()
                    taken[stopped].append(time.perf_counter() - started)
                finally:
                    if stopped:
                        cluster.resume(victim)
    return taken


def main() -> None:
    """Print the table."""
    with tempfile.TemporaryDirectory() as name, StorageCluster(Path(name) / "nodes", SHARDS + 3) as cluster:
        options = {
            "coordinator": cluster.coordinator,
            "num_shards": SHARDS,
            "local_dir": f"{name}/local",
            "persist_every": 0,
            "compression": "always",
        }
        with FastCheckManager(f"{name}/ckpts", **options) as manager:
            save = saves(cluster, manager)
            nodes = _save(manager, 9999)[1]
        load = loads(cluster, name, nodes)
    rows = []
    for what, (well, ill) in (("save, a node killed halfway", save), ("load, a node stopped", load)):
        ratio = statistics.median(ill) / statistics.median(well)
        rows.append([what, spread(well, "s"), spread(ill, "s"), f"{ratio:.2f}"])
    table(
        f"{NBYTES / 1e6:.0f} MB of noise, N = {SHARDS}: medians, with their ranges",
        ["", "undisturbed", "one node lost or stopped", "ratio of the medians"],
        rows,
    )


if __name__ == "__main__":
    console.print(describe())
    main()
