"""Placement by the states that a master knows, and without them."""

from __future__ import annotations

import asyncio
import gc
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.agent import node_states
from fastcheck_dask.agent.node_states import NodeStates
from fastcheck_dask.agent.service import RunConfig, SaveService
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.states import NodeState
from fastcheck_dask.errors import NoMasterError
from fastcheck_dask.testing.clock import FakeClock

NODES = tuple(NodeInfo(name, "fcs://h:1", "r", "h", 100) for name in "abc")


class Reader:
    """Gives what it was told to."""

    def __init__(self) -> None:
        self.states: dict[str, NodeState] = {}
        self.error: Exception | None = None
        self.held = threading.Event()
        self.held.set()
        self.calls = 0

    def read(self, *, deadline: Any = None) -> dict[str, NodeState]:
        self.calls += 1
        assert self.held.wait(20)
        if self.error is not None:
            raise self.error
        return self.states


def placed(states: NodeStates) -> tuple[NodeInfo, ...]:
    return asyncio.run(states.of(NODES))


@pytest.fixture
def reader() -> Reader:
    return Reader()


def made(reader: Any, clock: Any) -> NodeStates:
    return NodeStates(reader, clock=clock)


def test_states_are_those_of_the_master_and_else_of_the_registry(reader: Reader) -> None:
    states = made(reader, FakeClock())
    reader.states = {"a": NodeState("draining", 1, 2), "z": NodeState("available", 1, 2)}
    assert placed(states) == (replace(NODES[0], state="draining"), *NODES[1:])
    states.close()


def test_node_that_says_in_the_registry_that_it_ends_is_believed_before_its_state_follows(
    reader: Reader,
) -> None:
    states = made(reader, FakeClock())
    reader.states = {"a": NodeState("available", 1, 2)}
    ending = replace(NODES[0], state="draining")
    assert asyncio.run(states.of((ending, NODES[1]))) == (ending, NODES[1])
    states.close()


def test_answer_that_comes_late_and_is_an_error_is_nobodys(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_states, "WAIT_SECONDS", 0.01)
    reader.error = NoMasterError("nobody", "", "")
    told: list[dict[str, Any]] = []

    async def ask() -> None:
        asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
        reader.held.clear()
        assert await states.of(NODES) == NODES
        reader.held.set()
        await asyncio.to_thread(states._thread.shutdown)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        states._asked = None
        gc.collect()

    states = made(reader, FakeClock())
    asyncio.run(ask())
    assert told == []


def test_no_master_is_done_without_and_not_asked_again_at_once(reader: Reader) -> None:
    clock = FakeClock()
    states = made(reader, clock)
    reader.error = NoMasterError("x", "", "")
    assert placed(states) == placed(states) == NODES
    assert reader.calls == 1
    clock.advance(node_states.BACK_OFF_SECONDS)
    reader.error, reader.states = None, {"b": NodeState("draining", 1, 2)}
    assert placed(states)[1].state == "draining"
    states.close()


def test_answer_that_takes_too_long_is_not_waited_for(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(node_states, "WAIT_SECONDS", 0.01)
    clock = FakeClock()
    states = made(reader, clock)
    reader.held.clear()
    assert placed(states) == NODES
    clock.advance(node_states.BACK_OFF_SECONDS)
    # Still in flight: no second question behind it.
    assert placed(states) == NODES
    assert reader.calls == 1
    reader.held.set()
    states.close()


def test_service_places_nothing_on_a_node_that_drains(reader: Reader, tmp_path: Path) -> None:
    coordinator = EmbeddedCoordinator(tmp_path / "c.db")
    for node in NODES:
        coordinator.register(node)
    claim = coordinator.claim("run", "test")
    config = RunConfig(
        run="run",
        location=str(tmp_path / "objects"),
        coordinator_url="",
        peers=True,
        wanted_shards=None,
        settings=settings(local_dir=str(tmp_path / "shm"), encoders=1),
    )
    reader.states = {"a": NodeState("draining", 1, 2), "b": NodeState("available", 1, 2)}
    service = SaveService(config, coordinator, claim, lambda _: None, states=NodeStates(reader))  # type: ignore[arg-type]

    async def place() -> list[str]:
        try:
            choice = await service._placing.choose(None, set(), None)
            return [node.name for node in choice.nodes]
        finally:
            await service.close()

    try:
        assert sorted(asyncio.run(place())) == ["b", "c"]
    finally:
        coordinator.close()
