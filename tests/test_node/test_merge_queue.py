"""Who merges, and when."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest

from fastcheck_dask.node.merge_queue import MergeQueue
from fastcheck_dask.node.shard_store import ShardStore

NEVER = 3600.0


class Watched(ShardStore):
    """A store that says when a background drain is over, and by which thread."""

    def __init__(self) -> None:
        super().__init__("node-1", 2**24)
        self.drained = threading.Semaphore(0)
        self.by: list[str] = []
        self.failure: Exception | None = None

    def drain(self, run: str, keys: Any = None, *, background: bool = False) -> None:
        if background:
            self.by.append(threading.current_thread().name)
            self.drained.release()
            if self.failure is not None:
                failure, self.failure = self.failure, None
                raise failure
        super().drain(run, keys, background=background)


@pytest.fixture
def store() -> Watched:
    return Watched()


@pytest.fixture
def make_queue(store: Watched) -> Iterator[Any]:
    queues = []

    def make(fallback_seconds: float) -> MergeQueue:
        queues.append(MergeQueue(store, fallback_seconds=fallback_seconds))
        return queues[-1]

    yield make
    for queue in queues:
        queue.close()


def save_delta(author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})


def test_queue_without_scheduler_merges_by_its_own_thread(
    store: Watched, author: Any, chunks: Any, make_queue: Any
) -> None:
    queue = make_queue(0.0)
    save_delta(author, chunks)
    assert store.drained.acquire(timeout=10)
    queue.close()
    assert store.by == ["fastcheck-merge"]
    assert author.loaded() == author.saved()


def test_queue_asks_its_trigger_first_and_the_thread_stays_idle(
    store: Watched, author: Any, chunks: Any, make_queue: Any
) -> None:
    queue = make_queue(NEVER)
    asked = []
    queue.add_trigger(lambda run, generation: asked.append((run, generation)))
    save_delta(author, chunks)
    assert asked == [("run", 2)]
    queue.drain("run")
    assert store.by == [threading.current_thread().name]
    assert store.status()["pending"] == 0


def test_queue_whose_trigger_never_drains_falls_back(
    store: Watched, author: Any, chunks: Any, make_queue: Any
) -> None:
    make_queue(0.01).add_trigger(lambda run, generation: None)
    save_delta(author, chunks)
    assert store.drained.acquire(timeout=10)
    assert store.by == ["fastcheck-merge"]


def test_queue_survives_trigger_and_drain_that_raise(
    store: Watched, author: Any, chunks: Any, make_queue: Any, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(run: str, generation: int) -> None:
        raise OSError("no scheduler")

    make_queue(0.0).add_trigger(broken)
    store.failure = MemoryError("no room to merge")
    save_delta(author, chunks)
    assert store.drained.acquire(timeout=10)
    author.save({"a": chunks.nudged(author.state["a"], 2)})
    assert store.drained.acquire(timeout=10)
    assert "merging the deltas of run failed" in caplog.text
    assert author.loaded() == author.saved()


def test_queue_after_removing_trigger_does_not_call_it(make_queue: Any) -> None:
    queue = make_queue(NEVER)
    asked: list[str] = []

    def trigger(run: str, generation: int) -> None:
        asked.append(run)

    queue.add_trigger(trigger)
    queue.remove_trigger(trigger)
    queue.remove_trigger(trigger)
    queue.notify("run", 1)
    assert asked == []


def test_close_ends_a_drain_that_waits_for_readers(
    store: Watched, author: Any, chunks: Any, make_queue: Any
) -> None:
    queue = make_queue(0.0)
    with store.reading():
        save_delta(author, chunks)
        assert store.drained.acquire(timeout=10)
        queue.close()
        queue.close()
    assert store.status()["pending"] == 1
    assert author.loaded() == author.saved()
