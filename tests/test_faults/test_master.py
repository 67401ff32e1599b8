"""The master finishes what trainers and other masters leave: real nodes, killed one after the other."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.election import master_of
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", 4) as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2}) as made:
        yield made


def leave_unpersisted(host: TrainingHost, step: int) -> tuple[str, ...]:
    """Commit a generation that is not due yet, and lose the trainer and its agent; return the nodes."""
    manager = host.manager(persist_every=1000)
    nodes = host.save(manager, step).stats["nodes"]
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    host.lose_memory()
    return tuple(nodes)


def persisted_generations(host: TrainingHost) -> list[int]:
    return [marker.generation for marker in CheckpointFolder(open_store(str(host.objects))).committed()]


def leader(cluster: StorageCluster) -> str | None:
    with contextlib.closing(connect(cluster.coordinator)) as coordinator:
        found = master_of(coordinator.entries)
    return None if found is None else found.name


def test_trainer_and_agent_gone_the_master_persists(host: TrainingHost, cluster: StorageCluster) -> None:
    nodes = leave_unpersisted(host, 1)
    wait_until(lambda: persisted_generations(host) == [1], "the master persists")
    wait_until(lambda: host.records()[-1].persisted, "the coordinator knows")
    for name in nodes:
        cluster.kill(name)
    state, report = host.load_elsewhere()
    assert_is_state(state, 1)
    assert report.source == "object"


@pytest.mark.slow
def test_master_killed_too_the_next_one_persists_also_what_needs_parity(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    wait_until(lambda: leader(cluster) is not None, "there is a master")
    for step in (1, 2):
        manager = host.manager(persist_every=1000)
        handle = host.save(manager, step)
        master = leader(cluster)
        assert master is not None
        os.kill(manager._agents.link().pid, signal.SIGKILL)
        cluster.kill(master)
        host.lose_memory()
        # At most one shard went with it: its chunks come from parity.
        wait_until(lambda step=step: persisted_generations(host)[-1:] == [step], "the next master persists")
        del handle
        cluster.start_node(master)
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert report.generation == 2


def test_run_that_persists_nothing_is_left_alone(host: TrainingHost, cluster: StorageCluster) -> None:
    other = TrainingHost(host.folder / "other", cluster.coordinator, {"num_shards": 2})
    with other:
        manager = host.manager(persist_every=0)
        host.save(manager, 1)
        os.kill(manager._agents.link().pid, signal.SIGKILL)
        host.lose_memory()
        # Whoever comes later in the same rounds is persisted: the rounds were done.
        leave_unpersisted(other, 1)
        wait_until(lambda: persisted_generations(other) == [1], "the master persists the other run")
        assert persisted_generations(host) == []


def test_master_removes_what_the_rules_of_the_run_do_not_keep(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    manager = host.manager(persist_every=1, keep_last=2)
    for step in (1, 2):
        host.save(manager, step, level="object")
    manager.close(keep_local=False)
    again = host.manager(persist_every=1000, keep_last=2)
    host.save(again, 3)
    os.kill(again._agents.link().pid, signal.SIGKILL)
    host.lose_memory()
    wait_until(lambda: persisted_generations(host) == [2, 3], "the master persists, and removes the oldest")
    assert_is_state(host.load_elsewhere()[0], 3)
