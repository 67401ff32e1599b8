"""How soon is it noticed that a storage node is dead (SIGKILL) or hangs (SIGSTOP)?

By whoever needs it: a save, of whose node a large message is on its way or none; a load, likewise; and
`fastcheck status`. Everything is at its default settings. A save has noticed when it has given the shard to
another node, which its log says; a load, when it has the state without that node; the status, when it is
complete and shows the node as silent. Beside it stands the same without a fault, of which the seconds are
given back. Aims: dead within 2 s, hung within 3 s.
"""

from __future__ import annotations

import logging
import statistics
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import numpy as np

from benchmarks.machine import console, describe, spread, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.monitoring.cluster import look
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.tiers.peer import clients_for

ROUNDS = 3
SHARDS = 3
NBYTES = 48 * 2**20
AIMS = {"killed": 2.0, "stopped": 3.0}

Fault = Callable[[StorageCluster, str], None]


def _kill(cluster: StorageCluster, name: str) -> None:
    cluster.kill(name)


def _stop(cluster: StorageCluster, name: str) -> None:
    cluster.pause(name)


FAULTS: dict[str, Fault] = {"killed": _kill, "stopped": _stop}


def _heal(cluster: StorageCluster, name: str, fault: str) -> None:
    if fault == "stopped":
        cluster.resume(name)
        cluster.kill(name)
    cluster.start_node(name, rack=name)


def _state(number: int) -> dict[str, np.ndarray]:
    """Return noise, which does not compress."""
    random = np.random.default_rng(number)
    return {f"w{i}": random.integers(0, 2**32, NBYTES // 48, np.uint32) for i in range(12)}


class Case:
    """One training host with its run, on nodes of which one after the other is harmed."""

    def __init__(self, folder: Path, cluster: StorageCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.number = 0

    def manager(self, local: str = "local", run: str = "ckpts") -> FastCheckManager:
        """Return a manager of the run, as at default settings but for what is not measured."""
        return FastCheckManager(
            f"{self.folder}/{run}",
            coordinator=self.cluster.coordinator,
            local_dir=f"{self.folder}/{local}",
            persist_every=0,
            num_shards=SHARDS,
            compression="never",
        )

    def save(self, manager: FastCheckManager) -> SaveHandle:
        """Begin a save."""
        self.number += 1
        return manager.save_async(_state(self.number), f"step{self.number}")


def saves(case: Case, fault: str, *, during: bool) -> tuple[list[float], list[float]]:
    """Return the seconds of saves without and with a fault, from its moment on."""
    well: list[float] = []
    ill: list[float] = []
    with case.manager() as manager:
        nodes = case.save(manager).wait("peers").stats["nodes"]
        for _ in range(4 * ROUNDS):
            if len(ill) == ROUNDS:
                break
            undisturbed = case.save(manager).wait("peers").stats
            share = 0.5 if during else 0.0
            victim, nodes = nodes[len(ill) % SHARDS], undisturbed["nodes"]
            happened: list[float] = []

            def harm(name: str = victim, at: list[float] = happened) -> None:
                FAULTS[fault](case.cluster, name)
                at.append(time.perf_counter())

            timer = threading.Timer(share * undisturbed["save_seconds"], harm)
            if not during:
                harm()
            handle = case.save(manager)
            if during:
                timer.start()
            handle.wait("peers")
            ended = time.perf_counter()
            if during:
                timer.join()
            if victim not in handle.stats["nodes"] and happened:
                ill.append(ended - happened[0])
                well.append((1 - share) * undisturbed["save_seconds"])
            _heal(case.cluster, victim, fault)
            nodes = case.save(manager).wait("peers").stats["nodes"]
    if len(ill) < ROUNDS:
        raise RuntimeError(f"the fault hit the save {len(ill)} times of {4 * ROUNDS} tries")
    return well, ill


def loads(case: Case, fault: str) -> tuple[list[float], list[float]]:
    """Return the seconds of loads without and with a fault before them."""
    taken: tuple[list[float], list[float]] = ([], [])
    with case.manager() as manager:
        nodes = case.save(manager).wait("peers").stats["nodes"]
    for number in range(ROUNDS):
        for harmed in (False, True):
            with case.manager(local=f"other{fault}{number}{harmed}") as manager:
                victim = nodes[number % SHARDS]
                if harmed:
                    FAULTS[fault](case.cluster, victim)
                began = time.perf_counter()
                manager.load()
                taken[harmed].append(time.perf_counter() - began)
                if harmed:
                    _heal(case.cluster, victim, fault)
                    nodes = case.save(manager).wait("peers").stats["nodes"]
    return taken


def statuses(case: Case, fault: str) -> tuple[list[float], list[float]]:
    """Return the seconds of ``fastcheck status`` without and with a fault before it."""
    taken: tuple[list[float], list[float]] = ([], [])
    with closing(connect(case.cluster.coordinator)) as coordinator:
        for number in range(ROUNDS):
            for harmed in (False, True):
                victim = f"n{number % (SHARDS + 1)}"
                if harmed:
                    FAULTS[fault](case.cluster, victim)
                began = time.perf_counter()
                seen = look(coordinator, clients_for(settings()))
                taken[harmed].append(time.perf_counter() - began)
                # SQLite sees a dead process at once, and has it out of the registry.
                silent = {node.info.name for node in seen.nodes if node.report is None}
                gone = {one.name for one in seen.gone}
                if harmed:
                    if victim not in silent | gone:
                        raise RuntimeError(f"the status does not show that {victim} was {fault}")
                    _heal(case.cluster, victim, fault)
    return taken


def main() -> None:
    """Print the table."""
    logging.getLogger("fastcheck_dask").setLevel(logging.ERROR)
    rows = []
    for fault, aim in AIMS.items():
        with (
            tempfile.TemporaryDirectory() as name,
            StorageCluster(Path(name) / "nodes", SHARDS + 3) as cluster,
        ):
            case = Case(Path(name), cluster)
            measured = {
                f"a save, {fault} in the middle": saves(case, fault, during=True),
                f"a save, {fault} before it": saves(case, fault, during=False),
                f"a load, {fault} before it": loads(case, fault),
                f"status, {fault} before it": statuses(case, fault),
            }
        for what, (well, ill) in measured.items():
            extra = [max(0.0, late - statistics.median(well)) for late in ill]
            ratio = statistics.median(ill) / statistics.median(well)
            rows.append(
                [what, spread(well, "s"), spread(ill, "s"), spread(extra, "s"), f"{ratio:.1f}", f"{aim:g} s"]
            )
    table(
        f"{NBYTES / 1e6:.0f} MB, N = {SHARDS}, default settings: medians, with their ranges",
        ["", "without", "with the fault", "later by", "ratio", "aim"],
        rows,
    )


if __name__ == "__main__":
    console.print(describe())
    main()
