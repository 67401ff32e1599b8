"""Whole saves and loads with an object tier in S3: a real server, real nodes, both made to fail."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import TierError
from fastcheck_dask.inspection.garbage import collect
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.s3 import S3Server
from fastcheck_dask.testing.s3_faults import Fate, S3Faults
from fastcheck_dask.testing.training import QUICK, assert_is_state, state_at
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.s3_store import S3Store

_READER = """
import json, os, sys, obstore, zarr
from obstore.store import S3Store
from zarr.storage import ObjectStore
options = {"config": {"endpoint": sys.argv[2]}, "client_options": {"allow_http": True}}
store = S3Store("checkpoints", prefix=sys.argv[1], **options)
group = zarr.open_group(ObjectStore(store, read_only=True), mode="r")
arrays = [(name, found) for name, found in group.members(max_depth=None) if hasattr(found, "dtype")]
print(json.dumps({name: float(abs(array[...]).sum()) for name, array in arrays}), flush=True)
os._exit(0)  # obstore's asynchronous calls, which zarr makes, may abort an interpreter that winds down
"""

Make = Callable[..., FastCheckManager]


@pytest.fixture
def make(tmp_path: Path, s3_server: S3Server) -> Iterator[Make]:
    """Return a function that makes a manager with its object tier in S3."""
    with contextlib.ExitStack() as stack:

        def start(location: str, **options: object) -> FastCheckManager:
            options = {
                "local_dir": tmp_path / "shm",
                "coordinator": f"sqlite:///{tmp_path}/own.db",
                **QUICK,
                **options,
            }
            manager = FastCheckManager(location, **options)
            stack.callback(manager.close)
            return manager

        yield start


@pytest.fixture
def cluster(tmp_path: Path, s3_server: S3Server) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path / "cluster", 3) as nodes:
        yield nodes


def test_nodes_persist_to_s3_and_a_new_host_loads_it(
    make: Make, cluster: StorageCluster, s3_location: str, tmp_path: Path, s3_server: S3Server
) -> None:
    manager = make(s3_location, coordinator=cluster.coordinator, num_shards=2)
    handle = manager.save_async(state_at(1), "step1").wait("object", timeout=60.0)
    assert handle.stats["persisted_bytes"] > 0
    path = manager.path("step1")
    assert path.startswith("s3://checkpoints/")
    assert "/00000001-step1?endpoint=" in path
    manager.close()
    for name in handle.stats["nodes"]:
        cluster.kill(name)
    fresh = make(s3_location, local_dir=tmp_path / "elsewhere")
    assert_is_state(fresh.load(), 1)
    assert fresh.last_load is not None
    assert fresh.last_load.source == "object"


def test_stock_zarr_reads_it_in_a_process_of_its_own(
    make: Make, s3_location: str, s3_server: S3Server
) -> None:
    manager = make(s3_location)
    state = state_at(3)
    manager.save_async(state, "step3").wait("object", timeout=60.0)
    prefix = manager.path("step3").removeprefix("s3://checkpoints/").partition("?")[0]
    found = subprocess.run(
        [sys.executable, "-c", _READER, prefix, s3_server.endpoint],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    sums = json.loads(found.stdout.splitlines()[-1])
    assert len(sums) > 3
    assert any(value > 0 for value in sums.values())


def test_store_refuses_save_fails_on_its_handle_and_the_next_one_is_whole(
    make: Make, s3_server: S3Server, s3_location: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make(s3_location)
    manager.save_async(state_at(1), "step1").wait("object", timeout=60.0)
    manager.close()
    with monkeypatch.context() as patched:
        patched.setenv("AWS_SECRET_ACCESS_KEY", "wrong")
        with pytest.raises(TierError, match="AWS_SECRET_ACCESS_KEY"):
            make(s3_location)
    again = make(s3_location)
    assert_is_state(again.load(), 1)
    again.save_async(state_at(2), "step2").wait("object", timeout=60.0)
    assert again.tags() == ["step1", "step2"]


@pytest.mark.slow
def test_store_busy_while_nodes_persist_training_goes_on_and_it_arrives(
    make: Make, cluster: StorageCluster, s3_server: S3Server, s3_location: str
) -> None:
    with S3Faults(s3_server.port) as faults:
        location = s3_location.replace(s3_server.endpoint, faults.endpoint)
        manager = make(location, coordinator=cluster.coordinator, num_shards=2, persist_every=1)
        faults.rule = lambda method, _path: "refuse" if method == "PUT" else "pass"
        first = manager.save_async(state_at(1), "step1")
        first.wait("peers", timeout=60.0)
        second = manager.save_async(state_at(2), "step2")
        second.wait("local", timeout=60.0)
        assert (first.level, second.level) in {("peers", "peers"), ("peers", "local")}
        faults.rule = lambda _method, _path: "pass"
        second.wait("object", timeout=90.0)
        assert_is_state(manager.load(), 2)
        markers = CheckpointFolder(S3Store(location)).committed()
        assert [marker.tag for marker in markers] == ["step1", "step2"]


def kill_agent_within_save(manager: FastCheckManager, faults: S3Faults, *, share: float, calls: int) -> None:
    """SIGKILL the agent when a share of the requests of its third save, `calls` in all, has been answered."""
    start, stuck = len(faults.requests), threading.Event()

    def rule(_method: str, _path: str) -> Fate:
        if len(faults.requests) < start + round(share * (calls - 1)):
            return "pass"
        stuck.set()
        return "hang"

    faults.rule = rule
    manager.save_async(state_at(3), "step3").wait("local", timeout=60.0)
    assert stuck.wait(60.0)
    os.kill(manager._agents.link().pid, signal.SIGKILL)
    manager.close()
    faults.rule = lambda _method, _path: "pass"


@pytest.mark.parametrize("share", [0.0, 0.15, 0.3, 0.45, 0.6, 0.75, 0.9, 0.95, 1.0])
def test_crash_at_a_store_call_former_checkpoint_loads_and_the_next_save_is_whole(
    make: Make, s3_server: S3Server, s3_location: str, share: float, tmp_path: Path
) -> None:
    with S3Faults(s3_server.port) as faults:
        location = s3_location.replace(s3_server.endpoint, faults.endpoint)
        manager = make(location)
        manager.save_async(state_at(1), "step1").wait("object", timeout=60.0)
        start = len(faults.requests)
        manager.save_async(state_at(2), "step2").wait("object", timeout=60.0)
        kill_agent_within_save(manager, faults, share=share, calls=len(faults.requests) - start)
        fresh = make(s3_location, local_dir=tmp_path / "elsewhere")
        assert fresh.tags()[:2] == ["step1", "step2"]
        assert_is_state(fresh.load(), len(fresh.tags()))
        fresh.save_async(state_at(4), "step4").wait("object", timeout=60.0)
        fresh.close()
        assert_is_state(make(s3_location, local_dir=tmp_path / "third").load(), 4)


def test_nodes_persist_deltas_to_s3_and_the_chain_alone_gives_each_back(
    make: Make, cluster: StorageCluster, s3_location: str, tmp_path: Path
) -> None:
    manager = make(s3_location, coordinator=cluster.coordinator, num_shards=2, persist="incremental")
    for step in (1, 2, 3):
        manager.save_async(state_at(step), f"step{step}").wait("object", timeout=60.0)
    manager.close()
    folder = CheckpointFolder(S3Store(s3_location))
    assert [m.base and m.base.generation for m in folder.committed()] == [None, 1, 2]
    assert overview(folder).sound
    assert all(verify(folder, marker).intact for marker in folder.committed())
    alone = make(s3_location, local_dir=tmp_path / "elsewhere")
    for step in (3, 1, 2):
        assert_is_state(alone.load(f"step{step}"), step)
    assert alone.last_load is not None
    assert (alone.last_load.source, alone.last_load.damaged) == ("object", [])


@pytest.mark.parametrize("share", [0.3, 0.9])
def test_agent_killed_inside_a_delta_older_chain_loads_and_what_is_left_is_seen(
    make: Make, s3_server: S3Server, s3_location: str, share: float, tmp_path: Path
) -> None:
    with S3Faults(s3_server.port) as faults:
        location = s3_location.replace(s3_server.endpoint, faults.endpoint)
        manager = make(location, persist="incremental")
        for step in (1, 2):
            start = len(faults.requests)
            manager.save_async(state_at(step), f"step{step}").wait("object", timeout=60.0)
        kill_agent_within_save(manager, faults, share=share, calls=len(faults.requests) - start)
    folder = CheckpointFolder(S3Store(s3_location))
    markers = folder.committed()
    assert [m.tag for m in markers][:2] == ["step1", "step2"]
    assert markers[1].base == markers[0].link
    assert all(verify(folder, marker).intact for marker in markers)
    rest = [path for path in folder.store.list("") if "00000003-step3" in path]
    left = [leftover.name for leftover in overview(folder).leftovers]
    assert len(markers) == 3 or bool(rest) == any("00000003-step3" in name for name in left)
    assert len(markers) == 3 or sorted(_collected(folder)) == sorted(left)
    fresh = make(s3_location, persist="incremental", local_dir=tmp_path / "elsewhere")
    assert_is_state(fresh.load(), len(markers))
    fresh.save_async(state_at(4), "step4").wait("object", timeout=60.0)
    fresh.close()
    assert_is_state(make(s3_location, local_dir=tmp_path / "third").load(), 4)


def _collected(folder: CheckpointFolder) -> list[str]:
    """Return what gc would remove, or keeps because its marker may have been lost."""
    found = collect(folder, dry_run=True, now=lambda: 4e9)
    return [leftover.name for leftover in (*found.removed, *(kept for kept, _ in found.kept))]
