"""Groups with roots of their own: the trainer is killed, and its nodes write both locations."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import TierTimeoutError
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.monitoring.command import coordination_text
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.s3 import S3Server, s3_environment
from fastcheck_dask.testing.training import QUICK, TrainingHost, assert_is_state, state_at
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

#: Without storage nodes there is nothing to divide.
UNSHARDED = {"num_shards": "auto"}


@pytest.fixture(scope="module")
def nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageCluster]:
    """Return three nodes that tests share: each has a run of its own, and loads it where no node is known."""
    with StorageCluster(tmp_path_factory.mktemp("cluster"), 3) as found:
        yield found


def options_of(root: str) -> dict[str, Any]:
    group = {"name": "cold", "match": "model/w[0-2]", "root": root}
    return {"num_shards": 2, "persist": "incremental", "max_deltas": 1, "groups": [group]}


def folder_at(location: str) -> CheckpointFolder:
    return CheckpointFolder(open_store(location))


def assert_lies_apart(folder: CheckpointFolder) -> None:
    """Raise unless every checkpoint is intact, and has its group elsewhere."""
    for marker in folder.committed():
        assert [ref.location for ref in marker.refs if ref.location]
        assert verify(folder, marker).intact
    assert not [path for path in folder.store.list("") if "/model/w0/c" in path]


@pytest.mark.slow
def test_trainer_killed_nodes_write_the_group_to_its_root(
    tmp_path: Path, nodes: StorageCluster, trainer_of: Callable[..., Any]
) -> None:
    with TrainingHost(tmp_path, nodes.coordinator, options_of(str(tmp_path / "shared"))) as host:
        trainer = trainer_of(host)
        for step in (1, 2, 3):
            trainer.tell(f"save {step}")
            trainer.expect(f"peers {step}")
        trainer.kill()
        trainer.kill_agent()
        shutil.rmtree(host.shared_memory, ignore_errors=True)
        folder = folder_at(str(host.objects))
        # The master of the nodes finishes what the agent did not.
        wait_until(lambda: "step3" in [m.tag for m in folder.committed()], "the last checkpoint", seconds=60)
        assert_lies_apart(folder)
        assert_is_state(host.load_elsewhere(peers=False)[0], 3)


def test_nodes_write_a_group_to_s3_and_the_rest_to_a_folder(
    tmp_path: Path, nodes: StorageCluster, s3_location: str
) -> None:
    options = QUICK | options_of(s3_location) | {"keep_last": 1}
    objects = tmp_path / "objects"
    with FastCheckManager(
        objects, coordinator=nodes.coordinator, local_dir=tmp_path / "shm", **options
    ) as manager:
        for step in (1, 2, 3):
            manager.save_async(state_at(step), f"step{step}").wait("object", timeout=60.0)
    folder = folder_at(str(objects))
    assert_lies_apart(folder)
    link = folder.committed()[-1].refs[0]
    assert link.location is not None
    assert link.location.startswith(s3_location.partition("?")[0])
    assert "step3" in [m.tag for m in folder_at(link.location).committed()]
    own = options | {"coordinator": f"sqlite:///{tmp_path}/own.db", "num_shards": "auto"}
    with FastCheckManager(objects, local_dir=tmp_path / "elsewhere", **own) as fresh:
        assert_is_state(fresh.load(), 3)


@pytest.mark.slow
def test_one_of_two_ranks_killed_its_nodes_write_its_group_to_its_root(
    tmp_path: Path, trainer_of: Callable[..., Any]
) -> None:
    options = options_of(str(tmp_path / "shared")) | {"world_size": 2, "num_shards": 1}
    with (
        StorageCluster(tmp_path / "cluster", 3) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, options) as host,
    ):
        trainers = [trainer_of(host, rank=rank) for rank in range(2)]
        for step in (1, 2, 3):
            for trainer in trainers:
                trainer.tell(f"save {step}")
            for trainer in trainers:
                trainer.expect(f"peers {step}")
        trainers[0].kill()
        trainers[0].kill_agent()
        folders = [folder_at(str(host.objects / f"rank-0000{rank}")) for rank in range(2)]

        def persisted() -> bool:
            return all("step3" in [m.tag for m in folder.committed()] for folder in folders)

        wait_until(persisted, "the last checkpoint of both ranks", seconds=60)
        for folder in folders:
            assert_lies_apart(folder)
        homes = {ref.location for folder in folders for m in folder.committed() for ref in m.refs}
        assert len({location for location in homes if location}) == 2
        trainers[1].kill()
        trainers[1].kill_agent()
        shutil.rmtree(host.shared_memory, ignore_errors=True)
        for name in ("n0", "n1", "n2"):
            nodes.kill(name)
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(host.manager, rank=rank) for rank in range(2)]
            managers = [one.result(60) for one in made]
        for manager in managers:
            assert_is_state(manager.load(), 3)
            assert manager.last_load is not None
            assert manager.last_load.source == "object"


@pytest.fixture
def own_s3(tmp_path: Path) -> Iterator[S3Server]:
    """Return an S3 server of this test alone, to be killed."""
    with S3Server(tmp_path / "s3") as server, s3_environment(server):
        yield server


def assert_restores(places: dict[str, Any], tmp_path: Path, step: int, *, name: str) -> None:
    """Raise unless a host that has nothing but the object tier loads a step."""
    own = {"coordinator": f"sqlite:///{tmp_path}/{name}.db", "local_dir": tmp_path / name}
    own["run_id"] = places["run"]
    with FastCheckManager(places["objects"], **(QUICK | options_of(places["root"]) | UNSHARDED | own)) as one:
        assert_is_state(one.load(f"step{step}"), step)


@pytest.mark.slow
@pytest.mark.parametrize("away", ["root", "objects"])
def test_one_of_the_two_locations_is_down_the_save_says_so_and_arrives_when_it_is_back(
    tmp_path: Path, own_s3: S3Server, nodes: StorageCluster, away: str, caplog: pytest.LogCaptureFixture
) -> None:
    places = {"root": str(tmp_path / "shared"), "objects": str(tmp_path / "objects")}
    places[away] = own_s3.url("there") + "&retry_seconds=2"
    places["run"] = f"away-{away}"
    shared = {"coordinator": nodes.coordinator, "local_dir": tmp_path / "shm"}
    options = QUICK | options_of(places["root"]) | shared | {"run_id": places["run"]}
    with FastCheckManager(places["objects"], **options) as manager:
        manager.save_async(state_at(1), "step1").wait("object", timeout=60.0)
        own_s3.kill()
        handle = manager.save_async(state_at(2), "step2")
        # Training goes on: in memory it is in force.
        handle.wait("peers", timeout=60.0)
        wait_until(lambda: handle.stats.get("persist_error"), "the failed attempt", seconds=120)
        with pytest.raises(
            TierTimeoutError, match=r"'object' in 0.0 s; attempt \d+ failed.*s3://checkpoints/there"
        ):
            handle.wait("object", timeout=0.0)
        assert any("'step2' is not in the object tier yet" in message for message in caplog.messages)
        if away == "root":
            assert "stored against s3://checkpoints/there/" in handle.stats["persist_error"]
            # Nothing is published that lacks its part, and nothing goes elsewhere in its place.
            assert [m.tag for m in folder_at(places["objects"]).committed()] == ["step1"]
        told = coordination_text(nodes.coordinator, as_json=False)
        assert "generation 2 (step2), not persisted" in told
        assert re.search(
            r"generation 2 \(step2\) is not in the object tier since .*s3://checkpoints/there", told
        )
        assert handle.level == "peers"
        own_s3.start()
        handle.wait("object", timeout=120.0)
        assert handle.stats["persist_error"] is None
        # The handle is told first.
        wait_until(
            lambda: "not in the object tier" not in coordination_text(nodes.coordinator, as_json=False),
            "the status to be told that it is there",
        )
    folder = folder_at(places["objects"])
    assert [m.tag for m in folder.committed()] == ["step1", "step2"]
    assert_lies_apart(folder)
    for step in (1, 2):
        assert_restores(places, tmp_path, step, name=f"host{step}")
