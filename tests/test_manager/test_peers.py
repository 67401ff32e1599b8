"""A manager with real storage nodes."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import ConfigError, SaveFailedError, TooFewNodesError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import FaultyCluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageCluster]:
    with StorageCluster(tmp_path_factory.mktemp("cluster"), nodes=4, memory_bytes=2**28) as nodes:
        yield nodes


def test_save_to_peers_next_is_delta_and_loads_without_local_memory(
    make: Any, kit: Any, tmp_path: Path, cluster: StorageCluster
) -> None:
    manager = make(coordinator=cluster.coordinator, num_shards=3, persist_every=0, chunk_bytes=2**16)
    weights = kit.noise(1, 2**20)
    whole = manager.save_async({"w": weights, "step": 1}, "a").wait()
    assert whole.stats["deltas"] == 0
    assert whole.stats["nodes"] == ["n0", "n1", "n2", "n3"]
    assert whole.exception() is None
    with pytest.raises(ConfigError, match="persist_every=0"):
        whole.wait("object")
    changed = weights.copy()
    changed[::500] += 1
    delta = manager.save_async({"w": changed, "step": 2}, "b").wait()
    assert delta.stats["deltas"] == delta.stats["chunks"]
    assert delta.stats["sent_bytes"] < whole.stats["sent_bytes"] / 5
    manager.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)

    again = make(coordinator=cluster.coordinator, num_shards=3, persist_every=0, chunk_bytes=2**16)
    found = again.load()
    assert again.last_load.source == "peers"
    assert found["w"].tobytes() == changed.tobytes()
    # The load put the checkpoint into a slot: the next save is a delta again.
    changed[0] = 5
    after = again.save_async({"w": changed, "step": 3}, "c").wait()
    assert after.stats["deltas"] == after.stats["chunks"]
    assert again.load()["w"].tobytes() == changed.tobytes()


def test_save_raw_to_peers_tells_its_rates_and_loads_after_deltas(
    make: Any, kit: Any, tmp_path: Path, cluster: StorageCluster
) -> None:
    options: dict[str, Any] = {"coordinator": cluster.coordinator, "num_shards": 3, "chunk_bytes": 2**16}
    weights = kit.noise(1, 2**18)
    for number, compression in enumerate(("never", "always", "never")):
        manager = make(**options, compression=compression)
        manager.load()
        weights[::500] += 1
        handle = manager.save_async({"w": weights, "n": number}, f"t{number}").wait("peers")
        assert handle.stats["compressed"] is (compression == "always")
        assert (handle.stats["deltas"] > 0) is (compression == "always")
        assert handle.stats["encode_bytes_per_second"] > 0
        assert handle.stats["link_bytes_per_second"] > 0
        handle.wait("object")
        manager.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    again = make(**options)
    assert again.load()["w"].tobytes() == weights.tobytes()
    assert again.last_load.source == "peers"


def test_delta_of_special_values_is_exact_both_ways(
    make: Any, kit: Any, tmp_path: Path, cluster: StorageCluster
) -> None:
    steps = [
        np.array([1, 2, 3, 4, 5] * 100, np.float32),
        np.array([1, 2, np.nan, 4, 5] * 100, np.float32),
        np.array([1e8, 1, 1e-8, -0.0, np.inf] * 100, np.float32),
        np.array([0x7FC00001, 0xFFC12345, 0x80000000, 1, 0x7F800001] * 100, np.uint32).view(np.float32),
        np.array([1, 2, 3, 4, 5] * 100, np.float32),
    ]
    options = {"coordinator": cluster.coordinator, "persist_every": 0}
    manager = make(**options)
    for i, values in enumerate(steps):
        manager.save_async({"w": values}, f"s{i}").wait()
    for i, values in enumerate(steps):
        if i:
            manager.close()
            shutil.rmtree(tmp_path / "shm", ignore_errors=True)
            manager = make(**options)
        manager.save_async({"w": values}, f"again{i}").wait()
        found = manager.load()["w"]
        assert found.view(np.uint32).tobytes() == values.view(np.uint32).tobytes()
        if i == 1:
            break
    manager.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    assert make(**options).load()["w"].tobytes() == steps[1].tobytes()


def test_too_few_nodes_explicit_number_refused_on_the_handle(
    make: Any, kit: Any, cluster: StorageCluster
) -> None:
    manager = make(coordinator=cluster.coordinator, num_shards=4)
    handle = manager.save_async({"w": kit.noise(1)}, "a")
    with pytest.raises(TooFewNodesError, match="5 storage nodes are needed and 4 are alive; start more"):
        handle.wait(timeout=kit.patience)
    assert isinstance(handle.exception(), TooFewNodesError)
    assert manager.tags() == []


def test_persist_every_second_the_last_is_persisted_at_close(
    make: Any, kit: Any, cluster: StorageCluster, tmp_path: Path
) -> None:
    manager = make(coordinator=cluster.coordinator, persist_every=2)
    handles = [manager.save_async({"w": kit.noise(i)}, f"s{i}").wait() for i in range(3)]
    assert handles[1].wait("object", timeout=kit.patience).exception() is None
    for handle in (handles[0], handles[2]):
        with pytest.raises(ConfigError, match="persist_every=2"):
            handle.wait("object")
        assert handle.exception(timeout=kit.patience) is None
    manager.close()
    assert not list((tmp_path / "shm").rglob("*"))
    names = sorted(p.name for p in (tmp_path / "objects").iterdir() if p.name[0] != ".")
    assert names == ["00000002-s1", "00000003-s2"]


def test_thousands_of_tensors_few_descriptors(
    make: Any, start_trainer: Any, kit: Any, cluster: StorageCluster, tmp_path: Path
) -> None:
    script = """
