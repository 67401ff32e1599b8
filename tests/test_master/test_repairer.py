"""Repairs as Dask tasks: on the worker of the node that takes over, and by the master where there is none."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from distributed import Client

from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state


@pytest.mark.slow
def test_repair_is_a_task_that_the_scheduler_shows_and_needs_none(tmp_path: Path) -> None:
    with (
        StorageCluster(tmp_path / "cluster", 5, scheduler=True) as cluster,
        TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2, "persist_every": 0}) as host,
    ):
        manager = host.manager()
        first, second, _ = host.save(manager, 1).stats["nodes"]
        os.kill(manager._agents.link().pid, signal.SIGKILL)
        host.lose_memory()

        def prefixes(dask_scheduler: Any) -> list[str]:
            return [name for name in dask_scheduler.task_prefixes if "repair" in name]

        with Client(cluster.scheduler) as client:
            wait_until(
                lambda: len(client.scheduler_info()["workers"]) == 5, "all workers are there", seconds=60
            )
            cluster.kill(first)
            wait_until(lambda: first not in host.records()[-1].nodes, "it is repaired", seconds=60)
            assert client.run_on_scheduler(prefixes) == ["fastcheck-repair"]
        cluster.kill("scheduler")
        cluster.kill(second)
        wait_until(lambda: second not in host.records()[-1].nodes, "it is repaired", seconds=60)
        cluster.kill(host.records()[-1].nodes[0])
        assert_is_state(host.load_elsewhere(objects=False)[0], 1)
