"""Redundancy returns without the trainer: real nodes, killed, stopped, started again and damaged."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.coordination.recoverable import read_recoverable
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.master.recoverable import DrillDuty
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client
from fastcheck_dask.tiers.peer import PeerClient

NODES = ("n0", "n1", "n2", "n3", "n4")


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", len(NODES)) as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2, "persist_every": 0}) as made:
        yield made


def lose_trainer(host: TrainingHost, manager: Any) -> None:
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    host.lose_memory()


def newest(host: TrainingHost) -> CommitRecord:
    return host.records()[-1]


def ask(record: CommitRecord, shard: int, call: Callable[[PeerClient], Coroutine[Any, Any, Any]]) -> Any:
    async def one() -> Any:
        client = quick_client(record.nodes[shard], record.addresses[shard])
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(one())


def damage(record: CommitRecord, shard: int) -> None:
    """Have a node find some of its chunks damaged, as its scrubbing or a reader does."""
    name = (record.run, record.generation, record.token)
    manifest = Manifest.from_bytes(ask(record, shard, lambda node: node.manifest(*name)).tobytes())
    assert manifest.layout is not None
    keys = manifest.layout.keys_of(shard)[:3]
    ask(record, shard, lambda node: node.quarantine(*name, keys=keys))


def damaged(record: CommitRecord, shard: int) -> Any:
    return ask(record, shard, lambda node: node.status())["runs"][record.run]["damaged"]


def wait_for_repair(host: TrainingHost, lost: str) -> CommitRecord:
    """Wait until another node has the shard of one that was lost."""
    wait_until(lambda: lost not in newest(host).nodes, f"the shard of {lost} is on another node", seconds=60)
    return newest(host)


@pytest.mark.slow
def test_every_node_lost_in_turn_with_the_trainer_dead(host: TrainingHost, cluster: StorageCluster) -> None:
    manager = host.manager()
    host.save(manager, 1)
    host.save(manager, 2)
    lose_trainer(host, manager)
    first = newest(host).nodes
    for name in first:
        cluster.kill(name)
        found = wait_for_repair(host, name)
        assert len(set(found.nodes)) == 3
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, 2)
        assert report.raw_bytes.keys() <= {"peers"}
        cluster.start_node(name)
    # Trained on from it, the next save is a delta again, on the nodes that took over.
    manager = host.manager()
    assert_is_state(manager.load(), 2)
    handle = host.save(manager, 3)
    assert tuple(handle.stats["nodes"]) == found.nodes
    assert handle.stats["deltas"] > 0


def test_node_that_comes_back_empty_takes_its_shard_again(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    for name in ("n3", "n4"):
        cluster.kill(name)
    manager = host.manager()
    lost = host.save(manager, 1).stats["nodes"][1]
    lose_trainer(host, manager)
    before = newest(host)
    cluster.kill(lost)
    cluster.start_node(lost)
    wait_until(lambda: newest(host) != before, "the record has the new address", seconds=60)
    assert newest(host).nodes == before.nodes
    other = newest(host).nodes[0]
    cluster.kill(other)
    assert_is_state(host.load_elsewhere(objects=False)[0], 1)


@pytest.mark.slow
def test_node_that_was_stopped_comes_back_with_old_data_and_is_ignored(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    manager = host.manager()
    stopped = host.save(manager, 1).stats["nodes"][0]
    cluster.pause(stopped)
    found = wait_for_repair(host, stopped)
    host.save(manager, 2)
    cluster.resume(stopped)
    assert_is_state(host.load_elsewhere(objects=False)[0], 2)
    lose_trainer(host, manager)
    cluster.kill(found.nodes[1])
    wait_for_repair(host, found.nodes[1])
    cluster.kill(newest(host).nodes[0])
    assert_is_state(host.load_elsewhere(objects=False)[0], 2)


def test_chunks_that_a_node_found_damaged_come_back(host: TrainingHost, cluster: StorageCluster) -> None:
    manager = host.manager()
    host.save(manager, 1)
    lose_trainer(host, manager)
    record = newest(host)
    damage(record, shard=1)
    wait_until(lambda: not damaged(record, shard=1), "the node has all chunks again", seconds=60)
    assert newest(host) == record
    cluster.kill(record.nodes[0])
    assert_is_state(host.load_elsewhere(objects=False)[0], 1)


class Office:
    """What a duty needs of a leadership, beside the real master's."""

    in_force = True

    def __init__(self, entries: Entries) -> None:
        self.apply = entries.apply


@pytest.mark.slow
def test_what_could_be_recovered_is_published_and_drills_find_what_is_so(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    for name in ("n3", "n4"):
        cluster.kill(name)
    manager = host.manager()
    nodes = tuple(host.save(manager, 1).stats["nodes"])
    lose_trainer(host, manager)
    clock = FakeClock()
    with closing(connect(cluster.coordinator)) as coordinator:

        def published() -> Any:
            found, _ = read_recoverable(coordinator.entries, host.run_id)
            return found and (found.source, tuple(found.may_die))

        def drilled() -> Any:
            clock.advance(100.0)
            asyncio.run(duty.run(Office(coordinator.entries)))
            return read_recoverable(coordinator.entries, host.run_id)[1]

        wait_until(lambda: published() == ("peers", nodes), "it is published", seconds=60)
        duty = DrillDuty(coordinator, quick_client, drill_seconds=100.0, clock=clock)
        assert drilled() is None, "it is seen for the first time"
        drills = [drilled() for _ in range(3)]
        assert [(drill.left_out, drill.passed) for drill in drills] == [(name, True) for name in nodes]
        assert {drill.raw_bytes for drill in drills} == {newest(host).raw_bytes}
        cluster.kill(nodes[1])
        wait_until(lambda: published() == ("peers", ()), "the loss is published", seconds=60)
        failed = drilled()
        assert (failed.left_out, failed.passed) == (nodes[0], False)
        assert nodes[1] in failed.why
