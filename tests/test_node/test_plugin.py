"""The plugin: what a worker gets, and that it lets go of it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastcheck_dask.node.merge_queue import MergeQueue
from fastcheck_dask.node.plugin import StoragePlugin, merge_waiting
from fastcheck_dask.node.shard_store import ShardStore


class FakeLoop:
    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def add_callback(self, *call: Any) -> None:
        self.calls.append(call)


class FakeWorker:
    """What the plugin uses of a worker; its scheduler is gone."""

    address = "tcp://127.0.0.1:1"

    def __init__(self) -> None:
        self.metrics: dict[str, Any] = {}
        self.loop = FakeLoop()

    @property
    def client(self) -> Any:
        raise OSError("no scheduler")


@pytest.fixture
def queue(store: ShardStore) -> Iterator[MergeQueue]:
    queue = MergeQueue(store, fallback_seconds=3600)
    yield queue
    queue.close()


@pytest.fixture
def plugin(queue: MergeQueue) -> StoragePlugin:
    return StoragePlugin("node-1", queue, lambda: {"used_bytes": 5})


def test_commit_of_deltas_asks_the_worker_for_a_task(
    plugin: Any, queue: MergeQueue, author: Any, chunks: Any
) -> None:
    worker = FakeWorker()
    plugin.setup(worker)
    author.save({"a": chunks.bits(1)})
    assert worker.loop.calls == []
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    ((submit, *arguments),) = worker.loop.calls
    submit(*arguments)  # without a scheduler this does nothing, and does not raise
    assert author.store.status()["pending"] == 1
    merge_waiting("node-1", "run")
    assert author.store.status()["pending"] == 0
    plugin.teardown(worker)


def test_torn_down_worker_is_not_asked(plugin: Any, queue: MergeQueue) -> None:
    worker = FakeWorker()
    plugin.setup(worker)
    plugin.teardown(worker)
    queue.notify("run", 1)
    assert worker.loop.calls == []
    merge_waiting("node-1", "run")


def test_worker_that_closes_late_does_not_take_the_place_of_the_next(plugin: Any, queue: MergeQueue) -> None:
    old, new = FakeWorker(), FakeWorker()
    plugin.setup(old)
    plugin.setup(new)
    plugin.teardown(old)
    queue.notify("run", 1)
    assert len(new.loop.calls) == 1
    assert old.loop.calls == []
    plugin.teardown(new)
