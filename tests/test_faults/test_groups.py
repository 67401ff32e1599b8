"""Groups that go to the object tier more rarely: the trainer is killed, then its nodes are."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import UnrecoverableError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import QUICK, TrainingHost, assert_is_state, state_at
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

OPTIONS: dict[str, Any] = {
    "num_shards": 2,
    "persist": "incremental",
    "max_deltas": 1,
    "groups": [{"name": "rare", "match": "model/w[0-2]", "persist_every": 4}],
}
#: Step of the group by step of the rest, if all memory is lost.
RARE = {1: 1, 2: 1, 3: 1, 4: 1, 5: 5, 6: 5}


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", 3) as found:
        yield found


def is_mixed(state: Any, step: int) -> bool:
    """Say whether a state is what the object tier has of a step."""
    older = state_at(RARE[step])["model"]
    wanted = state_at(step)
    wanted["model"] |= {name: older[name] for name in ("w0", "w1", "w2")}
    return (
        state["step"] == step
        and np.array_equal(state["all"], wanted["all"])
        and all(
            state["model"][name].tobytes() == values.tobytes() for name, values in wanted["model"].items()
        )
    )


def tags_at(location: str) -> list[str]:
    return [marker.tag for marker in CheckpointFolder(open_store(location)).committed()]


@pytest.mark.slow
def test_trainer_killed_memory_gives_one_step_and_the_object_tier_what_was_asked_for(
    tmp_path: Path, nodes: StorageCluster, trainer_of: Callable[..., Any]
) -> None:
    with TrainingHost(tmp_path, nodes.coordinator, OPTIONS) as host:
        trainer = trainer_of(host)
        for step in range(1, 7):
            trainer.tell(f"save {step}")
            trainer.expect(f"peers {step}")
            if step == 5:
                wait_until(lambda: "step5" in tags_at(str(host.objects)), "five checkpoints", seconds=60)
        trainer.kill()
        trainer.kill_agent()
        shutil.rmtree(host.shared_memory, ignore_errors=True)
        location = str(host.objects)
        # The master of the nodes finishes what the agent did not.
        wait_until(lambda: "step6" in tags_at(location), "the last checkpoint to be persisted", seconds=60)
        assert_is_state(host.load_elsewhere()[0], 6)
        for name in ("n0", "n1", "n2"):
            nodes.kill(name)
        manager = host.manager()
        state = manager.load(older_groups=True)
        older = manager.last_load.older
        # The master may have written the last one, and then all of it.
        assert state["step"] == 6
        assert (
            is_mixed(state, 6)
            if older
            else state["model"]["w0"].tobytes() == state_at(6)["model"]["w0"].tobytes()
        )
        host.close()
        # What the agent wrote before is as its plan said.
        plain = host.manager(groups=[])
        with pytest.raises(UnrecoverableError, match="older_groups=True"):
            plain.load("step3")
        assert is_mixed(plain.load("step3", older_groups=True), 3)
        assert_is_state(plain.load("step5"), 5)


def test_nodes_write_groups_to_s3_and_another_host_loads_them(
    tmp_path: Path, nodes: StorageCluster, s3_location: str
) -> None:
    options = {"coordinator": nodes.coordinator, **QUICK, **OPTIONS, "keep_last": 1}
    with FastCheckManager(s3_location, local_dir=tmp_path / "shm", **options) as manager:
        for step in range(1, 7):
            manager.save_async(state_at(step), f"step{step}").wait("object", timeout=60.0)
    assert "step5" in tags_at(s3_location)
    for name in ("n0", "n1", "n2"):
        nodes.kill(name)
    own = options | {"coordinator": f"sqlite:///{tmp_path}/own.db", "num_shards": "auto"}
    with FastCheckManager(s3_location, local_dir=tmp_path / "elsewhere", **own) as fresh:
        assert is_mixed(fresh.load(), 6)
        assert fresh.last_load.older["rare"].tag == "step5"
