"""Random faults of storage nodes, one at a time, under steady saving: no committed checkpoint is lost."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.master.survey import survey
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client

NODES = 5
_SEED = 20251


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", NODES, drain_seconds=60.0) as nodes:
        yield nodes
        for name in list(nodes._children):
            nodes.kill(name)


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2, "persist_every": 0}) as made:
        yield made


def kill(cluster: StorageCluster, name: str) -> Callable[[], None]:
    cluster.kill(name)
    return lambda: cluster.start_node(name)


def stop(cluster: StorageCluster, name: str) -> Callable[[], None]:
    cluster.pause(name)
    return lambda: cluster.resume(name)


def restart(cluster: StorageCluster, name: str) -> Callable[[], None]:
    cluster.kill(name)
    cluster.start_node(name)
    return lambda: None


def take_down(cluster: StorageCluster, name: str) -> Callable[[], None]:
    cluster.terminate(name)
    assert cluster.wait(name, 70.0) == 0
    return lambda: cluster.start_node(name)


@pytest.mark.slow
@pytest.mark.timeout(0)
def test_no_committed_checkpoint_is_lost(
    host: TrainingHost, cluster: StorageCluster, pytestconfig: pytest.Config
) -> None:
    choose = random.Random(_SEED)
    manager, step, committed = host.manager(), 0, 0

    def save() -> None:
        nonlocal step, committed
        step += 1
        try:
            host.save(manager, step)
            committed = step
        except FastCheckError:
            # It was not committed, and says so; what was committed before has to be there.
            assert host.records()[-1].tag == f"step{committed}"

    with closing(connect(cluster.coordinator)) as coordinator:
        save()
        for _ in range(pytestconfig.getoption("--faults")):
            fault = choose.choice((kill, stop, restart, take_down))
            name = choose.choice(host.records()[-1].nodes)
            heal = fault(cluster, name)
            if choose.random() < 0.5:
                save()
            assert_is_state(host.load_elsewhere(objects=False)[0], committed)
            wait_until(
                lambda: is_redundant(host, coordinator), f"after {fault.__name__} of {name}", seconds=90
            )
            assert_is_state(host.load_elsewhere(objects=False)[0], committed)
            heal()
            save()


def is_redundant(host: TrainingHost, coordinator: Coordinator) -> bool:
    """Say whether every shard of the newest checkpoint is whole, where its record says."""
    record = coordinator.latest(host.run_id)
    shards = None if record is None else asyncio.run(survey(coordinator, quick_client)).shards(record)
    return shards is not None and all(shard.condition == "whole" for shard in shards)
