"""One real cluster with a checkpoint on it, for all that only looks."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fastcheck_dask import FastCheckManager, cli
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until

RUN = "training"
MIB = 2**20


def save(cluster: StorageCluster, folder: Path, run: str, *, persist_every: int = 0) -> FastCheckManager:
    """Save one checkpoint of a run, and return the closed manager."""
    with FastCheckManager(
        folder / run,
        coordinator=cluster.coordinator,
        run_id=run,
        persist_every=persist_every,
        local_dir=folder / "shm",
        encoders=1,
    ) as manager:
        state = {"w": np.random.default_rng(1).normal(size=100_000), "step": 1}
        manager.save_async(state, "step1").wait("object" if persist_every else "peers")
    return manager


class Seen:
    """A cluster, and what the command says of it."""

    def __init__(self, cluster: StorageCluster, dashboard: str) -> None:
        self.cluster, self.dashboard = cluster, dashboard

    def status(self, *options: str) -> Result:
        """Run the command."""
        return CliRunner().invoke(
            cli.main,
            ["status", "--coordinator", self.cluster.coordinator, *options],
            env={"COLUMNS": "250"},
        )

    def told(self) -> dict[str, Any]:
        """Return what it says as JSON."""
        found: dict[str, Any] = json.loads(self.status("--json").stdout)
        return found


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seen]:
    """Return four nodes with one run on them, whose checkpoint is not in the object tier."""
    folder, (port,) = tmp_path_factory.mktemp("cluster"), free_ports(1)
    options = ["--dashboard-address", f"127.0.0.1:{port}", "--preload", "fastcheck_dask.monitoring.dashboard"]
    with StorageCluster(
        folder, 4, memory_bytes=64 * MIB, scheduler=True, scheduler_options=options
    ) as cluster:
        save(cluster, folder, RUN)
        found = Seen(cluster, f"http://127.0.0.1:{port}")
        wait_until(lambda: any(node["report"]["master"] for node in found.told()["nodes"]), "a master")
        yield found
