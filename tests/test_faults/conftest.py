"""Nodes, real or behind proxies, and training hosts that use them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyCluster]:
    """Return four nodes behind proxies."""
    with FaultyCluster(tmp_path / "nodes") as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, faulty: FaultyCluster) -> Iterator[TrainingHost]:
    """Return a run of two data shards on the nodes behind proxies, one of which is spare."""
    with TrainingHost(tmp_path, faulty.coordinator, {"num_shards": 2}) as made:
        yield made
        # A manager that closes waits for what is in flight: let it pass.
        faulty.release()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageCluster]:
    """Return four real nodes that the tests of a module share; who harms one makes it whole again."""
    with StorageCluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: StorageCluster) -> Iterator[Callable[..., TrainingHost]]:
    """Return a function that makes a training host with a run of its own on the shared nodes."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> TrainingHost:
            return stack.enter_context(TrainingHost(tmp_path, cluster.coordinator, options))

        yield make


@pytest.fixture
def restart() -> Callable[..., None]:
    """Return a function that starts a node which was killed, with empty memory."""

    def start(cluster: StorageCluster, name: str) -> None:
        # The line with its former address must not be taken for that of the new one.
        (cluster.folder / f"{name}.log").unlink(missing_ok=True)
        cluster.start_node(name, rack=name.replace("n", "r"))

    return start
