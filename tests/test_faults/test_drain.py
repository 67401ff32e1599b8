"""Nodes are taken down in good order while a run saves: nothing is lost, and nobody waits for nothing."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", 5, drain_seconds=60.0) as nodes:
        yield nodes
        for name in list(nodes._children):
            nodes.kill(name)


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2, "persist_every": 0}) as made:
        yield made


def state_of(cluster: StorageCluster, name: str) -> str | None:
    with closing(connect(cluster.coordinator)) as coordinator:
        return next((node.state for node in coordinator.nodes() if node.name == name), None)


def test_nodes_drained_one_after_the_other_under_saves(host: TrainingHost, cluster: StorageCluster) -> None:
    manager, step = host.manager(), 1
    host.save(manager, step)
    for name in host.records()[-1].nodes[:2]:
        cluster.terminate(name)
        wait_until(lambda name=name: state_of(cluster, name) != "available", "it says that it drains")
        step += 1
        assert name not in host.save(manager, step).stats["nodes"]
        assert cluster.wait(name, 60.0) == 0
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, step)
        # A node that was late on a busy machine is made up for from parity.
        assert report.raw_bytes.keys() <= {"peers", "parity"}


def test_drained_with_the_trainer_dead_its_shard_is_copied(
    host: TrainingHost, cluster: StorageCluster
) -> None:
    manager = host.manager()
    host.save(manager, 1)
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    host.lose_memory()
    first, second, _ = host.records()[-1].nodes
    cluster.terminate(first)
    assert cluster.wait(first, 60.0) == 0
    assert first not in host.records()[-1].nodes
    cluster.kill(second)
    assert_is_state(host.load_elsewhere(objects=False)[0], 1)


def test_nobody_can_take_it_the_object_tier_does(host: TrainingHost, cluster: StorageCluster) -> None:
    for name in ("n3", "n4"):
        cluster.kill(name)
    manager = host.manager()
    host.save(manager, 1)
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    host.lose_memory()
    for name in ("n0", "n1", "n2"):
        cluster.terminate(name)
    for name in ("n0", "n1", "n2"):
        assert cluster.wait(name, 60.0) == 0
    assert [m.generation for m in CheckpointFolder(open_store(str(host.objects))).committed()] == [1]
    assert_is_state(host.load_elsewhere()[0], 1)


@pytest.mark.slow
def test_second_signal_ends_it_at_once(host: TrainingHost, cluster: StorageCluster) -> None:
    for name in ("n3", "n4"):
        cluster.kill(name)
    manager = host.manager()
    host.save(manager, 1)
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    host.lose_memory()
    # Neither a node nor the object tier can take it.
    shutil.rmtree(host.objects)
    host.objects.write_text("no folder")
    cluster.terminate("n0")
    wait_until(lambda: state_of(cluster, "n0") == "draining", "it drains")
    with pytest.raises(subprocess.TimeoutExpired):
        cluster.wait("n0", 5.0)
    cluster.terminate("n0")
    assert cluster.wait("n0", 20.0) == 0
