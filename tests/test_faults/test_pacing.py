"""The training communicates: checkpoints wait for it, and never for ever."""

from __future__ import annotations

import threading

import psutil
import pytest

from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

#: Large enough that its messages are held back.
LARGE = {"arrays": 6, "size": 60_000}


def test_save_is_held_back_while_the_network_is_busy(faulty: FaultyCluster, host: TrainingHost) -> None:
    manager = host.manager(persist_every=0)
    with manager.network_busy(), manager.network_busy():
        handle = manager.save_async(state_at(1, **LARGE), "step1")
        for proxy in list(faulty.proxies.values())[:3]:
            proxy.wait_for("begin")
        # The header of a message is not held back, and none of what follows it comes.
        assert sum(proxy.to_node_bytes for proxy in faulty.proxies.values()) < 500_000
    handle.wait("peers", timeout=30)
    assert_is_state(manager.load(), 1, **LARGE)


def test_save_goes_through_although_busy_was_never_left(faulty: FaultyCluster, host: TrainingHost) -> None:
    manager = host.manager(persist_every=0)
    busy = manager.network_busy()
    busy.__enter__()
    manager.save_async(state_at(1, **LARGE), "step1").wait("peers", timeout=30)
    busy.__exit__(None, None, None)
    assert_is_state(manager.load(), 1, **LARGE)


def test_busy_is_over_after_an_exception_and_from_any_thread(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager(persist_every=0)
    link = manager._agents.link()

    def communicate() -> None:
        for _ in range(300):
            with manager.network_busy():
                pass

    threads = [threading.Thread(target=communicate) for _ in range(3)]
    for thread in threads:
        thread.start()
    with pytest.raises(KeyError), manager.network_busy():
        raise KeyError
    for thread in threads:
        thread.join()
    manager.save_async(state_at(1, **LARGE), "step1").wait("peers", timeout=30)
    assert (manager._busy._inside, link._busy) == (0, False)


def test_busy_does_not_wait_for_an_agent_that_hangs(faulty: FaultyCluster, host: TrainingHost) -> None:
    manager = host.manager(persist_every=0)
    agent = psutil.Process(manager._agents.link().pid)
    agent.suspend()
    try:
        # More than its socket would hold.
        for _ in range(20_000):
            with manager.network_busy():
                pass
    finally:
        agent.resume()
    manager.save_async(state_at(1, **LARGE), "step1").wait("peers", timeout=30)
    manager.close()
    with manager.network_busy():
        pass
