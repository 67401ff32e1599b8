"""Real storage nodes that are killed, stopped and damaged; a real scheduler that is killed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed.core import rpc

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import flip_in_process, wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client, state_at


@pytest.mark.slow
@pytest.mark.parametrize("shards", [1, 2, 3, 5])
def test_load_any_one_node_killed_is_exact_via_parity(
    tmp_path: Path, restart: Callable[..., None], shards: int
) -> None:
    with (
        StorageCluster(tmp_path / "cluster", shards + 1) as cluster,
        TrainingHost(tmp_path, cluster.coordinator, {"num_shards": shards}) as host,
    ):
        manager = host.manager(persist_every=0)
        for step in range(1, shards + 2):
            nodes = host.save(manager, step).stats["nodes"]
            assert len(set(nodes)) == shards + 1
            victim = step - 1
            cluster.kill(nodes[victim])
            state, report = host.load_elsewhere(objects=False)
            assert_is_state(state, step)
            assert report.generation == step
            if victim == shards:
                wanted = "peers"
            else:
                # With one data shard nothing is left but the parity.
                wanted = "peers+parity" if shards > 1 else "parity"
                assert any("parity" in why for why in report.rebuilt)
            assert report.source == wanted
            restart(cluster, nodes[victim])
        host.save(manager, 99)
        assert_is_state(host.load_elsewhere(objects=False)[0], 99)


def test_load_two_nodes_killed_takes_the_object_tier_and_says_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with (
        StorageCluster(tmp_path / "cluster", 3) as cluster,
        TrainingHost(tmp_path, cluster.coordinator, {"num_shards": 2}) as host,
    ):
        manager = host.manager()
        nodes = host.save(manager, 1, level="object").stats["nodes"]
        host.lose_memory()
        cluster.kill(nodes[0])
        cluster.kill(nodes[1])
        manager = host.manager(num_shards="auto")
        assert_is_state(manager.load(), 1)
        assert manager.last_load is not None
        assert manager.last_load.source == "object"
        assert any("object tier" in record.getMessage() for record in caplog.records)
        handle = host.save(manager, 2)
        assert handle.stats["nodes"] == [nodes[2]]
        assert handle.stats["degraded"]


def test_save_node_paused_at_a_generation_never_mixes_it_with_later_ones(
    cluster: StorageCluster, on_cluster: Callable[..., TrainingHost], restart: Callable[..., None]
) -> None:
    host = on_cluster(num_shards=2)
    manager = host.manager(persist_every=0)
    nodes = host.save(manager, 1).stats["nodes"]
    paused = nodes[0]
    cluster.pause(paused)
    try:
        for step in (2, 3):
            used = host.save(manager, step).stats["nodes"]
            assert paused not in used
    finally:
        cluster.resume(paused)
    cluster.kill(used[1])
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 3)
    assert (report.generation, report.source) == (3, "peers+parity")
    # Now the node that was paused is needed again, with what it missed.
    assert paused in host.save(manager, 4).stats["nodes"]
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 4)
    assert report.source == "peers"
    restart(cluster, used[1])


def test_load_bit_flipped_in_the_memory_of_a_node_is_exact_named_and_repaired(
    cluster: StorageCluster, on_cluster: Callable[..., TrainingHost]
) -> None:
    host = on_cluster(num_shards=2)
    manager = host.manager(persist_every=0)
    name = host.save(manager, 1).stats["nodes"][0]
    (record,) = host.records()
    key, payload = asyncio.run(_largest_chunk(record, record.addresses[0]))
    found = flip_in_process(cluster.pid(name), payload, at=len(payload) // 2)
    assert found >= 1
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 1)
    assert report.source == "peers+parity"
    assert any(key in why and name in why for why in report.rebuilt)
    assert f"key {key}: its payload fails its checksum" in cluster.log(name)
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 1)
    assert (report.source, report.rebuilt) == ("peers", [])
    host.save(manager, 2)
    assert_is_state(host.load_elsewhere(objects=False)[0], 2)


def test_save_bit_flipped_in_the_memory_of_a_node_before_a_delta_is_exact(
    cluster: StorageCluster, on_cluster: Callable[..., TrainingHost]
) -> None:
    host = on_cluster(num_shards=2)
    manager = host.manager(persist_every=0)
    name = host.save(manager, 1).stats["nodes"][1]
    (record,) = host.records()
    _, payload = asyncio.run(_largest_chunk(record, record.addresses[1]))
    assert flip_in_process(cluster.pid(name), payload, at=len(payload) // 2)
    host.save(manager, 2)
    for _ in range(2):
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, 2)
        assert report.generation == 2
    assert report.source == "peers"


async def _largest_chunk(record: Any, address: str) -> tuple[str, bytes]:
    client = quick_client("node", address)
    try:
        holds = await client.holds(record.run)
        assert holds["committed"] == [record.generation, record.token]
        # Whichever of these lie on that shard.
        keys = [f"model/w{number}/c/{chunk}" for number in range(6) for chunk in range(2)]
        read = await client.read(record.run, record.generation, record.token, keys=keys)
        descriptor, payload = max(read.chunks, key=lambda chunk: chunk[0].nbytes)
        return descriptor.key, np.asarray(payload).tobytes()
    finally:
        await client.close()


@pytest.mark.slow
def test_scheduler_killed_and_started_again_disturbs_neither_saves_nor_loads(tmp_path: Path) -> None:
    with StorageCluster(tmp_path / "cluster", 3, scheduler=True) as cluster:
        assert cluster.scheduler is not None
        port = int(cluster.scheduler.rpartition(":")[2])
        with TrainingHost(tmp_path, cluster.coordinator) as host:
            wait_until(lambda: len(_workers(cluster.scheduler)) == 3, "three workers")
            manager = host.manager(scheduler=cluster.scheduler)
            host.save(manager, 1, level="object")
            cluster.kill("scheduler")
            host.save(manager, 2, level="object")
            state, report = host.load_elsewhere(objects=False)
            assert_is_state(state, 2)
            assert report.source == "peers"
            (cluster.folder / "scheduler.log").unlink()
            assert int(cluster.start_scheduler(port).rpartition(":")[2]) == port
            host.save(manager, 3, level="object")
            assert_is_state(host.load_elsewhere(objects=False)[0], 3)
            wait_until(lambda: len(_workers(cluster.scheduler)) == 3, "three workers again", seconds=30)
            assert sorted(_workers(cluster.scheduler)) == ["n0", "n1", "n2"]


def _workers(address: str | None) -> list[str]:
    async def ask() -> Any:
        async with rpc(address, timeout=2) as scheduler:
            return await asyncio.wait_for(scheduler.identity(), 2)

    try:
        identity = asyncio.run(ask())
    except OSError:
        return []
    return [str(worker["name"]) for worker in identity["workers"].values()]


@pytest.mark.slow
def test_soak_one_node_killed_at_a_time_no_committed_checkpoint_is_lost(
    cluster: StorageCluster, on_cluster: Callable[..., TrainingHost], restart: Callable[..., None]
) -> None:
    random = np.random.default_rng(20)
    host = on_cluster(num_shards=2)
    manager = host.manager(persist_every=4)
    step = 1
    nodes = host.save(manager, step).stats["nodes"]
    for _ in range(6):
        victim = str(random.choice(nodes))
        step += 1
        handle = manager.save_async(state_at(step), f"step{step}")
        if random.random() < 0.5:
            handle.wait("peers", timeout=30)
        cluster.kill(victim)
        handle.wait("peers", timeout=30)
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, step)
        assert report.skipped == []
        restart(cluster, victim)
        with contextlib.closing(connect(cluster.coordinator)) as coordinator:
            wait_until(lambda: len(coordinator.nodes()) == 4, "four nodes")
        step += 1
        nodes = host.save(manager, step).stats["nodes"]
        assert len(set(nodes)) == 3
    assert [record.generation for record in host.records()] == list(range(1, step + 1))
