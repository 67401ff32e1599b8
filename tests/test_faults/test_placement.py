"""Nodes that come later, racks, nodes that are too small, and what must not happen to a slot in use."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask.errors import FastCheckError, TierFullError
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at


def test_save_nodes_joining_later_are_used_by_the_next_saves(tmp_path: Path) -> None:
    with (
        FaultyCluster(tmp_path / "nodes", 1) as nodes,
        TrainingHost(tmp_path, nodes.coordinator) as host,
    ):
        manager = host.manager(persist_every=0)
        handle = host.save(manager, 1)
        assert handle.stats["nodes"] == ["n0"]
        assert "parity" in handle.stats["degraded"]
        assert_is_state(host.load_elsewhere()[0], 1)
        nodes.add("n1", rack="r1")
        assert len(host.save(manager, 2).stats["nodes"]) == 2
        survives_any_loss(nodes, host, 2)
        nodes.add("n2", rack="r2")
        nodes.add("n3", rack="r3")
        handle = host.save(manager, 3)
        assert len(handle.stats["nodes"]) == 4
        assert handle.stats["degraded"] is None
        survives_any_loss(nodes, host, 3)
        assert host.save(manager, 4).stats["deltas"] > 0
        survives_any_loss(nodes, host, 4)


def survives_any_loss(nodes: FaultyCluster, host: TrainingHost, step: int) -> None:
    for name in host.records()[-1].nodes:
        nodes.proxies[name].cut()
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, step)
        assert report.generation == step
        nodes.proxies[name].heal()


def test_save_nodes_leaving_and_coming_back_keeps_every_checkpoint_whole(tmp_path: Path) -> None:
    with (
        FaultyCluster(tmp_path / "nodes", 4) as nodes,
        TrainingHost(tmp_path, nodes.coordinator) as host,
    ):
        manager = host.manager(persist_every=0)
        shards = []
        for step, leaving, joining in [(1, None, None), (2, "n3", None), (3, "n0", None), (4, None, "n4")]:
            if leaving is not None:
                nodes.proxies[leaving].cut()
                nodes.unregister(leaving)
            if joining is not None:
                nodes.add(joining, rack="r9")
            used = host.save(manager, step).stats["nodes"]
            assert len(set(used)) == len(used)
            shards.append(len(used) - 1)
            survives_any_loss(nodes, host, step)
        assert shards == [3, 2, 1, 2]


@pytest.mark.parametrize("shards", [1, 2])
def test_save_with_racks_puts_no_two_shards_into_one_while_others_are_free(
    tmp_path: Path, shards: int
) -> None:
    with (
        FaultyCluster(tmp_path / "nodes", 0) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"num_shards": shards}) as host,
    ):
        racks = {"a0": "ra", "a1": "ra", "a2": "ra", "b0": "rb", "c0": "rc"}
        for name, rack in racks.items():
            nodes.add(name, rack=rack)
        manager = host.manager(persist_every=0)
        used = host.save(manager, 1).stats["nodes"]
        assert len({racks[name] for name in used}) == shards + 1
        lost = next(name for name in used if racks[name] == "ra")
        nodes.proxies[lost].cut()
        nodes.unregister(lost)
        used = host.save(manager, 2).stats["nodes"]
        assert len({racks[name] for name in used}) == shards + 1


def test_save_larger_than_the_nodes_fails_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    with (
        FaultyCluster(tmp_path / "nodes", 3, memory_bytes=200_000) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"num_shards": 2}) as host,
    ):
        manager = host.manager(persist_every=0)
        host.save(manager, 1)
        large = np.random.default_rng(0).normal(size=200_000)
        handle = manager.save_async({"large": large}, "large")
        with pytest.raises(TierFullError) as told:
            handle.wait("peers", timeout=30)
        assert "memory" in str(told.value)
        assert handle.generation is None
        assert_is_state(host.load_elsewhere()[0], 1)
        assert_is_state(manager.load(), 1)
        assert host.save(manager, 2).generation == 2
        state, report = host.load_elsewhere()
        assert_is_state(state, 2)
        assert report.source == "peers"
        assert all(store.used_bytes < 200_000 for store in nodes.stores.values())


def test_agent_killed_during_the_copy_does_not_offer_that_slot_to_the_next_save(
    faulty: FaultyCluster, host: TrainingHost, trainer_of: Callable[..., Any]
) -> None:
    """The new agent must not call free what the trainer hands over to it."""
    trainer = trainer_of(host, grace="15 s", persist_every=0)
    trainer.tell("save 1")
    trainer.expect("peers 1")
    trainer.tell("stall copy")
    trainer.tell("save 2")
    trainer.expect("stopped copy")
    trainer.kill_agent()
    proxy = faulty.proxies["n0"]
    proxy.hold("put")
    trainer.tell("go on")
    trainer.expect("local 2")
    trainer.tell("save 3")
    proxy.wait_held("put")
    # Were the slot overwritten, the third snapshot would be complete while the second is being sent.
    with pytest.raises(AssertionError):
        trainer.expect("local 3", seconds=1.0)
    proxy.release()
    trainer.expect("peers 2")
    trainer.expect("peers 3")
    assert_is_state(host.load_elsewhere()[0], 3)
    assert [record.tag for record in host.records()] == ["step1", "step2", "step3"]


def test_agent_killed_with_two_snapshots_never_commits_the_older_after_the_newer(
    faulty: FaultyCluster, host: TrainingHost, trainer_of: Callable[..., Any]
) -> None:
    trainer = trainer_of(host, grace="15 s", persist_every=0)
    proxy = faulty.proxies["n0"]
    proxy.hold("put")
    trainer.tell("save 1")
    trainer.expect("local 1")
    trainer.tell("save 2")
    trainer.expect("local 2")
    proxy.wait_held("put")
    trainer.kill_agent()
    proxy.heal()
    proxy.release()
    trainer.expect("failed 1")
    trainer.expect("failed 2")
    trainer.tell("save 3")
    trainer.expect("peers 3")
    trainer.kill()
    manager = host.manager()
    assert_is_state(manager.load(), 3)


def test_soak_random_faults_at_random_messages_no_committed_checkpoint_is_lost(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    random = np.random.default_rng(11)
    manager = host.manager(persist_every=0)
    committed = 1
    nodes = host.save(manager, 1).stats["nodes"]
    for step in range(2, 16):
        victim = str(random.choice(nodes))
        proxy = faulty.proxies[victim]
        op = str(random.choice(["begin", "put", "prepare", "commit"]))
        fault = str(random.choice(["cut", "restart", "request", "header"]))
        if fault == "request":
            proxy.corrupt(op, reply=False)
        elif fault == "header":
            proxy.corrupt_header(op)
        else:
            proxy.hold(op)
        handle = manager.save_async(state_at(step), f"step{step}")
        if fault in ("cut", "restart"):
            proxy.wait_held(op)
            proxy.cut() if fault == "cut" else faulty.restart(victim)
            proxy.release()
        error = None
        try:
            handle.wait("peers", timeout=30)
            committed = step
        except FastCheckError as caught:
            error = caught
        # Only bits that were damaged on the way may make a save fail; nodes that fail are replaced.
        assert error is None or fault == "request"
        state, report = host.load_elsewhere()
        assert_is_state(state, committed)
        assert report.skipped == []
        proxy.heal()
        nodes = host.save(manager, 1000 + step).stats["nodes"]
        committed = 1000 + step
        assert len(set(nodes)) == 3
        state, report = host.load_elsewhere()
        assert_is_state(state, committed)
        assert report.source == "peers"