import os, resource, sys
import numpy as np
from fastcheck_dask import FastCheckManager
folder, coordinator = sys.argv[1:]
def state(seed):
    return {str(i): np.full(75, i + seed, np.float32) for i in range(5000)}
def descriptors():
    return [len(os.listdir(f"/proc/{pid}/fd")) for pid in (os.getpid(), agent)]
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
manager = FastCheckManager(
    folder + "/objects", local_dir=folder + "/shm", encoders=1, coordinator=coordinator, persist_every=0
)
agent = manager._agents.link().pid
manager.save_async({"w": np.arange(100)}, "warm").wait()
before = descriptors()
for seed in range(2):
    manager.save_async(state(seed), f"many{seed}").wait()
    # Each thread of the agent's pool keeps a connection to the coordinator, three files, once it was used.
    assert [a <= b + 40 for a, b in zip(descriptors(), before)] == [True, True], (before, descriptors())
"""
    assert start_trainer(script, tmp_path, cluster.coordinator).end() == 0
    found = make(coordinator=cluster.coordinator, persist_every=0).load()
    assert len(found) == 5000
    assert all(found[str(i)].tobytes() == np.full(75, i + 1, np.float32).tobytes() for i in range(5000))


def test_nodes_die_one_after_the_other_protection_degrades_and_says_so(
    make: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture, no_process_is_left: None
) -> None:
    with StorageCluster(tmp_path / "cluster", nodes=3, memory_bytes=2**28) as nodes:
        manager = make(coordinator=nodes.coordinator)
        assert manager.save_async({"w": kit.noise(1)}, "three").wait().stats["nodes"] == ["n0", "n1", "n2"]
        nodes.kill("n1")
        two = manager.save_async({"w": kit.noise(2)}, "two").wait(timeout=kit.patience)
        assert len(two.stats["nodes"]) == 2
        nodes.kill("n0")
        one = manager.save_async({"w": kit.noise(3)}, "one").wait(timeout=kit.patience)
        assert one.stats["nodes"] == ["n2"]
        assert "no storage node may be lost" in caplog.text
        nodes.kill("n2")
        none = manager.save_async({"w": kit.noise(4)}, "none").wait("object", timeout=kit.patience)
        with pytest.raises(TooFewNodesError, match="only the object tier"):
            none.wait("peers")
        assert "only the object tier protects" in caplog.text
        assert manager.load()["w"].tobytes() == kit.noise(4).tobytes()
        manager.close()
    again = make(coordinator=nodes.coordinator)
    assert again.load()["w"].tobytes() == kit.noise(4).tobytes()
    assert [again.load(tag=t)["w"].tobytes() for t in ("three", "one")] == [
        kit.noise(1).tobytes(),
        kit.noise(3).tobytes(),
    ]


def test_scheduler_without_nodes_says_what_to_do_and_tells_the_coordinator(
    make: Any, kit: Any, tmp_path: Path, no_process_is_left: None
) -> None:
    with StorageCluster(tmp_path / "cluster", nodes=0, scheduler=True) as nodes:
        with pytest.raises(ConfigError, match=r"no storage node is registered.*dask fastcheck storage"):
            make(scheduler=nodes.scheduler, scheduler_timeout="3 s")
        nodes.start_node("n0")
        manager = make(scheduler=nodes.scheduler, scheduler_timeout="30 s")
        assert manager.save_async({"w": kit.noise(1)}, "a").wait().stats["nodes"] == ["n0"]


def test_agent_killed_while_sending_next_save_works(make: Any, kit: Any, tmp_path: Path) -> None:
    with FaultyCluster(tmp_path / "nodes", 2) as nodes:
        manager: FastCheckManager = make(coordinator=nodes.coordinator, grace="15 s")
        manager.save_async({"w": kit.noise(1, 2**20)}, "a").wait()
        agent = kit.agent_of(manager)
        # Else a fast agent may be done before it is killed.
        nodes.proxies["n0"].hold("put")
        handle = manager.save_async({"w": kit.noise(2, 2**24)}, "b")
        nodes.proxies["n0"].wait_held("put")
        agent.kill()
        failed = handle.exception(timeout=kit.patience)
        assert isinstance(failed, SaveFailedError)
        nodes.release()
        manager.save_async({"w": kit.noise(3, 2**20)}, "c").wait(timeout=kit.patience)
        assert manager.load()["w"].tobytes() == kit.noise(3, 2**20).tobytes()
        assert subprocess.run(["ps", "-p", str(agent.pid)], capture_output=True).returncode != 0
        manager.close()


def test_save_incremental_nodes_write_deltas_and_the_object_tier_alone_gives_them_back(
    make: Any, kit: Any, tmp_path: Path, cluster: StorageCluster
) -> None:
    manager = make(
        coordinator=cluster.coordinator,
        num_shards=3,
        chunk_bytes=2**16,
        persist="incremental",
        max_deltas=2,
        keep_last=2,
    )
    weights, frozen = kit.noise(1, 2**19), kit.noise(2, 2**18)
    written, states = [], []
    for step in range(5):
        weights[step::50] += 1e-3
        states.append(weights.copy())
        handle = manager.save_async({"w": weights, "frozen": frozen, "step": step}, f"s{step}").wait("object")
        written.append(handle.stats["persisted_bytes"])
    # 1 is whole, 2 and 3 are deltas, 4 is whole, 5 a delta.
    assert max(written[1], written[2], written[4]) < min(written[0], written[3]) / 2
    manager.close()
    # 1 has what did not change since, and 4 refers to it.
    assert [m.generation for m in manager._folder.committed()] == [1, 4, 5]
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    # Without the coordinator nobody knows of the nodes.
    alone = make(run_id=manager.run_id)
    for step in (3, 4):
        found = alone.load(f"s{step}")
        assert alone.last_load.source == "object"
        assert found["w"].tobytes() == states[step].tobytes()
        assert found["frozen"].tobytes() == frozen.tobytes()
