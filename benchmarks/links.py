"""How much of shaped links does a save to storage nodes use, and a load, for one to three data shards?

Each node and the training host get a network namespace and a link of their own. The links are shaped, the
host's three times as fast as a node's. What is saved is noise, raw, so that the links are what is measured.
Loads fill tensors that are there, as those of a model that was built; and fresh memory, whose price is
measured with them. Beside the rates stands what the links can take for N nodes; the aim is 0.9 of it. Then
the links are measured as ``fastcheck links`` does, and the number of shards that follows has to be three.

Needs root, ip netns and tc; says so and does nothing otherwise. With few cores it would be the CPU that is
measured: ``--node-mbit`` sets the rate of a node.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import console, describe, spread, table
from benchmarks.shaped import in_host, network, nodes, why_not
from fastcheck_dask import FastCheckManager
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.placement.bandwidth import measure
from fastcheck_dask.tiers.peer import clients_for

NODES = 4
HOST_FACTOR = 3
ROUNDS = 3
#: At the rate of a node, seconds that a shard takes.
SHARD_SECONDS = 3.0


def inside(folder: Path, coordinator: str, node_mbit: int) -> dict[str, object]:
    """Measure; runs in the namespace of the training host."""
    session = connect(coordinator)
    while len(alive := session.nodes()) < NODES:
        time.sleep(0.1)
    session.close()
    links = asyncio.run(measure(alive, clients_for(settings())))
    found: dict[str, object] = {"shards": links.shards, "out": links.out, "one": links.one}
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        for shards in (1, 2, 3):
            found[str(shards)] = _rates(folder, Path(memory), coordinator, node_mbit, shards)
    return found


def _rates(
    folder: Path, memory: Path, coordinator: str, node_mbit: int, shards: int
) -> dict[str, list[float]]:
    nbytes = int(shards * SHARD_SECONDS * node_mbit * 1e6 / 8) // 4 * 4
    state = {f"w{i}": np.random.default_rng(i).integers(0, 2**32, nbytes // 24, np.uint32) for i in range(6)}
    live = {name: np.zeros_like(values) for name, values in state.items()}
    options: dict[str, Any] = {
        "coordinator": coordinator,
        "num_shards": shards,
        "compression": "never",
        "persist_every": 0,
        "encoders": 1,
        "chunk_bytes": "1 MiB",
    }
    found: dict[str, list[float]] = {"saves": [], "sending": [], "loads": [], "fresh": []}
    with FastCheckManager(folder / f"c{shards}", local_dir=memory / f"local{shards}", **options) as manager:
        for number in range(ROUNDS):
            handle = manager.save_async(state, f"s{number}").wait("peers")
            found["saves"].append(handle.stats["sent_bytes"] / handle.stats["save_seconds"])
            found["sending"].append(handle.stats["link_bytes_per_second"])
    for number, (kind, into) in enumerate([("loads", live), ("fresh", None)] * ROUNDS):
        elsewhere = memory / f"other{shards}{number}"
        for values in live.values():
            values.fill(1)
        with FastCheckManager(folder / f"c{shards}", local_dir=elsewhere, **options) as manager:
            loaded = manager.load(into=into)
            report = manager.last_load
        assert report is not None
        assert report.source == "peers"
        assert all(np.array_equal(loaded[name], state[name]) for name in state)
        found[kind].append(report.received_bytes / report.seconds)
        shutil.rmtree(elsewhere, ignore_errors=True)
    return found


def _row(shards: int, found: dict[str, list[float]], node: float) -> list[str]:
    # The parity goes out as well; and comes in only when something was lost.
    most_out, most_in = min(shards + 1, HOST_FACTOR) * node, min(shards, HOST_FACTOR) * node
    row = [str(shards)]
    for rates, most in ((found["saves"], most_out), (found["loads"], most_in), (found["fresh"], most_in)):
        row += [f"{most / 1e6:.0f}", spread(rates, "", 1e-6), f"{sorted(rates)[len(rates) // 2] / most:.2f}"]
    # Without what a save takes before the first byte and after the last one.
    row.insert(4, f"{sorted(found['sending'])[len(found['sending']) // 2] / most_out:.2f}")
    return row


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--node-mbit", type=int, default=1000, help="rate of a node's link")
    parser.add_argument("--inside", nargs=2, metavar=("FOLDER", "COORDINATOR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        folder, coordinator = arguments.inside
        print(json.dumps(inside(Path(folder), coordinator, arguments.node_mbit)))
        return
    if (missing := why_not()) is not None:
        console.print(f"links are not measured: {missing}")
        return
    console.print(describe())
    with (
        tempfile.TemporaryDirectory() as name,
        network([arguments.node_mbit] * NODES, HOST_FACTOR * arguments.node_mbit),
    ):
        coordinator = f"sqlite:///{name}/coordinator.db"
        with nodes(Path(name), coordinator, NODES):
            command = [sys.executable, "-m", "benchmarks.links", "--node-mbit", str(arguments.node_mbit)]
            command = [*in_host(), *command, "--inside", name, coordinator]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    node = arguments.node_mbit * 1e6 / 8
    table(
        f"MB/s over shaped links: {arguments.node_mbit} Mbit/s a node, {HOST_FACTOR} times that at the host",
        [
            *("N", "save: shaped", "reached", "share", "while sending"),
            *("load into: shaped", "reached", "share", "load: shaped", "reached", "share"),
        ],
        [_row(shards, found[str(shards)], node) for shards in (1, 2, 3)],
    )
    console.print(
        f"measured: {found['out'] / 1e6:.0f} MB/s to all nodes at once, {found['one'] / 1e6:.0f} to one; "
        f"automatic number of shards: {found['shards']}"
    )


if __name__ == "__main__":
    main()
