"""Nodes that are left running whatever comes: too little room, many loads at once, clocks that jump."""

from __future__ import annotations

import asyncio
import os
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.lives import End
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.errors import TierFullError
from fastcheck_dask.monitoring.cluster import Cluster, look
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import FaultyCluster, wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.peer import PeerClient

MIB = 2**20


# ---- room


def test_nodes_far_too_small_save_reaches_the_object_tier_until_a_larger_node_joins(tmp_path: Path) -> None:
    large = {"large": np.random.default_rng(0).normal(size=200_000)}
    with (
        FaultyCluster(tmp_path / "nodes", 3, memory_bytes=200_000) as nodes,
        TrainingHost(tmp_path, nodes.coordinator) as host,
    ):
        manager = host.manager()
        host.save(manager, 1, level="object")
        handle = manager.save_async(large, "large").wait("object", timeout=60)
        with pytest.raises(TierFullError) as told:
            handle.wait("peers", timeout=60)
        assert told.value.wanted_bytes > told.value.free_bytes > 100_000
        assert f"{told.value.wanted_bytes:,} bytes are needed" in handle.stats["degraded"]
        assert "only the object tier" in handle.stats["degraded"]
        assert host.load_elsewhere("large")[0]["large"].tobytes() == large["large"].tobytes()
        # What was there before is still in memory.
        assert_is_state(host.load_elsewhere("step1", objects=False)[0], 1)
        # Nodes that had no room for that are alive all the same.
        host.save(manager, 3)
        assert_is_state(host.load_elsewhere(objects=False)[0], 3)
        nodes.add("large", rack="rl", memory_bytes=64 * MIB)
        handle = manager.save_async(large, "again").wait("peers", timeout=60)
        assert handle.stats["nodes"] == ["large"]
        assert "no parity" in handle.stats["degraded"]
        assert host.load_elsewhere(objects=False)[0]["large"].tobytes() == large["large"].tobytes()
        assert all(store.used_bytes <= 200_000 for name, store in nodes.stores.items() if name != "large")


# ---- many loads at once


@pytest.mark.slow
def test_four_loads_at_once_are_exact_and_take_no_memory_of_the_nodes(tmp_path: Path) -> None:
    state = {f"w{n}": np.random.default_rng(n).normal(size=MIB // 2) for n in range(8)}
    with (
        StorageCluster(tmp_path / "nodes", 3, ring=0) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"num_shards": 2, "persist_every": 0}) as host,
    ):
        manager = host.manager(chunk_bytes=2 * MIB, grace="20 s")
        manager.save_async(state, "large").wait("peers", timeout=90)
        records = host.records()
        before = {name: resident(nodes, name) for name in ("n0", "n1", "n2")}
        peak = dict(before)
        done = threading.Event()

        def watch() -> None:
            while not done.wait(0.005):
                for name in peak:
                    peak[name] = max(peak[name], resident(nodes, name))

        def load(number: int) -> Any:
            with LocalTier(host.run_id, tmp_path / f"other{number}") as local:
                recovered = asyncio.run(Recovery(local, None, patient_client).load(records, tag=None))
            assert recovered is not None
            return recovered.state

        watching = threading.Thread(target=watch)
        watching.start()
        try:
            with ThreadPoolExecutor(4) as pool:
                for found in pool.map(load, range(4)):
                    assert all(found[name].tobytes() == values.tobytes() for name, values in state.items())
        finally:
            done.set()
            watching.join()
        # Each holds about 16 MiB: four copies of that would be 64.
        assert all(peak[name] - before[name] < 32 * MIB for name in before), (before, peak)


def resident(nodes: StorageCluster, name: str) -> int:
    return int(psutil.Process(nodes.pid(name)).memory_info().rss)


def patient_client(name: str, address: str) -> PeerClient:
    return PeerClient(name, address, grace_seconds=20.0)


# ---- clocks

#: Imported by every Python process that has its folder on the path: shifts the clock on the wall.
_JUMPING_CLOCK = """
import os, time
_real, _shift = time.time, os.environ["SHIFT_OF_THE_CLOCK"]
def _time():
    try:
        with open(_shift) as file:
            return _real() + float(file.read() or 0)
    except OSError:
        return _real()
time.time = _time
time.time_ns = lambda: int(_time() * 1e9)
"""


class WallClock:
    """The clock on the wall of this process and of all that are started by it."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self._file = folder / "shift"
        (folder / "sitecustomize.py").write_text(_JUMPING_CLOCK)
        patch.setenv("SHIFT_OF_THE_CLOCK", str(self._file))
        patch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(folder), os.environ.get("PYTHONPATH")])))
        real = time.time
        self._hours = 0.0
        patch.setattr(time, "time", lambda: real() + 3600 * self._hours)

    def jump(self, hours: float) -> None:
        """Show the real time and so many hours more."""
        self._hours = hours
        # At once: no reader finds half of it.
        new = self._file.with_suffix(".new")
        new.write_text(str(3600 * hours))
        new.replace(self._file)


@pytest.mark.slow
def test_clocks_jump_by_hours_back_and_forth_nothing_is_lost_or_taken_for_dead(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "clock"
    folder.mkdir()
    wall = WallClock(folder, monkeypatch)
    options = {"num_shards": 2, "keep_hours": 1, "lease": "300 s", "grace": "20 s", "connect_timeout": "20 s"}
    with (
        StorageCluster(tmp_path / "nodes", 4) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, options) as host,
        closing(connect(nodes.coordinator)) as coordinator,
    ):
        manager = host.manager()
        step = 0
        for hours in (30.0, -30.0):
            wall.jump(hours)
            for _ in range(2):
                step += 1
                before = host.save(manager, step, level="object").stats["nodes"]
            assert_is_state(host.load_elsewhere(f"step{step}", objects=False)[0], step)
            # A node that was starved of CPU for long may be missing for a moment.
            wait_until(lambda: is_well(look(coordinator, patient_client)), "four healthy nodes", seconds=60)
        # The rules of retention never take the newest, whatever its time says.
        assert_is_state(manager.load(), step)
        nodes.kill(before[0])
        wall.jump(40.0)
        wait_until(lambda: look(coordinator, patient_client).level == "redundant", "the repair", seconds=60)
        assert_is_state(host.load_elsewhere(objects=False)[0], step)
        wait_until(lambda: before[0] in ends(look(coordinator, patient_client)), "its end", seconds=60)
        end = ends(look(coordinator, patient_client))[before[0]]
        assert end.cause == "killed"
        # So the clocks of the nodes have jumped.
        assert end.unix - end.started_unix > 30 * 3600
        host.lose_memory()
        assert_is_state(host.manager().load(), step)


def is_well(seen: Cluster) -> bool:
    """Say whether all four nodes are there and everything is redundant; leases never jump."""
    leases = [run.lease_seconds for run in seen.runs if run.lease_seconds is not None]
    # By the nodes' own clocks, which do not jump.
    assert all(0 < lease <= 300 for lease in leases)
    return len(seen.nodes) == 4 and seen.level == "redundant"


def ends(seen: Cluster) -> dict[str, End]:
    """Return how nodes ended, by name."""
    return {one.name: one.end for one in seen.gone if one.end is not None}
