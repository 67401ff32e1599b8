"""The trainer, its agent, both, or their machine die at each stage of a save: nothing committed is lost."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from typing import Any

import pytest

from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state

STAGES = ["copy", "handover", "encode", "put", "prepare", "voted", "told", "persist"]
VICTIMS = ["trainer", "agent", "both", "machine"]


def reach(stage: str, trainer: Any, nodes: FaultyCluster) -> None:
    """Have the trainer save step 2, and stop the save at a stage."""
    used = [nodes.proxies[name] for name in ("n0", "n1", "n2")]
    if stage in ("copy", "handover"):
        trainer.tell(f"stall {stage}")
        trainer.tell("save 2")
        trainer.expect(f"stopped {stage}")
        return
    if stage == "encode":
        for encoder in trainer.encoders():
            encoder.suspend()
    for proxy in used if stage == "told" else used[:1]:
        match stage:
            case "voted":
                proxy.hold("prepare", reply=True)
            case "told":
                proxy.hold("commit")
            case "put" | "prepare" | "persist":
                proxy.hold(stage)
    trainer.tell("save 2")
    trainer.expect("local 2")
    match stage:
        case "encode":
            for proxy in used:
                proxy.wait_for("begin", 2)
        case "voted":
            used[0].wait_held("prepare", reply=True)
            for proxy in used[1:]:
                proxy.wait_for("prepare", 2)
        case "told":
            for proxy in used:
                proxy.wait_held("commit")
        case _:
            used[0].wait_held(stage)


@pytest.mark.parametrize("victim", VICTIMS)
@pytest.mark.parametrize("stage", STAGES)
def test_save_interrupted_loads_one_committed_checkpoint(
    faulty: FaultyCluster,
    host: TrainingHost,
    trainer_of: Callable[..., Any],
    stage: str,
    victim: str,
) -> None:
    # A node that is held for longer than this would be taken for dead.
    trainer = trainer_of(host, grace="15 s")
    trainer.tell("save 1")
    trainer.expect("peers 1")
    for name in ("n0", "n1", "n2"):
        faulty.proxies[name].wait_for("commit", 1)
    faulty.proxies["n0"].wait_for("unpin", 1)
    reach(stage, trainer, faulty)
    if victim in ("trainer", "both", "machine"):
        trainer.kill()
    encoders = trainer.encoders() if victim == "trainer" else []
    if victim != "trainer":
        trainer.kill_agent()
        # What the dead had in flight is lost with its connections.
        for proxy in faulty.proxies.values():
            proxy.heal()
    if victim == "machine":
        shutil.rmtree(host.shared_memory)
    faulty.release()
    for encoder in encoders:
        encoder.resume()
    wanted = 2 if stage in ("told", "persist") or (victim == "trainer" and stage != "copy") else 1
    if victim == "agent":
        if stage in ("copy", "handover"):
            trainer.tell("go on")
            trainer.expect("peers 2", "failed 2")
        trainer.tell("save 3")
        trainer.expect("peers 3")
        trainer.kill()
        wanted = 3
    manager = host.manager()
    state = manager.load()
    assert_is_state(state, state["step"])
    assert state["step"] >= trainer.last_at_peers
    assert state["step"] == wanted
    host.save(manager, 9, level="object")
    assert_is_state(host.load_elsewhere()[0], 9)
    assert [r.generation for r in host.records()] == list(range(1, len(host.records()) + 1))
