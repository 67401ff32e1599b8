"""Housekeeping: what the coordinator knows of saves and of persisting settles what a node does not know."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import NodeFullError
from fastcheck_dask.node.holdings import LEASE_SECONDS, STAGED_SECONDS
from fastcheck_dask.node.housekeeper import Housekeeper, tidy
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator
from fastcheck_dask.testing.faults import wait_until


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def aging(clock: FakeClock) -> ShardStore:
    return ShardStore("node-1", 20_000, clock=clock)


def commit(coordinator: FakeCoordinator, generation: int, token: str, run: str = "run") -> None:
    record = CommitRecord(
        run, generation, f"t{generation}", token, "0" * 64, ("node-1",), ("fcs://h:1",), 1, False, 1, 0.0
    )
    claim = coordinator.claim(run, "owner")
    coordinator.commit(record, claim)
    claim.close()


def prepared(author: Any, chunks: Any) -> tuple[int, str]:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.bits(2)})
    author.prepare(token)
    return generation, token


def test_prepared_save_that_was_committed_is_committed(
    aging: ShardStore, clock: FakeClock, make_author: Any, chunks: Any
) -> None:
    coordinator, author = FakeCoordinator(), make_author(aging)
    generation, token = prepared(author, chunks)
    commit(coordinator, generation, token)
    tidy(aging, coordinator)
    # Its author may be about to say so.
    assert aging.holds("run")["staged"] == [[generation, token, True]]
    clock.advance(STAGED_SECONDS)
    tidy(aging, coordinator)
    assert aging.holds("run")["committed"] == [generation, token]


def test_prepared_save_that_can_never_be_committed_is_dropped(
    aging: ShardStore, clock: FakeClock, make_author: Any, chunks: Any
) -> None:
    coordinator, author = FakeCoordinator(), make_author(aging)
    generation, _ = prepared(author, chunks)
    commit(coordinator, generation, "of another")
    clock.advance(STAGED_SECONDS)
    tidy(aging, coordinator)
    assert aging.holds("run")["staged"] == []
    assert author.loaded() == author.saved()


@pytest.mark.parametrize("known", ["nothing", "older"])
def test_prepared_save_that_may_still_be_committed_stays(
    aging: ShardStore, clock: FakeClock, make_author: Any, chunks: Any, known: str
) -> None:
    coordinator, author = FakeCoordinator(), make_author(aging)
    generation, token = prepared(author, chunks)
    if known == "older":
        commit(coordinator, generation - 1, author.token)
    clock.advance(100 * LEASE_SECONDS)
    tidy(aging, coordinator)
    assert aging.holds("run")["staged"] == [[generation, token, True]]


def test_run_that_was_persisted_unheard_may_be_evicted(
    aging: ShardStore, clock: FakeClock, make_author: Any, chunks: Any
) -> None:
    coordinator, author = FakeCoordinator(), make_author(aging)
    author.save({"a": chunks.bits(1, 9000)})
    commit(coordinator, author.generation, author.token)

    def begin() -> None:
        aging.begin("new", 1, "t", shard=0, base=None, keys=["k"], reserve_bytes=15_000)

    clock.advance(LEASE_SECONDS)
    tidy(aging, coordinator)
    with pytest.raises(NodeFullError):
        begin()
    coordinator.mark_persisted("run", author.generation, author.token)
    tidy(aging, coordinator)
    begin()


def test_thread_outlives_a_coordinator_that_is_away(
    aging: ShardStore, clock: FakeClock, make_author: Any, chunks: Any
) -> None:
    coordinator, author = FakeCoordinator(), make_author(aging)
    generation, token = prepared(author, chunks)
    commit(coordinator, generation, token)
    clock.advance(STAGED_SECONDS)
    asked = []
    latest = coordinator.latest

    def counted(run: str) -> Any:
        asked.append(run)
        return latest(run)

    coordinator.latest = counted  # type: ignore[method-assign]
    coordinator.unreachable = True
    housekeeper = Housekeeper(aging, coordinator, round_seconds=0.01)
    try:
        wait_until(lambda: len(asked) > 2, "some rounds")
        coordinator.unreachable = False
        wait_until(lambda: aging.holds("run")["committed"] == [generation, token], "the commit")
    finally:
        housekeeper.close()
