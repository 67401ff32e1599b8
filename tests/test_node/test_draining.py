"""What keeps a node from ending."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.node import draining
from fastcheck_dask.node.draining import drained, needs, waiting_for
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.fakes import FakeCoordinator


def record(*nodes: str, persisted: bool = False) -> CommitRecord:
    return CommitRecord(
        "run", 1, "t", "token-1", "ab" * 32, nodes, ("a",) * len(nodes), 2, True, 1, 1.0, persisted
    )


def infos(**states: str) -> tuple[NodeInfo, ...]:
    return tuple(NodeInfo(name, "a", "r", "h", 1, state) for name, state in states.items())


@pytest.mark.parametrize(
    ("latest", "others", "wanted"),
    [
        (None, "available", False),
        (record("n1", "n2"), "available", False),
        (record("n0", "n1"), "available", True),
        (record("n0", "n1"), "draining", True),
        (record("n0", "n1", persisted=True), "available", True),
        (record("n0", "n1", persisted=True), "draining", False),
    ],
)
def test_needs(latest: Any, others: str, wanted: bool) -> None:
    assert needs("n0", latest, infos(n0="draining", n1="available", n9=others)) is wanted


def test_waits_for_saves_in_flight_and_for_shards_until_they_are_elsewhere(
    author: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(draining, "LOOK_SECONDS", 0.001)
    coordinator, store = FakeCoordinator(), author.store
    _, token = author.stage({"a": chunks.bits(1)})
    assert waiting_for(store, coordinator) == ["run"]
    author.prepare(token)
    claim = coordinator.claim("run", "a")
    committed = record(store.name, "n2")
    coordinator.commit(committed, claim)
    assert waiting_for(store, coordinator) == ["run"]

    async def move() -> bool:
        waiting = asyncio.create_task(drained(store, coordinator, seconds=60.0))
        await asyncio.sleep(0)
        assert not waiting.done()
        coordinator.abort("run", 9, token="x", reason="nothing")
        coordinator._shared.decisions["run"][1] = committed.held_by(("n3", "n2"), ("a", "a"))
        return await waiting

    assert asyncio.run(move())


@pytest.mark.parametrize("away", [False, True])
def test_time_is_over_says_what_is_left(
    store: ShardStore, author: Any, chunks: Any, caplog: pytest.LogCaptureFixture, away: bool
) -> None:
    coordinator = FakeCoordinator()
    author.stage({"a": chunks.bits(1)})
    coordinator.unreachable = away
    assert not asyncio.run(drained(store, coordinator, seconds=0.01))
    assert ("the coordinator does not answer" if away else "need it: run") in caplog.text


def test_stale_save_does_not_keep_the_node(store: ShardStore, author: Any, chunks: Any) -> None:
    coordinator = FakeCoordinator()
    _, token = author.stage({"a": chunks.bits(1)})
    author.prepare(token)
    coordinator.commit(record("n5", "n6"), coordinator.claim("run", "a"))
    assert waiting_for(store, coordinator) == []
