"""Nodes that come, go, and come back, as the master notes it."""

from __future__ import annotations

import asyncio
import socket
from dataclasses import replace
from typing import Any

import pytest

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.lives import Here, Life, begin, read_lives
from fastcheck_dask.master.node_watch import KEEP_SECONDS, NodeWatchDuty, look
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator

INFO = NodeInfo("n0", "fcs://127.0.0.1:1", "r", "h", 1)
LIFE = Life("n0", INFO.address, "h", "r", 100.0, 7, "elsewhere", None)


class World:
    """A coordinator, the node's session with it, and a master that watches."""

    def __init__(self, office: Any) -> None:
        self.coordinator = FakeCoordinator()
        self.session = self.coordinator.another()
        self.session.register(INFO)
        begin(self.session.entries, LIFE, now=100.0, here=Here("h", "elsewhere", None))
        self.now, self.finding, self.probed = 1000.0, "refused", 0
        self.leadership = office(self.coordinator.entries)
        self.clock = FakeClock()
        self.duty = NodeWatchDuty(
            self.coordinator, probe=self.probe, unix_time=lambda: self.now, clock=self.clock
        )

    async def probe(self, _life: Life) -> Any:
        self.probed += 1
        return self.finding

    def round(self) -> Life | None:
        self.clock.advance(2.0)
        asyncio.run(self.duty.run(self.leadership))
        found = read_lives(self.coordinator.entries).get("n0")
        return None if found is None else found[0]

    @property
    def version(self) -> int:
        return read_lives(self.coordinator.entries)["n0"][1].version


@pytest.fixture
def world(office: Any) -> World:
    return World(office)


def test_node_that_is_registered_costs_no_write_and_no_probe(world: World) -> None:
    for _ in range(3):
        assert world.round().end is None
    assert (world.version, world.probed) == (0, 0)


def test_entries_are_left_alone_while_the_registry_stays_the_same(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    reads = []

    def names(path: str) -> tuple[str, ...]:
        reads.append(path)
        return ("n0",)

    monkeypatch.setattr(world.coordinator.entries, "names", names)

    def rounds(count: int) -> int:
        before = len(reads)
        for _ in range(count):
            world.clock.advance(2.0)
            asyncio.run(world.duty.run(world.leadership))
        return len(reads) - before

    assert rounds(29) == 1
    assert rounds(2) == 1, "once a minute anyway"
    world.coordinator.another().register(replace(INFO, name="n1"))
    assert rounds(10) == 1
    world.session.close()
    world.finding = None
    assert rounds(3) == 3, "it is open what became of it"


def test_node_gone_is_noted_once_with_time_and_cause(world: World) -> None:
    world.session.close()
    end = world.round().end
    assert (end.unix, end.cause, end.started_unix) == (1000.0, "killed", 100.0)
    world.now = 2000.0
    assert world.round().end == end
    assert world.version == 1


def test_node_that_lost_its_session_and_answers_is_not_noted(world: World) -> None:
    world.session.close()
    world.finding = None
    assert world.round().end is None


def test_node_that_is_back_is_not_gone_any_more_and_may_go_again(world: World) -> None:
    world.session.close()
    world.finding = "silent"
    assert world.round().end.cause == "silent"
    again = world.coordinator.another()
    again.register(INFO)
    assert world.round().end is None
    again.close()
    world.now, world.finding = 3000.0, "refused"
    assert [(end.cause, end.unix) for end in world.round().ends] == [("killed", 3000.0)]


def test_another_node_of_that_name_is_not_the_one_that_is_gone(world: World) -> None:
    world.session.close()
    world.round()
    world.coordinator.another().register(replace(INFO, address="fcs://127.0.0.1:2"))
    assert world.round().end is not None


def test_old_ends_are_forgotten(world: World) -> None:
    world.session.close()
    world.round()
    world.now += KEEP_SECONDS
    assert world.round() is not None
    world.now += 1
    world.clock.advance(60.0)
    assert world.round() is None


@pytest.mark.parametrize("when", ["before", "meanwhile"])
def test_master_that_is_none_writes_nothing(world: World, when: str) -> None:
    world.session.close()
    if when == "before":
        world.leadership.in_force = False
    else:
        begin(
            world.coordinator.entries,
            replace(LIFE, started_unix=900.0),
            now=900.0,
            here=Here("h", "elsewhere", None),
        )
        original = world.probe

        async def probe(life: Life) -> Any:
            begin(
                world.coordinator.entries,
                replace(LIFE, started_unix=950.0),
                now=950.0,
                here=Here("h", "elsewhere", None),
            )
            return await original(life)

        world.duty = NodeWatchDuty(world.coordinator, probe=probe, unix_time=lambda: world.now)
    assert world.round().end is None


def test_look_tells_who_answers_from_who_does_not() -> None:
    server = DataServer(ShardStore("n0", 2**20), lambda _: None)
    server.start()
    try:
        life = replace(LIFE, address=server.address)
        assert asyncio.run(look(life)) is None
        assert asyncio.run(look(replace(life, name="n1"))) == "refused"
    finally:
        server.close()
    assert asyncio.run(look(life)) == "refused"
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        address = f"fcs://127.0.0.1:{deaf.getsockname()[1]}"
        assert asyncio.run(look(replace(LIFE, address=address))) == "silent"
    assert asyncio.run(look(replace(LIFE, address="nonsense"))) == "unreachable"
