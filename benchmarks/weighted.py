"""How much less does a save take over unequal links when stripes are weighted, beside even ones?

Four nodes, one of which has a quarter of the others' bandwidth; noise, raw and whole, to three data shards.
With weighted stripes the first saves are even, until the rates are known. Needs root, ip netns and tc; says
so and does nothing otherwise.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.machine import console, describe, spread, table
from benchmarks.shaped import in_host, network, nodes, why_not
from fastcheck_dask import FastCheckManager
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine.dealing import PATIENCE_SAVES

SHARDS = 3
#: Mbit/s of the nodes, for each one of the slow node.
FACTORS = (4, 4, 4, 1)
HOST_FACTOR = 16
ROUNDS = 3
#: Saves with weighted stripes until chunks are moved, and that move itself.
_FIRST = PATIENCE_SAVES + 2


def saves(
    folder: Path, coordinator: str, *, stripes: str, nbytes: int, count: int
) -> list[dict[str, object]]:
    """Save the same state again and again; return the stats of each save.

    Runs in the namespace of the training host.
    """
    session = connect(coordinator)
    try:
        while len(session.nodes()) <= SHARDS:
            time.sleep(0.1)
    finally:
        session.close()
    rng = np.random.default_rng(0)
    state = {f"w{i}": rng.integers(0, 2**32, nbytes // 24, np.uint32) for i in range(6)}
    with FastCheckManager(
        folder / stripes,
        coordinator=coordinator,
        num_shards=SHARDS,
        stripes=stripes,
        # What saves tell is enough to go by, and what is looked at here.
        measure_links=False,
        local_dir=folder / "local",
        compression="never",
        persist_every=0,
        encoders=1,
        chunk_bytes=max(nbytes // 96, 4096),
        # A slow link is no lost message here.
        floor_bandwidth="100 kB",
        grace="20 s",
    ) as manager:
        handles = (manager.save_async(state, f"s{number}").wait("peers") for number in range(count))
        return [dict(handle.stats) for handle in handles]


def measured(node_mbit: int, *, stripes: str, nbytes: int, count: int) -> list[dict[str, object]]:
    """Return the stats of saves over links of which the slow one has so many Mbit/s."""
    rates = [factor * node_mbit for factor in FACTORS]
    with tempfile.TemporaryDirectory() as name, network(rates, HOST_FACTOR * node_mbit):
        coordinator = f"sqlite:///{name}/coordinator.db"
        with nodes(Path(name), coordinator, len(rates)):
            options = {"stripes": stripes, "nbytes": nbytes, "count": count}
            command = [sys.executable, "-m", "benchmarks.weighted", "--inside", name, coordinator]
            command = [*in_host(), *command, json.dumps(options)]
            output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    found: list[dict[str, object]] = json.loads(output.splitlines()[-1])
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--node-mbit", type=int, default=25, help="rate of the slow node's link")
    parser.add_argument("--inside", nargs=3, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside is not None:
        folder, coordinator, options = arguments.inside
        print(json.dumps(saves(Path(folder), coordinator, **json.loads(options))))
        return
    if (missing := why_not()) is not None:
        console.print(f"links are not measured: {missing}")
        return
    console.print(describe())
    # Two seconds at the slow node, dealt evenly.
    nbytes = int(SHARDS * 2 * arguments.node_mbit * 1e6 / 8)
    seconds = {}
    for stripes, count in (("even", 1 + ROUNDS), ("weighted", _FIRST + ROUNDS)):
        found = measured(arguments.node_mbit, stripes=stripes, nbytes=nbytes, count=count)
        seconds[stripes] = [float(str(stats["save_seconds"])) for stats in found[-ROUNDS:]]
    medians = {stripes: sorted(took)[ROUNDS // 2] for stripes, took in seconds.items()}
    table(
        f"Seconds of a save to nodes of {', '.join(str(f * arguments.node_mbit) for f in FACTORS)} Mbit/s",
        ["stripes", "seconds", "ratio"],
        [[name, spread(took), f"{medians[name] / medians['even']:.2f}"] for name, took in seconds.items()],
    )
    # All that the data shards take at once, beside the slow node with a third.
    most = sum(FACTORS) - max(FACTORS)
    console.print(f"the links allow a ratio of {min(FACTORS) * SHARDS / most:.2f}")


if __name__ == "__main__":
    main()
