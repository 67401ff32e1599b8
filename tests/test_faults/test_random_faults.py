"""Random faults of storage nodes, one at a time, under steady saving: no committed checkpoint is lost."""

from __future__ import annotations

import asyncio
import faulthandler
import random
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import pytest

from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.errors import FastCheckError, UnrecoverableError
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.master.survey import survey
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client, state_at

NODES = 5


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
    host: TrainingHost,
    cluster: StorageCluster,
    pytestconfig: pytest.Config,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # Hundreds of faults take longer than any test may that hangs.
    faulthandler.cancel_dump_traceback_later()
    seed = pytestconfig.getoption("--faults-seed")
    choose = random.Random(seed)
    saving = Saving(host)
    with closing(connect(cluster.coordinator)) as coordinator:
        saving.save()
        for number in range(pytestconfig.getoption("--faults")):
            fault = choose.choice((kill, stop, restart, take_down))
            name = choose.choice(host.records()[-1].nodes)
            when = choose.choice(("between saves", "before a save", "during a save"))
            with capsys.disabled():
                print(f"seed {seed}, fault {number}: {fault.__name__} {name} {when}")  # noqa: T201
            if when == "during a save":
                saving.begin()
            heal = fault(cluster, name)
            if when != "between saves":
                saving.save()
            after = f"after {fault.__name__} of {name}"
            wait_until(lambda: loads(host, saving.committed), f"step{saving.committed} {after}", seconds=60)
            wait_until(lambda: is_redundant(host, coordinator), f"all shards {after}", seconds=90)
            wait_until(lambda: loads(host, saving.committed), f"step{saving.committed} {after}", seconds=60)
            heal()
            saving.save()


class Saving:
    """A trainer that saves, and knows what was committed last."""

    def __init__(self, host: TrainingHost) -> None:
        self._host, self._manager = host, host.manager()
        self._step = self.committed = 0
        self._handle: SaveHandle | None = None

    def begin(self) -> None:
        """Begin a save."""
        self._step += 1
        self._handle = self._manager.save_async(state_at(self._step), f"step{self._step}")

    def save(self) -> None:
        """Finish the save that was begun, or one that is begun now."""
        if self._handle is None:
            self.begin()
        assert self._handle is not None
        try:
            self._handle.wait("peers", timeout=60.0)
            self.committed = self._step
        except FastCheckError:
            # It was not committed, and says so; what was committed before has to be there.
            assert self._host.records()[-1].tag == f"step{self.committed}"
        self._handle = None


def loads(host: TrainingHost, step: int) -> bool:
    """Say whether the newest checkpoint, which is that of a step, comes back from memory."""
    assert host.records()[-1].tag == f"step{step}"
    try:
        state, _ = host.load_elsewhere(f"step{step}", objects=False)
    except UnrecoverableError:
        # On a busy machine nodes that are there may answer too late.
        return False
    assert_is_state(state, step)
    return True


def is_redundant(host: TrainingHost, coordinator: Coordinator) -> bool:
    """Say whether every shard of the newest checkpoint is whole, where its record says."""
    record = coordinator.latest(host.run_id)
    shards = None if record is None else asyncio.run(survey(coordinator, quick_client)).shards(record)
    return shards is not None and all(shard.condition == "whole" for shard in shards)
