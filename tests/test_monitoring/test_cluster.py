"""What is asked, and what becomes of nodes that do not answer, with nodes that say what the test wants."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.lives import End, Here, Life, begin
from fastcheck_dask.coordination.states.value import NodeState, state_path
from fastcheck_dask.errors import CoordinationError, NodeUnavailableError
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.layout.stripes import assign
from fastcheck_dask.monitoring.cluster import Cluster, gone, look
from fastcheck_dask.monitoring.report import render
from fastcheck_dask.testing.fakes import FakeCoordinator

NODES = ("n0", "n1", "n2")


def manifest() -> Manifest:
    """Return one with several stripes over two data shards and parity."""
    flat = flatten({"w": np.arange(4096.0)}, chunk_bytes=4096)
    sizes = {chunk.key: chunk.nbytes for spec in flat.arrays for chunk in spec.chunks}
    layout = assign(sizes, shards=2)
    return Manifest(
        "run",
        1,
        "t",
        "tok",
        1.0,
        flat.tree,
        tuple(flat.arrays),
        dict.fromkeys(layout.position, "0" * 32),
        layout,
        NODES,
    )


MANIFEST = manifest()
RECORD = CommitRecord(
    "run",
    1,
    "t",
    "tok",
    digest_of_manifest(MANIFEST.to_bytes()),
    NODES,
    ("fcs://h:1",) * 3,
    2,
    True,
    1,
    1.0,
)


class Node:
    """Answers what a node with some generations, and some damage in the newest, does."""

    def __init__(self, *held: tuple[int, str]) -> None:
        self.held, self.damaged, self.down = held, [], False

    async def status(self) -> dict[str, Any]:
        if self.down:
            raise NodeUnavailableError("n", "is down")
        *older, newest = [[*one] for one in self.held] or [None]
        lost = [{"generation": 1, "token": "tok", "count": len(self.damaged), "keys": self.damaged}]
        run = {
            "committed": newest,
            "pins": [],
            "ring": older,
            "bytes": 5,
            "pending": 0,
            "persisted": None,
            "lease": {"asked": False, "ends_seconds": 60.0},
            "damaged": lost if self.damaged else [],
        }
        return {
            "used_bytes": 5,
            "reserved_bytes": 0,
            "limit_bytes": 10,
            "runs": {"run": run} if self.held else {},
        }

    async def manifest(self, *_: Any) -> bytes:
        return MANIFEST.to_bytes()

    async def close(self) -> None:
        pass


class World:
    """A coordinator with one run on three nodes."""

    def __init__(self) -> None:
        self.coordinator = FakeCoordinator()
        self.nodes = {name: Node((1, "tok")) for name in NODES}
        for name in NODES:
            self.coordinator.register(NodeInfo(name, "fcs://h:1", "r", "h", 10))
        self.claim = self.coordinator.claim("run", "trainer")
        self.coordinator.commit(RECORD, self.claim)

    def look(self) -> Cluster:
        return look(self.coordinator, lambda name, _: self.nodes[name])

    def level(self) -> tuple[str, int | None]:
        (run,) = self.look().runs
        return run.level, run.recoverable


@pytest.fixture
def world() -> World:
    return World()


def shown(cluster: Cluster) -> str:
    console = Console(width=250, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    console.print(render(cluster))
    console.file.close()
    return console.export_text()


def test_all_is_well(world: World) -> None:
    found = world.look()
    assert (found.level, found.exit_status) == ("redundant", 0)
    assert "redundant: all nodes have it; 1 node may die" in shown(found)
    assert json.loads(json.dumps(found.to_dict()))["runs"][0]["owner"] == "trainer"


def test_node_that_does_not_answer_is_silent_and_its_shard_missing(world: World) -> None:
    world.nodes["n1"].down = True
    found = world.look()
    assert [node.state for node in found.nodes] == ["available", "silent", "available"]
    assert (found.level, found.exit_status) == ("degraded", 1)
    text = shown(found)
    assert "storage node n: is down" in text
    assert "from parity: n1 is missing; no node may die" in text
    json.dumps(found.to_dict())


def test_silent_node_without_a_shard_is_degraded_too(world: World) -> None:
    world.coordinator.register(NodeInfo("n3", "fcs://h:1", "r", "h", 10))
    world.nodes["n3"] = Node()
    assert world.look().exit_status == 0
    world.nodes["n3"].down = True
    found = world.look()
    assert (world.level()[0], found.exit_status) == ("redundant", 1)


def test_state_that_a_node_published_is_shown(world: World) -> None:
    draining = NodeState("draining", 0, 10)
    world.coordinator.entries.apply(Create(state_path("n2"), draining.to_bytes(), ephemeral=True))
    assert [node.state for node in world.look().nodes] == ["available", "available", "draining"]


def test_damage_on_two_nodes_is_looked_up_in_the_stripes(world: World) -> None:
    first, second = MANIFEST.layout.stripes[:2]
    world.nodes["n0"].damaged = [first.members[0]]
    world.nodes["n1"].damaged = [second.members[1]]
    assert world.level() == ("degraded", 1)
    world.nodes["n1"].damaged = [first.members[1]]
    assert world.level() == ("lost", None)
    assert world.look().exit_status == 2


def test_newest_lost_tells_the_older_one_that_can_be_had(world: World) -> None:
    world.coordinator.commit(replace(RECORD, generation=2, token="new", tag="u"), world.claim)
    assert world.level() == ("lost", 1)
    assert "generation 1 can be had" in shown(world.look())
    for name in NODES[:2]:
        world.nodes[name] = Node((1, "tok"), (2, "new"))
    assert world.level() == ("degraded", 2)


def test_run_without_a_commit_lacks_nothing(world: World) -> None:
    world.coordinator.claim("empty", "trainer").close()
    found = world.look()
    assert found.exit_status == 0
    assert "nothing was committed" in shown(found)


def test_what_the_master_published_is_shown_and_does_not_hide_what_is_lost(world: World) -> None:
    told = {"generation": 1, "may_die": 1}
    world.coordinator.entries.apply(Create("recoverable/run", json.dumps(told).encode()))
    assert world.look().runs[0].published == told
    for name in NODES:
        world.nodes[name].down = True
    found = world.look()
    assert found.exit_status == 2
    assert "the master says: generation 1, may_die 1" in shown(found)


@pytest.mark.parametrize("data", [b"", b"\xff", b"[1]"])
def test_what_nobody_can_read_is_not_shown(world: World, data: bytes) -> None:
    world.coordinator.entries.apply(Create("recoverable/run", data), Create(state_path("n0"), data))
    found = world.look()
    assert found.runs[0].published is None
    assert found.nodes[0].state == "unavailable"


def test_coordinator_away_raises(world: World) -> None:
    world.coordinator.unreachable = True
    with pytest.raises(CoordinationError):
        world.look()


LIFE = Life("n9", "fcs://h:9", "h9", "r9", 100.0, 7, "boot", None)


def test_gone_nodes_are_told_newest_first_after_those_not_noted() -> None:
    old = LIFE.ended(End(200.0, "killed", "x", 100.0))
    again = replace(old, started_unix=300.0).ended(End(400.0, "ended", "SIGTERM", 300.0))
    lives = [again, replace(LIFE, name="n8"), replace(LIFE, name="n7")]
    found = gone(lives, {"n7"})
    assert [(one.name, one.end and one.end.unix) for one in found] == [
        ("n8", None),
        ("n9", 400.0),
        ("n9", 200.0),
    ]


def test_end_that_nobody_noted_is_shown(world: World) -> None:
    begin(world.coordinator.entries, LIFE, now=100.0, here=Here("h9", "boot", None))
    text = shown(world.look())
    assert "no master has noted it yet" in text
