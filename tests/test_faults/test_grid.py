"""What fails x at which message x on which node: the handle is decided, and what loads is what it says."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

#: A save that meets a fault is decided within this many seconds.
BOUND = 20.0

Fault = Callable[[FaultyCluster, str], None]


def cut(nodes: FaultyCluster, name: str) -> None:
    nodes.proxies[name].cut()


def blackhole(nodes: FaultyCluster, name: str) -> None:
    nodes.proxies[name].blackhole()


def restarted_empty(nodes: FaultyCluster, name: str) -> None:
    nodes.restart(name)


FAULTS = pytest.mark.parametrize("fault", [cut, blackhole, restarted_empty])
POSITIONS = pytest.mark.parametrize("shard", [0, 2], ids=["data", "parity"])


@POSITIONS
@pytest.mark.parametrize("op", ["begin", "put", "prepare"])
@FAULTS
def test_save_node_failing_before_the_commit_succeeds_on_a_spare(
    faulty: FaultyCluster, host: TrainingHost, fault: Fault, op: str, shard: int
) -> None:
    manager = host.manager(persist_every=0)
    victim = host.save(manager, 1).stats["nodes"][shard]
    proxy = faulty.proxies[victim]
    proxy.hold(op)
    handle = manager.save_async(state_at(2), "step2")
    proxy.wait_held(op)
    fault(faulty, victim)
    proxy.release()
    handle.wait("peers", timeout=BOUND)
    if fault is not restarted_empty:
        assert victim not in handle.stats["nodes"]
        assert handle.stats["replaced"].keys() == {victim}
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert (report.generation, report.source, report.skipped) == (2, "peers", [])
    after = host.save(manager, 3)
    assert after.generation == 3
    state, report = host.load_elsewhere()
    assert_is_state(state, 3)
    assert report.source == "peers"


@POSITIONS
@FAULTS
def test_save_node_failing_after_the_commit_stays_committed(
    faulty: FaultyCluster, host: TrainingHost, fault: Fault, shard: int
) -> None:
    manager = host.manager(persist_every=0)
    victim = host.save(manager, 1).stats["nodes"][shard]
    proxy = faulty.proxies[victim]
    proxy.hold("commit")
    handle = manager.save_async(state_at(2), "step2")
    proxy.wait_held("commit")
    fault(faulty, victim)
    proxy.release()
    handle.wait("peers", timeout=BOUND)
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert report.source == ("peers" if shard == 2 else "peers+parity")
    host.save(manager, 3)
    state, report = host.load_elsewhere()
    assert_is_state(state, 3)
    assert report.source == "peers"


@POSITIONS
@pytest.mark.parametrize("op", ["begin", "prepare", "commit"])
def test_save_reply_corrupted_is_decided_and_loads(
    faulty: FaultyCluster, host: TrainingHost, op: str, shard: int
) -> None:
    manager = host.manager(persist_every=0)
    victim = host.save(manager, 1).stats["nodes"][shard]
    faulty.proxies[victim].corrupt_header(op)
    host.save(manager, 2)
    assert faulty.proxies[victim].corrupted == 1
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert report.source == "peers"
    host.save(manager, 3)
    assert_is_state(host.load_elsewhere()[0], 3)


@POSITIONS
@pytest.mark.parametrize("op", ["put", "prepare"])
def test_save_request_corrupted_on_the_way_never_shows_wrong_bytes(
    faulty: FaultyCluster, host: TrainingHost, op: str, shard: int
) -> None:
    manager = host.manager(persist_every=0)
    victim = host.save(manager, 1).stats["nodes"][shard]
    faulty.proxies[victim].corrupt(op, reply=False)
    handle = manager.save_async(state_at(2), "step2")
    decided = 2
    try:
        handle.wait("peers", timeout=BOUND)
    except FastCheckError:
        decided = 1
    assert faulty.proxies[victim].corrupted == 1
    assert_is_state(host.load_elsewhere()[0], decided)
    host.save(manager, 3)
    assert_is_state(host.load_elsewhere()[0], 3)


@FAULTS
def test_load_data_node_failing_in_mid_read_takes_parity(
    faulty: FaultyCluster, host: TrainingHost, fault: Fault
) -> None:
    manager = host.manager(persist_every=0)
    host.save(manager, 1)
    names = host.save(manager, 2).stats["nodes"]
    proxy = faulty.proxies[names[1]]
    proxy.wait_for("commit", 2)
    host.lose_memory()
    manager = host.manager(persist_every=0)
    with ThreadPoolExecutor(1) as executor:
        proxy.hold("read")
        loading = executor.submit(manager.load)
        try:
            proxy.wait_held("read")
            fault(faulty, names[1])
        finally:
            proxy.release()
        assert_is_state(loading.result(BOUND), 2)
    report = manager.last_load
    assert report is not None
    assert report.source == "peers+parity"
    assert report.rebuilt
    host.save(manager, 3)
    assert_is_state(host.load_elsewhere()[0], 3)


@pytest.mark.parametrize("where", ["payload", "header"])
def test_load_reply_corrupted_names_the_chunk_and_is_exact(
    faulty: FaultyCluster, host: TrainingHost, where: str
) -> None:
    manager = host.manager(persist_every=0)
    names = host.save(manager, 1).stats["nodes"]
    proxy = faulty.proxies[names[0]]
    (proxy.corrupt if where == "payload" else proxy.corrupt_header)("read")
    state, report = host.load_elsewhere(objects=False)
    assert proxy.corrupted == 1
    assert_is_state(state, 1)
    assert report.source == "peers+parity"
    if where == "payload":
        assert any("checksum" in why and names[0] in why for why in report.rebuilt)
    state, report = host.load_elsewhere(objects=False)
    assert_is_state(state, 1)
    assert (report.source, report.rebuilt) == ("peers", [])


def test_load_manifest_corrupted_on_the_way_takes_that_of_another_node(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager(persist_every=0)
    names = host.save(manager, 1).stats["nodes"]
    faulty.proxies[names[0]].corrupt("manifest")
    state, report = host.load_elsewhere(objects=False)
    assert faulty.proxies[names[0]].corrupted == 1
    assert faulty.proxies[names[1]].count("manifest") == 1
    assert_is_state(state, 1)
    assert report.source == "peers"


@pytest.mark.parametrize("op", ["pin", "persist"])
@FAULTS
def test_persist_node_failing_is_completed_by_the_host(
    faulty: FaultyCluster, host: TrainingHost, fault: Fault, op: str
) -> None:
    manager = host.manager()
    names = host.save(manager, 1, level="object").stats["nodes"]
    proxy = faulty.proxies[names[0]]
    proxy.hold(op)
    handle = manager.save_async(state_at(2), "step2")
    proxy.wait_held(op)
    assert handle.wait("peers", timeout=BOUND).generation == 2
    fault(faulty, names[0])
    proxy.release()
    handle.wait("object", timeout=BOUND)
    for other in faulty.proxies.values():
        other.cut()
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert (report.generation, report.source) == (2, "object")
    for other in faulty.proxies.values():
        other.heal()
    host.save(manager, 3, level="object")
    assert_is_state(host.load_elsewhere()[0], 3)
