"""Storage nodes in cgroups of their own, whose memory the kernel counts: one is ended for want of it."""

from __future__ import annotations

import contextlib
import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner

from fastcheck_dask import cli
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost

MIB = 2**20


class MemoryCgroup:
    """A memory cgroup of this machine, v1 or v2."""

    def __init__(self) -> None:
        name = f"fastcheck-test-{uuid.uuid4().hex[:12]}"
        v1, v2 = Path("/sys/fs/cgroup/memory"), Path("/sys/fs/cgroup")
        self._is_v1 = v1.is_dir()
        self.folder = (v1 if self._is_v1 else v2) / name
        self.folder.mkdir()
        if not self._file("limit_in_bytes", "max").exists():
            self.folder.rmdir()
            raise OSError(f"{self.folder} has no limit of memory")

    def _file(self, of_v1: str, of_v2: str) -> Path:
        return self.folder / f"memory.{of_v1 if self._is_v1 else of_v2}"

    @property
    def within(self) -> list[str]:
        """A command that enters it and starts the one that follows."""
        return ["/bin/sh", "-c", 'echo $$ > "$0" && exec "$@"', str(self.folder / "cgroup.procs")]

    @property
    def used_bytes(self) -> int:
        return int(self._file("usage_in_bytes", "current").read_text())

    def limit(self, nbytes: int) -> None:
        """Let it use no more, and no swap."""
        self._file("limit_in_bytes", "max").write_text(str(nbytes))
        with contextlib.suppress(OSError):
            self._file("swappiness", "swap.max").write_text("0")

    def remove(self) -> None:
        wait_until(self._removed, "the cgroup has no process any more")

    def _removed(self) -> bool:
        with contextlib.suppress(OSError):
            self.folder.rmdir()
        return not self.folder.exists()


@pytest.fixture
def cgroup() -> Iterator[Callable[[], MemoryCgroup]]:
    """Return a function that makes a cgroup; they go when their processes are gone."""
    made: list[MemoryCgroup] = []

    def make() -> MemoryCgroup:
        try:
            made.append(MemoryCgroup())
        except OSError as error:
            pytest.skip(f"no memory cgroup can be made here: {error}")
        return made[-1]

    yield make
    for one in made:
        one.remove()


def told(cluster: StorageCluster) -> dict[str, Any]:
    """Return what `fastcheck status` says."""
    arguments = ["status", "--coordinator", cluster.coordinator, "--json"]
    found: dict[str, Any] = json.loads(CliRunner().invoke(cli.main, arguments).stdout)
    return found


def end_of(cluster: StorageCluster, name: str) -> dict[str, Any]:
    """Wait until the end of a node is noted, and return it."""

    def ends() -> list[dict[str, Any]]:
        return [one["end"] for one in told(cluster)["gone"] if one["name"] == name and one["end"]]

    wait_until(lambda: bool(ends()), f"the end of {name} is noted", seconds=60)
    return ends()[0]


def state_of(step: int) -> dict[str, Any]:
    values = np.random.default_rng(1).normal(size=4 * MIB).astype(np.float32)
    values[step::64] += 1
    return {"w": values, "step": step}


@pytest.mark.slow
def test_node_that_the_kernel_ends_for_want_of_memory_is_told_from_one_that_was_killed(
    tmp_path: Path, cgroup: Callable[[], MemoryCgroup]
) -> None:
    starved, roomy = cgroup(), cgroup()
    with (
        StorageCluster(tmp_path / "cluster", 1) as cluster,
        TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2, "persist_every": 0}) as host,
    ):
        for name, group in (("n1", roomy), ("n2", starved)):
            cluster.start_node(name, rack=name, within=group.within)
        manager = host.manager(grace="20 s", chunk_bytes=MIB)
        manager.save_async(state_of(0), "s0").wait("peers", timeout=60)
        wait_until(lambda: told(cluster)["runs"][0]["verdict"]["level"] == "redundant", "all shards are seen")
        # What the node was promised is not there any more, as where others take the memory of a machine.
        starved.limit(starved.used_bytes + 4 * MIB)
        began = time.time()
        noise = np.random.default_rng(2).integers(0, 256, 96 * MIB, np.uint8)
        handle = manager.save_async({**state_of(1), "noise": noise}, "s1")
        with pytest.raises(FastCheckError):
            # No other node can take its shard.
            handle.wait("peers", timeout=90)
        assert cluster.wait("n2", 60) == -9
        end = end_of(cluster, "n2")
        assert end["cause"] == "memory"
        assert f"of its cgroup ({starved.folder}) for want of memory" in end["why"]
        assert began <= end["unix"] <= time.time()
        (run,) = told(cluster)["runs"]
        assert run["verdict"]["level"] == "degraded"
        assert run["verdict"]["may_die"] == 0
        state, report = host.load_elsewhere(objects=False)
        assert (report.generation, state["step"]) == (1, 0)
        assert state["w"].tobytes() == state_of(0)["w"].tobytes()
        # The machine's count has grown since this one started, and that says nothing of it.
        cluster.kill("n1")
        killed = end_of(cluster, "n1")
        assert (killed["cause"], "not for want of memory" in killed["why"]) == ("killed", True)


@pytest.mark.slow
def test_node_lives_in_a_cgroup_of_its_memory_through_saves_merges_loads_and_repairs_at_once(
    tmp_path: Path, cgroup: Callable[[], MemoryCgroup]
) -> None:
    limit = 96 * MIB
    group = cgroup()
    with (
        StorageCluster(tmp_path / "nodes", 1, memory_bytes=limit, ring=2, scrub_seconds=0.05) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"num_shards": 1, "persist_every": 0}) as host,
    ):
        nodes.start_node("n1", rack="r1", within=group.within)
        # Messages on their way, and what is decoded to be merged or taken back, come on top.
        group.limit(group.used_bytes + limit + 160 * MIB)
        manager = host.manager(chunk_bytes=4 * MIB, grace="20 s")
        for step in range(6):
            handle = manager.save_async(state_of(step), f"s{step}")
            if step:
                host.load_elsewhere(objects=False)
            handle.wait("peers", timeout=90)
            if step == 3:
                # All of it is brought back while the next saves and loads go on.
                nodes.kill("n0")
                nodes.start_node("n0", rack="r0")
        state, report = host.load_elsewhere(objects=False)
        assert (state["step"], report.generation) == (5, 6)
        assert state["w"].tobytes() == state_of(5)["w"].tobytes()
        # The kernel would have ended it.
        assert nodes.pid("n1") in map(int, (group.folder / "cgroup.procs").read_text().split())
        assert not [one for one in told(nodes)["gone"] if one["name"] == "n1"]
        shutil.rmtree(host.objects, ignore_errors=True)
