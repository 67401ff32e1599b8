"""A node's part in the states: over the wire, and as a process."""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.election import master_of
from fastcheck_dask.coordination.states import NodeState, StateReader
from fastcheck_dask.errors import CoordinationError, NoMasterError, TierError
from fastcheck_dask.node.master_link import WireLink
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.node.states import NodeStates, node_state
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.fakes import FakeCoordinator
from fastcheck_dask.tiers.peer import PeerClient

PATIENCE_SECONDS = 30.0


def read_until(reader: StateReader, wanted: Any) -> dict[str, NodeState]:
    """Read until the states are as wanted."""
    deadline = Deadline.after(PATIENCE_SECONDS)
    while True:
        assert not deadline.passed
        with contextlib.suppress(CoordinationError):
            states = reader.read(deadline=deadline)
            if wanted(states):
                return states


def test_node_state_is_coarse_and_lists_committed_runs() -> None:
    runs = {"b": [3, "t"], "a": [7, "t"], "c": None}
    status = {"used_bytes": 0, "limit_bytes": 1600, "runs": runs}
    assert node_state(status, draining=False) == NodeState("available", 0, 1600, {"a": 7, "b": 3}, 3)
    assert [
        node_state({**status, "used_bytes": used}, draining=True).used_bytes for used in (1, 100, 101, 1599)
    ] == [
        100,
        100,
        200,
        1600,
    ]


def test_node_state_of_many_runs_stays_small() -> None:
    runs = {f"run-{number:04d}-{'x' * 100}": [number, "t"] for number in range(1000)}
    found = node_state({"used_bytes": 0, "limit_bytes": 1, "runs": runs}, draining=False)
    assert found.runs == 1000
    assert len(found.generations) == 64
    assert len(found.to_bytes()) < 20_000


def test_link_nobody_leads_or_leader_is_gone_is_no_master() -> None:
    entries = FakeCoordinator().entries
    link = WireLink(entries, PeerClient)
    with pytest.raises(NoMasterError, match="nobody"):
        link.ask({"op": "state_query"})


def test_states_over_the_wire(store: ShardStore, serve: Any, author: Any, chunks: Any) -> None:
    coordinator = FakeCoordinator()
    node = coordinator.another().entries
    states = NodeStates("node-1", node, store.status)
    server = serve(store, operations=states.operations)
    reading = coordinator.another().entries
    reader = StateReader(reading, link=WireLink(reading, PeerClient))
    states.start(server.address)
    try:
        read_until(reader, lambda found: "node-1" in found)
        author.save({"a": chunks.bits(1)})
        found = read_until(reader, lambda found: found["node-1"].generations == {"run": 1})
        assert found["node-1"].used_bytes > 0
        states.drain()
        assert reader.read(deadline=Deadline.after(PATIENCE_SECONDS))["node-1"].state == "draining"
        master = master_of(reading)
        assert master is not None
        assert (master.name, master.address) == ("node-1", server.address)
    finally:
        states.close()
    with pytest.raises(NoMasterError):
        # It resigned, and its name stays there until another leads.
        WireLink(reading, PeerClient).ask({"op": "state_query"})


def test_link_to_a_node_that_does_not_know_the_operation_is_no_master(store: ShardStore, serve: Any) -> None:
    coordinator = FakeCoordinator()
    states = NodeStates("node-1", coordinator.entries, store.status)
    server = serve(store)
    states.start(server.address)
    try:
        deadline = Deadline.after(PATIENCE_SECONDS)
        while master_of(coordinator.entries) is None:
            assert not deadline.passed
        with pytest.raises(NoMasterError, match="operation 'state_query'"):
            WireLink(coordinator.entries, PeerClient).ask({"op": "state_query"})
    finally:
        states.close()


def test_operation_of_the_server_cannot_be_replaced(store: ShardStore, serve: Any) -> None:
    server = serve(
        store, operations={"holds": lambda request: {"mine": True}, "x": lambda request: {"mine": 1}}
    )

    async def ask(op: str) -> Any:
        client = PeerClient("node-1", server.address, grace_seconds=20.0)
        try:
            return await client.ask({"op": op, "run": "run"})
        finally:
            await client.close()

    assert asyncio.run(ask("x")) == {"mine": 1}
    assert "mine" not in asyncio.run(ask("holds"))
    with pytest.raises(TierError, match="operation 'y'"):
        asyncio.run(ask("y"))


def test_processes_master_killed_another_leads(tmp_path: Path) -> None:
    with (
        StorageCluster(tmp_path / "cluster", 3) as cluster,
        contextlib.closing(connect(cluster.coordinator)) as coordinator,
    ):
        reader = StateReader(coordinator.entries, link=WireLink(coordinator.entries, PeerClient))
        read_until(reader, lambda found: len(found) == 3)
        master = master_of(coordinator.entries)
        assert master is not None
        cluster.kill(master.name)
        states = read_until(reader, lambda found: len(found) == 2)
        assert {state.state for state in states.values()} == {"available"}
        following = master_of(coordinator.entries)
        assert following is not None
        assert following.name in states
