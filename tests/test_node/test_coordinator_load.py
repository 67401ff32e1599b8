"""What many idle storage nodes cost a real ZooKeeper: nothing but the pings of their sessions."""

from __future__ import annotations

import contextlib
import re
import threading

import pytest

from fastcheck_dask.coordination import NodeInfo, connect
from fastcheck_dask.testing.zookeeper import ZooKeeperServer

NODES = 12


def zxid(server):
    """Return the number of the last write."""
    return int(re.search(r"Zxid: (0x[0-9a-f]+)", server.ask("srvr"))[1], 16)


def received(server):
    """Return how many requests came, pings too."""
    return int(re.search(r"zk_packets_received\s+(\d+)", server.ask("mntr"))[1])


@pytest.mark.zookeeper
def test_idle_nodes_write_nothing(tmp_path):
    with contextlib.ExitStack() as stack:
        # Of its own: in one that is shared, sessions of killed processes end, which is a write.
        zookeeper = stack.enter_context(ZooKeeperServer(tmp_path))
        sessions = []
        for number in range(NODES):
            coordinator = connect(f"zk://{zookeeper.hosts}/root", session_seconds=3.0)
            stack.callback(coordinator.close)
            name = f"n{number}"
            registration = coordinator.register(NodeInfo(name, "fcs://127.0.0.1:1", "r", "h", 1))
            stack.callback(registration.close)
            sessions.append((coordinator, registration))
        before = zxid(zookeeper)
        start = received(zookeeper)
        # Each session pings several times meanwhile: a node that wrote at each look would show.
        pause = threading.Event()
        while received(zookeeper) < start + 8 * NODES:
            for coordinator, registration in sessions:
                registration.restore()
                coordinator.health()
            pause.wait(0.1)
        assert zxid(zookeeper) == before
