"""Nodes that people leave running: older generations, several runs, eviction, scrubbing, bounded memory."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastcheck_dask.errors import TierFullError, UnrecoverableError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import flip_in_process, wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client

MIB = 2**20


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageCluster]:
    """Return three nodes that keep two older generations and scrub all the time."""
    with StorageCluster(tmp_path_factory.mktemp("cluster"), 3, ring=2, scrub_seconds=0.3) as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, cluster: StorageCluster) -> Iterator[TrainingHost]:
    """Return a run of two data shards that is never persisted."""
    options = {"num_shards": 2, "persist_every": 0}
    with TrainingHost(tmp_path, cluster.coordinator, options) as made:
        yield made


def training_state(step: int, *, layers: int = 3) -> dict[str, Any]:
    """Return weights that change little, momenta that change wholly, and a layer that comes with step 3."""
    layers += step >= 3
    rng = np.random.default_rng(step)
    weights = {}
    for layer in range(layers):
        values = np.random.default_rng(100 + layer).normal(size=3000).astype(np.float32)
        weights[f"w{layer}"] = values + np.float32(1e-6) * np.float32(step) * values
    momenta = {f"m{layer}": rng.normal(size=3000).astype(np.float32) for layer in range(layers)}
    return {"step": step, "weights": weights, "optimizer": {"exp_avg": momenta, "lr": 0.1 / step}}


def assert_is_training_state(found: Any, step: int) -> None:
    wanted = training_state(step)
    assert (found["step"], found["optimizer"]["lr"]) == (step, 0.1 / step)
    for got, want in (
        (found["weights"], wanted["weights"]),
        (found["optimizer"]["exp_avg"], wanted["optimizer"]["exp_avg"]),
    ):
        assert got.keys() == want.keys()
        for name, values in want.items():
            assert got[name].tobytes() == values.tobytes()


def status_of(cluster: StorageCluster, name: str) -> dict[str, Any]:
    async def ask() -> dict[str, Any]:
        client = quick_client(name, cluster.address(name))
        try:
            return await client.status()
        finally:
            await client.close()

    return asyncio.run(ask())


# ---- older generations


def test_load_each_of_the_last_generations_is_exact_from_memory_alone(
    cluster: StorageCluster, host: TrainingHost, caplog: pytest.LogCaptureFixture
) -> None:
    manager = host.manager()
    for step in range(1, 6):
        manager.save_async(training_state(step), f"s{step}").wait("peers", timeout=60)
    host.lose_memory()
    manager = host.manager()
    for step in (3, 4, 5, 3):
        assert_is_training_state(manager.load(tag=f"s{step}"), step)
        assert manager.last_load is not None
        assert (manager.last_load.generation, manager.last_load.rebuilt) == (step, [])
        assert manager.last_load.source == "peers" if step < 5 else True
    part = manager.load(tag="s4", include="optimizer/*")
    wanted = training_state(4)["optimizer"]["exp_avg"]
    assert all(part["optimizer"]["exp_avg"][name].tobytes() == wanted[name].tobytes() for name in wanted)
    caplog.clear()
    with pytest.raises(UnrecoverableError, match="does not hold generation 2"):
        manager.load(tag="s2")
    assert len([r for r in caplog.records if r.levelno >= logging.WARNING]) <= 1


def test_load_older_generation_after_a_node_is_killed_is_exact_via_parity(
    cluster: StorageCluster, host: TrainingHost, restart: Callable[..., None]
) -> None:
    manager = host.manager()
    for step in range(1, 4):
        used = manager.save_async(training_state(step), f"s{step}").wait("peers", timeout=60).stats["nodes"]
    victim = used[0]
    cluster.kill(victim)
    try:
        for step in (1, 2):
            state, report = host.load_elsewhere(f"s{step}", objects=False)
            assert_is_training_state(state, step)
            assert (report.generation, report.source) == (step, "peers+parity")
    finally:
        restart(cluster, victim)


def test_save_after_loading_an_older_one_branches_off_cleanly(
    cluster: StorageCluster, host: TrainingHost
) -> None:
    manager = host.manager()
    for step in range(1, 4):
        manager.save_async(training_state(step), f"s{step}").wait("peers", timeout=60)
    host.lose_memory()
    manager = host.manager()
    assert_is_training_state(manager.load(tag="s2"), 2)
    # Nothing is decided by loading.
    assert host.records()[-1].tag == "s3"
    assert_is_training_state(host.load_elsewhere(objects=False)[0], 3)
    handle = manager.save_async(training_state(7), "branch").wait("peers", timeout=60)
    assert handle.generation == 4
    assert handle.stats["deltas"] == 0
    # On this host the next ones are deltas again.
    handle = manager.save_async(training_state(8), "branch2").wait("peers", timeout=60)
    assert handle.stats["deltas"] > 0
    for tag, step in (("branch2", 8), ("branch", 7), ("s3", 3)):
        state, report = host.load_elsewhere(tag, objects=False)
        assert_is_training_state(state, step)
        assert report.source == "peers"


def test_load_older_one_from_the_object_tier_says_so_in_one_line(
    cluster: StorageCluster, host: TrainingHost, caplog: pytest.LogCaptureFixture
) -> None:
    manager = host.manager(persist_every=1)
    for step in range(1, 5):
        host.save(manager, step, level="object")
    host.lose_memory()
    manager = host.manager()
    caplog.set_level(logging.INFO, logger="fastcheck_dask.engine")
    assert_is_state(manager.load(tag="step1"), 1)
    assert manager.last_load is not None
    assert manager.last_load.source == "object"
    told = [r for r in caplog.records if "is not in the memory of" in r.getMessage()]
    assert [r.levelno for r in told] == [logging.INFO]
    assert "chunks came from object" in told[0].getMessage()
    assert not [r for r in caplog.records if r.levelno >= logging.WARNING]


# ---- several runs


def test_two_runs_side_by_side_never_see_each_other(cluster: StorageCluster, tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        hosts = [
            stack.enter_context(
                TrainingHost(tmp_path / name, cluster.coordinator, {"num_shards": 2, "persist_every": 0})
            )
            for name in ("a", "b")
        ]
        for made in hosts:
            made.folder.mkdir()
        managers = [made.manager() for made in hosts]
        for step in range(1, 4):
            # The same tags and generations, other states, and both on their way at once.
            handles = [
                manager.save_async(training_state(step + 10 * number), f"s{step}")
                for number, manager in enumerate(managers)
            ]
            for handle in handles:
                handle.wait("peers", timeout=60)
        for number, made in enumerate(hosts):
            for step in range(1, 4):
                assert_is_training_state(
                    made.load_elsewhere(f"s{step}", objects=False)[0], step + 10 * number
                )


# ---- damage


def test_corrupt_byte_is_found_by_scrubbing_before_anybody_reads(
    cluster: StorageCluster, host: TrainingHost
) -> None:
    manager = host.manager()
    used = manager.save_async(training_state(1), "s1").wait("peers", timeout=60).stats["nodes"]
    (record,) = host.records()

    async def first_chunk() -> tuple[str, bytes]:
        client = quick_client(used[0], record.addresses[0])
        try:
            found = await client.read(
                record.run, 1, record.token, keys=["weights/w0/c/0", "optimizer/exp_avg/m0/c/0"]
            )
            descriptor, payload = found.chunks[0]
            return descriptor.key, payload.tobytes()
        finally:
            await client.close()

    key, payload = asyncio.run(first_chunk())
    assert flip_in_process(cluster.pid(used[0]), payload, at=len(payload) // 2) >= 1

    def damaged() -> list[Any]:
        return list(status_of(cluster, used[0])["runs"][record.run]["damaged"])

    told = f"key {key}: its payload fails its checksum"
    wait_until(lambda: told in cluster.log(used[0]), "what the scrubber finds")
    # Other runs of these tests may have the same payload.
    assert status_of(cluster, used[0])["scrub"]["damaged"] >= 1
    state, report = host.load_elsewhere(objects=False)
    assert_is_training_state(state, 1)
    # The load mends it in passing, unless the master has done so before.
    assert report.source in ("peers+parity", "peers")
    wait_until(lambda: damaged() == [], "the chunk is mended")


# ---- room


def test_save_far_beyond_the_memory_is_refused_before_anything_is_sent(tmp_path: Path) -> None:
    with (
        StorageCluster(tmp_path / "nodes", 2, memory_bytes=MIB) as small,
        TrainingHost(tmp_path, small.coordinator, {"num_shards": 1, "persist_every": 0}) as host,
    ):
        manager = host.manager(chunk_bytes=MIB)
        large = np.random.default_rng(0).normal(size=4 * MIB)
        handle = manager.save_async({"large": large}, "large")
        with pytest.raises(TierFullError) as told:
            handle.wait("peers", timeout=60)
        assert told.value.wanted_bytes > 32 * MIB
        assert told.value.free_bytes == MIB
        for name in ("n0", "n1"):
            status = status_of(small, name)
            assert (status["used_bytes"], status["reserved_bytes"], status["runs"]) == (0, 0, {})
            assert psutil.Process(small.pid(name)).memory_info().rss < 400 * MIB
        assert host.save(manager, 1).generation == 1
        assert_is_state(host.load_elsewhere(objects=False)[0], 1)


@pytest.mark.slow
@pytest.mark.parametrize("persisted", [True, False])
def test_run_whose_lease_ended_makes_room_only_if_it_is_persisted(tmp_path: Path, persisted: bool) -> None:
    with (
        StorageCluster(tmp_path / "nodes", 2, memory_bytes=3 * MIB) as nodes,
        TrainingHost(tmp_path / "old", nodes.coordinator, {"num_shards": 1, "lease": "1 s"}) as old,
        TrainingHost(tmp_path / "new", nodes.coordinator, {"num_shards": 1, "persist_every": 0}) as new,
    ):
        for host in (old, new):
            host.folder.mkdir()
        state = {"w": np.random.default_rng(1).normal(size=MIB // 4)}
        old.manager(persist_every=int(persisted)).save_async(state, "old").wait(
            "object" if persisted else "peers", timeout=60
        )
        # Its agent renews no more.
        old.close()
        (record,) = old.records()
        run = record.run
        wait_until(
            lambda: (
                status_of(nodes, "n0")["runs"][run]["lease"]["ends_seconds"] < 0
                and status_of(nodes, "n1")["runs"][run]["lease"]["ends_seconds"] < 0
            ),
            "the end of the lease",
        )
        handle = new.manager().save_async({"w": np.random.default_rng(2).normal(size=MIB // 4)}, "new")
        if persisted:
            handle.wait("peers", timeout=60)
            assert run not in status_of(nodes, "n0")["runs"]
        else:
            with pytest.raises(TierFullError):
                handle.wait("peers", timeout=60)
        found, report = old.load_elsewhere("old")
        assert found["w"].tobytes() == state["w"].tobytes()
        assert report.source == ("object" if persisted else "peers")


@pytest.mark.slow
def test_node_stays_within_its_memory_and_answers_through_everything_at_once(tmp_path: Path) -> None:
    limit = 96 * MIB
    with (
        StorageCluster(tmp_path / "nodes", 2, memory_bytes=limit, ring=2, scrub_seconds=0.05) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"num_shards": 1, "persist_every": 0}) as host,
    ):
        idle = {name: psutil.Process(nodes.pid(name)).memory_info().rss for name in ("n0", "n1")}
        manager = host.manager(chunk_bytes=4 * MIB, grace="20 s")
        values = np.random.default_rng(1).normal(size=8 * MIB).astype(np.float32)
        watching = Watcher(nodes, ("n0", "n1"))
        try:
            for step in range(5):
                values[step::64] += 1
                manager.save_async({"w": values, "step": step}, f"s{step}").wait("peers", timeout=90)
                host.load_elsewhere(objects=False)
            state, report = host.load_elsewhere("s3", objects=False)
        finally:
            watching.close()
        assert (state["step"], report.source) == (3, "peers")
        assert watching.answers > 20
        assert watching.used_bytes <= limit
        # Messages on their way, and what is decoded to be merged or taken back, come on top.
        for name in ("n0", "n1"):
            assert watching.rss[name] - idle[name] < limit + 160 * MIB
        shutil.rmtree(host.objects, ignore_errors=True)


class Watcher:
    """Asks nodes all the time how much they hold; each answer has to come within the client's grace."""

    def __init__(self, nodes: StorageCluster, names: tuple[str, ...]) -> None:
        self.answers = self.used_bytes = 0
        self.rss = dict.fromkeys(names, 0)
        self.failure: BaseException | None = None
        self._nodes, self._names = nodes, names
        self._closing = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._watch()))
        self._thread.start()

    async def _watch(self) -> None:
        clients = [quick_client(name, self._nodes.address(name)) for name in self._names]
        try:
            while not self._closing.wait(0.01):
                for client in clients:
                    self.used_bytes = max(self.used_bytes, (await client.ping())["used_bytes"])
                    rss = psutil.Process(self._nodes.pid(client.node)).memory_info().rss
                    self.rss[client.node] = max(self.rss[client.node], rss)
                    self.answers += 1
        except BaseException as error:
            self.failure = error
        finally:
            for client in clients:
                await client.close()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        if self.failure is not None:
            raise self.failure
