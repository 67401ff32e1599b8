"""The whole path with a real ZooKeeper: a machine dies, its ephemeral claim expires, another takes over."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.errors import RunInUseError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state

pytestmark = [pytest.mark.zookeeper, pytest.mark.slow]


@pytest.fixture
def nodes(tmp_path: Path, zookeeper_url: str) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", 3, coordinator=zookeeper_url) as cluster:
        yield cluster


def test_machine_killed_is_taken_over_when_its_claim_has_expired(
    tmp_path: Path, nodes: StorageCluster, trainer_of: Callable[..., Any]
) -> None:
    options = {"num_shards": 2, "persist_every": 0, "session_timeout": "8 s"}
    with TrainingHost(tmp_path, nodes.coordinator, options) as host:
        trainer = trainer_of(host)
        for step in (1, 2):
            trainer.tell(f"save {step}")
            trainer.expect(f"peers {step}")
        with contextlib.closing(connect(nodes.coordinator)) as coordinator:
            coordinator.nodes()
            trainer.kill()
            trainer.kill_agent()
            # Nobody knows yet that the machine is dead: not before its session has expired.
            with pytest.raises(RunInUseError):
                coordinator.claim(host.run_id, "another")
        shutil.rmtree(host.shared_memory)
        manager = host.manager()
        nodes.kill(host.records()[-1].nodes[0])
        assert_is_state(manager.load(), 2)
        report = manager.last_load
        assert report is not None
        assert (report.generation, report.source) == (2, "peers+parity")
        nodes.start_node("spare", rack="r9")
        # The registry has the dead node until its session expires: the save notices by itself.
        assert host.save(manager, 3).generation == 3
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, 3)
        assert report.source == "peers"
