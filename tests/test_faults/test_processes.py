"""Real node processes that are killed or stopped, or do not get a message, at each step of a save or load.

A proxy before each data port says when the message comes, and holds it until the fault is there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.errors import TooFewNodesError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import GatedProxy
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

BOUND = 20.0


class Proxied:
    """Real nodes, of which the run knows only the proxies: so none is ever unregistered."""

    def __init__(self, folder: Path, cluster: StorageCluster) -> None:
        self.cluster = cluster
        self.coordinator = f"sqlite:///{folder}/proxies.db"
        self._session = connect(self.coordinator)
        self.proxies: dict[str, GatedProxy] = {}
        for number in range(4):
            self.add(f"n{number}")

    def add(self, name: str) -> None:
        """Put a proxy before a node, and make it known to the run."""
        self.proxies[name] = GatedProxy(self.cluster.address(name))
        info = NodeInfo(name, self.proxies[name].address, f"rack-{name}", f"host-{name}", 2**30)
        self._session.register(info)

    def close(self) -> None:
        for proxy in self.proxies.values():
            proxy.close()
        self._session.close()


@pytest.fixture
def proxied(tmp_path: Path, cluster: StorageCluster, restart: Callable[..., None]) -> Iterator[Proxied]:
    """Return the nodes of the module behind new proxies; each lives again afterwards."""
    with contextlib.closing(Proxied(tmp_path, cluster)) as made:
        yield made
        for name in made.proxies:
            with contextlib.suppress(KeyError):
                cluster.resume(name)
                continue
            restart(cluster, name)


@pytest.fixture
def run(tmp_path: Path, proxied: Proxied) -> Iterator[TrainingHost]:
    with TrainingHost(tmp_path, proxied.coordinator, {"num_shards": 2, "persist_every": 0}) as made:
        yield made
        for proxy in proxied.proxies.values():
            proxy.release()


def killed(nodes: Proxied, name: str) -> None:
    nodes.cluster.kill(name)
    nodes.proxies[name].release()


def stopped(nodes: Proxied, name: str) -> None:
    nodes.cluster.pause(name)
    nodes.proxies[name].release()


def slow(nodes: Proxied, name: str) -> None:
    """The message goes on being held: it is not there when it should be."""


FAULTS = pytest.mark.parametrize("fault", [killed, stopped])


@pytest.mark.parametrize("op", ["begin", "put", "prepare"])
@FAULTS
def test_save_node_is_replaced_during_the_save(
    proxied: Proxied, run: TrainingHost, fault: Callable[..., None], op: str
) -> None:
    manager = run.manager()
    nodes = run.save(manager, 1).stats["nodes"]
    victim = nodes[1]
    others = [proxied.proxies[name] for name in (nodes[0], nodes[2])]
    begun = [proxy.count("begin") for proxy in others]
    proxied.proxies[victim].hold(op)
    handle = manager.save_async(state_at(2), "step2")
    proxied.proxies[victim].wait_held(op)
    fault(proxied, victim)
    handle.wait("peers", timeout=BOUND)
    assert handle.stats["replaced"].keys() == {victim}
    assert [new == old for new, old in zip(handle.stats["nodes"], nodes, strict=True)] == [True, False, True]
    # The others did not notice: their shards were begun once.
    assert [proxy.count("begin") for proxy in others] == [count + 1 for count in begun]
    state, report = run.load_elsewhere(objects=False)
    assert_is_state(state, 2)
    assert (report.generation, report.source) == (2, "peers")
    assert run.save(manager, 3).stats["replaced"] == {}
    assert_is_state(run.load_elsewhere(objects=False)[0], 3)


@FAULTS
def test_save_node_fails_while_it_is_told_of_the_commit_stays_committed(
    proxied: Proxied, run: TrainingHost, fault: Callable[..., None]
) -> None:
    manager = run.manager()
    victim = run.save(manager, 1).stats["nodes"][1]
    proxied.proxies[victim].hold("commit")
    handle = manager.save_async(state_at(2), "step2")
    proxied.proxies[victim].wait_held("commit")
    fault(proxied, victim)
    handle.wait("peers", timeout=BOUND)
    state, report = run.load_elsewhere(objects=False)
    assert_is_state(state, 2)
    assert report.generation == 2
    assert_is_state(run.load_elsewhere(objects=False)[0], 2)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("fault", [killed, stopped, slow])
def test_load_node_that_fails_is_overtaken_without_waiting_for_its_deadline(
    proxied: Proxied, run: TrainingHost, fault: Callable[..., None]
) -> None:
    victim = run.save(run.manager(), 1).stats["nodes"][1]
    run.lose_memory()
    # Were it waited for, the load would take longer than the test waits.
    manager = run.manager(grace="300 s", connect_timeout="300 s")
    proxied.proxies[victim].hold("read")
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(manager.load)
        try:
            proxied.proxies[victim].wait_held("read")
            fault(proxied, victim)
            assert_is_state(loading.result(BOUND), 1)
        finally:
            proxied.proxies[victim].cut()
    report = manager.last_load
    assert report is not None
    assert report.source == "peers+parity"


@pytest.mark.usefixtures("impatient")
def test_load_node_stopped_before_the_load_costs_no_deadline(proxied: Proxied, run: TrainingHost) -> None:
    first = run.save(run.manager(), 1).stats["nodes"][0]
    run.lose_memory()
    manager = run.manager(grace="300 s", connect_timeout="300 s")
    proxied.cluster.pause(first)
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(manager.load)
        try:
            # It is the one that is asked for the manifest, too.
            assert_is_state(loading.result(BOUND), 1)
        finally:
            proxied.proxies[first].cut()


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("parity_fault", [stopped, slow])
@pytest.mark.parametrize("data_fault", [killed, stopped])
def test_load_first_parity_that_hangs_is_overtaken_by_the_second(
    proxied: Proxied,
    run: TrainingHost,
    data_fault: Callable[..., None],
    parity_fault: Callable[..., None],
) -> None:
    first, _, parity, second = run.save(run.manager(parity=2), 1).stats["nodes"]
    run.lose_memory()
    manager = run.manager(parity=2, grace="300 s", connect_timeout="300 s")
    proxies = proxied.proxies
    proxies[first].hold("read")
    proxies[parity].hold("read")
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(manager.load)
        try:
            proxies[first].wait_held("read")
            data_fault(proxied, first)
            proxies[parity].wait_held("read")
            parity_fault(proxied, parity)
            assert_is_state(loading.result(BOUND), 1)
        finally:
            proxies[first].cut()
            proxies[parity].cut()
    report = manager.last_load
    assert report is not None
    assert report.source == "peers+parity"
    assert proxies[second].count("read") > 0


@pytest.fixture
def fifth(proxied: Proxied) -> Iterator[None]:
    """Have one node more for this test."""
    proxied.cluster.start_node("n4", rack="r4")
    proxied.add("n4")
    yield
    proxied.proxies.pop("n4").close()
    with contextlib.suppress(KeyError):
        proxied.cluster.kill("n4")


@pytest.mark.usefixtures("fifth")
def test_two_parity_shards_bear_a_node_killed_in_the_save_then_one_before_and_one_in_the_load(
    proxied: Proxied, run: TrainingHost
) -> None:
    manager = run.manager(parity=2)
    nodes = run.save(manager, 1).stats["nodes"]
    assert len(set(nodes)) == 4
    proxied.proxies[nodes[0]].hold("put")
    handle = manager.save_async(state_at(2), "step2")
    proxied.proxies[nodes[0]].wait_held("put")
    killed(proxied, nodes[0])
    handle.wait("peers", timeout=BOUND)
    assert handle.stats["replaced"].keys() == {nodes[0]}
    spare, second, first_parity, _ = handle.stats["nodes"]
    killed(proxied, first_parity)
    proxied.proxies[second].hold("read")
    with ThreadPoolExecutor(1) as executor:
        loading = executor.submit(run.load_elsewhere, objects=False)
        try:
            proxied.proxies[second].wait_held("read")
            killed(proxied, second)
            state, report = loading.result(BOUND)
        finally:
            proxied.proxies[second].cut()
    assert_is_state(state, 2)
    assert report.raw_bytes["parity"] > 0
    assert spare != nodes[0]


@pytest.mark.parametrize("op", ["begin", "put", "prepare"])
def test_save_no_spare_is_left_explicit_number_fails_and_says_so(
    proxied: Proxied, run: TrainingHost, op: str
) -> None:
    manager = run.manager(num_shards=3)
    victim = run.save(manager, 1).stats["nodes"][1]
    proxied.proxies[victim].hold(op)
    handle = manager.save_async(state_at(2), "step2")
    proxied.proxies[victim].wait_held(op)
    killed(proxied, victim)
    error = handle.exception(BOUND)
    assert isinstance(error, TooFewNodesError)
    assert "4 storage nodes are needed" in str(error)
    state, report = run.load_elsewhere(objects=False)
    assert_is_state(state, 1)
    assert report.generation == 1


def test_save_no_spare_is_left_automatic_number_degrades_and_says_so(
    proxied: Proxied, run: TrainingHost
) -> None:
    manager = run.manager(num_shards="auto")
    victim = run.save(manager, 1).stats["nodes"][1]
    proxied.proxies[victim].hold("put")
    handle = manager.save_async(state_at(2), "step2")
    proxied.proxies[victim].wait_held("put")
    killed(proxied, victim)
    handle.wait("peers", timeout=BOUND)
    assert victim not in handle.stats["nodes"]
    assert "2 data shards instead of 3" in handle.stats["degraded"]
    assert_is_state(run.load_elsewhere(objects=False)[0], 2)
