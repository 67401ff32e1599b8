"""What do idle storage nodes, a master and a save cost a ZooKeeper server?

Counted, not timed: what a server has to write to its log and send to the others is a transaction, and its
counter (``Zxid``) tells it apart from what costs no more than an answer from memory (reads, and the pings of
sessions). Nodes that are registered and do nothing more are the baseline.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from benchmarks.machine import console, describe, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination import NodeInfo, connect
from fastcheck_dask.coordination.zookeeper.server import ZooKeeperServer
from fastcheck_dask.testing.cluster import StorageCluster

REGISTERED = 50
NODES = 4
SAVES = 10
SECONDS = 20.0


@dataclass(frozen=True)
class Count:
    """What a server has counted."""

    at: float
    transactions: int
    requests: int

    @classmethod
    def now(cls, server: ZooKeeperServer) -> Count:
        """Ask a server."""
        transactions = re.search(r"Zxid: (0x[0-9a-f]+)", server.ask("srvr"))
        requests = re.search(r"zk_packets_received\s+(\d+)", server.ask("mntr"))
        assert transactions is not None
        assert requests is not None
        return cls(time.monotonic(), int(transactions[1], 16), int(requests[1]))


@dataclass(frozen=True)
class Rate:
    """Transactions and requests per second."""

    transactions: float
    requests: float

    @classmethod
    def between(cls, before: Count, after: Count) -> Rate:
        """Return the rates between two counts."""
        seconds = after.at - before.at
        return cls(
            (after.transactions - before.transactions) / seconds, (after.requests - before.requests) / seconds
        )

    def row(self, what: str) -> list[str]:
        """Return a row of the table."""
        return [what, f"{self.transactions:.2f}", f"{self.requests:.1f}"]


def idle(server: ZooKeeperServer) -> Rate:
    """Return the rates while nothing is done."""
    before = Count.now(server)
    threading.Event().wait(SECONDS)
    return Rate.between(before, Count.now(server))


@contextlib.contextmanager
def registered(url: str) -> Iterator[None]:
    """Hold as many sessions as there may be storage nodes, each with a registration."""
    with contextlib.ExitStack() as stack:
        for number in range(REGISTERED):
            coordinator = stack.enter_context(contextlib.closing(connect(url)))
            info = NodeInfo(f"n{number}", "fcs://127.0.0.1:1", "r", "h", 1)
            stack.callback(coordinator.register(info).close)
        yield


def wait_published(url: str) -> None:
    """Wait until all nodes have published their states."""
    deadline, pause = Deadline.after(60.0), threading.Event()
    with contextlib.closing(connect(url)) as coordinator:
        while len(coordinator.entries.names("states")) < NODES:
            assert not deadline.passed, "the nodes do not publish their states"
            pause.wait(0.1)


def saves(server: ZooKeeperServer, manager: FastCheckManager) -> tuple[Rate, float, float]:
    """Return the rates of an owner that does nothing, and transactions and requests of one save."""
    state = {"w": np.arange(2**18, dtype=np.float32)}
    for number in range(3):
        # The first ones also describe the run, begin its lease, and change what the nodes publish of it.
        manager.save_async(state, f"first{number}").wait("object")
    quiet = idle(server)
    before = Count.now(server)
    for number in range(SAVES):
        state["w"] += 1
        manager.save_async(state, f"step{number}").wait("object")
    after = Count.now(server)
    seconds = after.at - before.at
    transactions = (after.transactions - before.transactions - quiet.transactions * seconds) / SAVES
    requests = (after.requests - before.requests - quiet.requests * seconds) / SAVES
    return quiet, transactions, requests


def main() -> None:
    """Print the tables."""
    with tempfile.TemporaryDirectory() as name, ZooKeeperServer(Path(name) / "zookeeper") as server:
        with registered(f"zk://{server.hosts}/registered"):
            rows = [idle(server).row(f"{REGISTERED} registered nodes, nothing else")]
        url = f"zk://{server.hosts}/nodes"
        with StorageCluster(Path(name) / "nodes", NODES, coordinator=url) as cluster:
            wait_published(url)
            rows.append(idle(server).row(f"{NODES} storage nodes, one of them leads, no run"))
            options = {"coordinator": cluster.coordinator, "num_shards": NODES - 1, "encoders": 1}
            with FastCheckManager(f"{name}/ckpts", local_dir=f"{name}/local", **options) as manager:
                quiet, transactions, requests = saves(server, manager)
                rows.append(quiet.row("the same, and a run that does not save"))
    table(f"per second, over {SECONDS:g} s", ["", "transactions", "requests"], rows)
    table(
        f"one save on {NODES} nodes, persisted: mean of {SAVES}",
        ["", "transactions", "requests"],
        [["besides what is idle", f"{transactions:.1f}", f"{requests:.1f}"]],
    )


if __name__ == "__main__":
    console.print(describe())
    main()
