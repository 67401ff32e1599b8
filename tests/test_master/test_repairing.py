"""When a run is repaired, and when not; nodes and repairs are told what to say."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.leases import renew
from fastcheck_dask.coordination.runs import RunDescription, describe
from fastcheck_dask.engine.repair import Repaired, RepairOrder
from fastcheck_dask.errors import NodeUnavailableError, TierError, UnrecoverableError
from fastcheck_dask.master import repairing
from fastcheck_dask.master.repairing import SILENT_ROUNDS, RepairDuty
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator


class Client:
    """One node as the survey sees it."""

    def __init__(self, world: World, name: str) -> None:
        self._world, self._name = world, name

    async def status(self) -> dict[str, Any]:
        self._world.asked += 1
        if self._name in self._world.silent:
            raise NodeUnavailableError(self._name, "is silent")
        run = {"staged": [], "pins": [], "ring": [], "bytes": 1, "damaged": []}
        held = self._world.held.get(self._name)
        if held is not None and self._world.asked <= self._world.stale:
            held = [0, "before"]
        runs = {} if held is None else {"run": {**run, "committed": held}}
        return {"limit_bytes": 99, "used_bytes": 1, "reserved_bytes": 0, "runs": runs}

    async def close(self) -> None:
        """Nothing is open."""


class World:
    """Four nodes; n0 to n2 hold generation 1 of one run."""

    def __init__(self, office: Any, commit: Any) -> None:
        self.coordinator, self.clock = FakeCoordinator(), FakeClock()
        self.nodes = {
            name: self.coordinator.another().register(NodeInfo(name, f"fcs://{name}:1", name, name, 99))
            for name in ("n0", "n1", "n2", "n3")
        }
        nodes = ("n0", "n1", "n2")

        def save() -> None:
            _, claim = commit(
                self.coordinator,
                "run",
                nodes=nodes,
                addresses=tuple(f"fcs://{name}:1" for name in nodes),
                shards=2,
                parity=True,
            )
            claim.close()

        self.save = save
        save()
        self.held: dict[str, list[Any]] = {name: [1, "token"] for name in nodes}
        self.silent: set[str] = set()
        self.asked = 0
        #: So many first answers are of before the commit.
        self.stale = 0
        self.orders: list[RepairOrder] = []
        self.on_repair: Callable[[], None] = lambda: None
        self.leadership = office(self.coordinator.entries)
        self.duty = RepairDuty(
            self.coordinator, lambda name, _: Client(self, name), self.repair, clock=self.clock
        )

    async def repair(self, order: RepairOrder) -> Repaired:
        self.orders.append(order)
        self.on_repair()
        self.held[order.node] = [order.record.generation, order.record.token]
        return Repaired(1, 2, 3)

    def lose(self, name: str) -> None:
        self.nodes[name].close()
        self.held.pop(name, None)

    def round(self) -> None:
        asyncio.run(self.duty.run(self.leadership))

    @property
    def holders(self) -> tuple[str, ...]:
        found = self.coordinator.latest("run")
        assert found is not None
        return found.nodes


@pytest.fixture
def world(office: Any, commit: Any) -> World:
    return World(office, commit)


def test_nothing_wrong_nothing_is_done(world: World) -> None:
    world.round()
    assert (world.orders, world.asked) == ([], 4)


def test_lost_node_is_replaced_and_the_record_says_so(world: World) -> None:
    world.lose("n1")
    world.round()
    assert world.holders == ("n0", "n3", "n2")
    world.round()
    assert len(world.orders) == 1


def test_silent_node_is_given_some_rounds(world: World) -> None:
    world.silent.add("n1")
    for _ in range(SILENT_ROUNDS - 1):
        world.round()
    assert world.orders == []
    world.round()
    assert world.holders == ("n0", "n3", "n2")


def test_silent_for_a_moment_again_and_again_is_not_lost(world: World) -> None:
    for _ in range(SILENT_ROUNDS):
        world.silent.add("n1")
        world.round()
        world.silent.clear()
        world.round()
    assert world.orders == []


def test_commit_between_the_survey_and_the_reading_of_the_record_is_no_loss(world: World) -> None:
    world.stale = 4
    world.round()
    assert (world.orders, world.asked) == ([], 8)


def test_newer_generation_during_the_repair_keeps_its_own_nodes(world: World) -> None:
    world.lose("n1")
    world.on_repair = world.save
    world.round()
    assert world.holders == ("n0", "n1", "n2")
    assert [r.nodes for r in world.coordinator.commits("run")] == [("n0", "n1", "n2")] * 2


def test_deposed_during_the_repair_changes_nothing(world: World) -> None:
    world.lose("n1")
    world.on_repair = world.leadership.depose
    with pytest.raises(TierError, match="master"):
        world.round()
    assert world.holders == ("n0", "n1", "n2")


def test_not_in_force_does_nothing(world: World) -> None:
    world.lose("n1")
    world.leadership.in_force = False
    world.round()
    assert world.orders == []


def test_failed_repair_is_tried_again_later_or_when_a_node_comes(world: World) -> None:
    def fail() -> None:
        raise UnrecoverableError("chunks", ("why",))

    world.lose("n1")
    world.on_repair = fail
    for _ in range(2):
        with pytest.raises(TierError, match="chunks"):
            world.round()
        world.round()
        world.clock.advance(2.0)
    assert len(world.orders) == 2
    world.coordinator.another().register(NodeInfo("n4", "fcs://n4:1", "n4", "n4", 99))
    world.on_repair = lambda: None
    world.round()
    assert "n1" not in world.holders


@pytest.mark.parametrize(("leased", "repairs"), [(True, 1), (False, 0)])
def test_persisted_run_is_repaired_while_its_lease_lasts(world: World, leased: bool, repairs: int) -> None:
    world.coordinator.mark_persisted("run", 1, "token")
    if leased:
        renew(world.coordinator.entries, "run", 60.0)
    world.lose("n1")
    world.round()
    assert len(world.orders) == repairs


def test_node_that_leaves_is_emptied_or_the_object_tier_gets_it(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    persisted = []

    async def persist(_coordinator: Any, _client: Any, description: Any, record: Any) -> None:
        persisted.append((description.location, record.nodes))

    monkeypatch.setattr(repairing, "persist_from_nodes", persist)
    describe(world.coordinator.entries, "run", RunDescription("/objects", 0))
    for name in ("n1", "n2"):
        world.nodes[name].update(NodeInfo(name, f"fcs://{name}:1", name, name, 99, "draining"))
    world.round()
    assert world.holders == ("n0", "n3", "n2")
    assert persisted == [("/objects", ("n0", "n3", "n2"))]
