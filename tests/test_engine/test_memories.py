"""Loads into a live state: from every source, and what is left of it when they fail."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.recover import Into
from fastcheck_dask.errors import LayoutError, UnrecoverableError

SOURCES = ["local", "peers", "parity", "object"]


def blank(states, step=0):
    """Return a state like the saved ones, in which every other tensor is not one piece of memory."""
    state = states.of(1, step=step)
    for number, (key, value) in enumerate(state.items()):
        if isinstance(value, np.ndarray):
            state[key] = np.zeros(2 * value.size, value.dtype)[::2] if number % 2 else np.zeros_like(value)
    return state


def lose_up_to(run, source):
    """Leave `source` as the best one."""
    if source != "local":
        run.forget_local()
    if source == "parity":
        run.nodes["n1"].down = True
    if source == "object":
        for node in run.nodes:
            node.down = True


@pytest.mark.parametrize("compression", ["always", "never", "auto"])
@pytest.mark.parametrize("nodes", [4, 0])
def test_load_every_source_and_either_way_gives_the_same_bits(rig, states, compression, nodes, save_alone):
    run = rig(nodes=nodes, policy=CompressionPolicy(compression, 1))
    wanted = states.of(1)
    if nodes:
        run.persist(run.save(wanted))
    else:
        save_alone(run, wanted, CompressionPolicy(compression, 1))
    for source in SOURCES if nodes else ["object"]:
        lose_up_to(run, source)
        loaded, state = run.recover(), blank(states)
        tensors = dict(state)
        filled = run.recover(into=Into(state))
        assert source in loaded.report.source
        assert source in filled.report.source
        assert states.same(loaded.state, wanted)
        assert states.same(filled.state, wanted)
        assert all(filled.state[key] is tensors[key] for key in wanted if key != "step")


def test_load_into_torch_on_strides_and_derived_weights(rig):
    run = rig()
    weight = torch.from_numpy(np.random.default_rng(0).normal(size=(60, 70)).astype(np.float32))
    saved = {"master": weight, "half": weight.to(torch.bfloat16), "head": weight}
    run.save(saved)
    run.forget_local()
    state = {
        "master": torch.nn.Parameter(torch.zeros(70, 60).t()),
        "half": torch.zeros(60, 140, dtype=torch.bfloat16)[:, ::2],
        "head": torch.zeros(60, 70),
    }
    recovered = run.recover(into=Into(state))
    assert recovered.report.raw_bytes["derived"] > 0
    assert recovered.state["master"] is state["master"]
    assert all(torch.equal(state[key].detach(), saved[key]) for key in saved)


def test_load_into_that_does_not_fit_changes_nothing_and_reads_no_chunk(rig, states):
    run = rig()
    run.save(states.of(1))
    run.forget_local()
    state = blank(states) | {"w1": np.zeros(3, np.float32)}
    for node in run.nodes:
        node.calls.clear()
    with pytest.raises(LayoutError, match="1 of another shape or dtype: w1"):
        run.recover(into=Into(state))
    assert not any(np.any(state[key]) for key in state if key != "step")
    assert not any("read" in node.calls for node in run.nodes)
    assert states.same(
        {"w2": run.recover(into=Into(state, strict=False)).state["w2"]}, {"w2": states.of(1)["w2"]}
    )
    assert not state["w1"].any()


def test_load_into_include_fills_that_alone(rig, states):
    run = rig()
    run.save(states.of(1))
    state = blank(states)
    assert run.recover(into=Into(state), include="w[12]").state.keys() == {"w1", "w2"}
    assert state["w1"].any()
    assert not state["w3"].any()


def broken(run, states, *steps):
    """Save and persist a checkpoint for each step; all chunks but the first of the newest are lost."""
    for step in steps:
        run.persist(run.save(states.of(1, step=step), tag=f"t{step}"))
    lose_up_to(run, "object")
    run.forget_local()
    for path in run.folder.store.list(f"{len(steps):08d}-t{steps[-1]}"):
        if "/c/" in path and not path.startswith(f"{len(steps):08d}-t{steps[-1]}/w0/"):
            run.folder.store.write(path, b"damaged")


def test_load_into_newest_lost_in_mid_load_the_older_one_is_whole(rig, states):
    run = rig()
    broken(run, states, 1, 2)
    state = blank(states)
    assert run.recover(into=Into(state)).manifest.tag == "t1"
    assert states.same(state | {"step": 1}, states.of(1, step=1))


@pytest.mark.parametrize("tag", [None, "t2"])
def test_load_into_all_lost_says_that_the_state_is_mixed(rig, states, tag):
    run = rig()
    broken(run, states, 2)
    with pytest.raises(UnrecoverableError) as caught:
        run.recover(into=Into(blank(states)), tag=tag)
    assert "overwritten in part" in caught.value.causes[-1]


@pytest.mark.parametrize("strict", [True, False])
def test_load_into_older_one_would_leave_a_mixture_is_refused(rig, states, strict):
    run = rig()
    small = {key: value for key, value in states.of(1, step=1).items() if key != "w4"}
    run.persist(run.save(small, tag="t1"))
    run.persist(run.save(states.of(1, step=2), tag="t2"))
    lose_up_to(run, "object")
    run.forget_local()
    for path in run.folder.store.list("00000002-t2"):
        if path.startswith("00000002-t2/w1/c/"):
            run.folder.store.write(path, b"damaged")
    with pytest.raises(UnrecoverableError) as caught:
        run.recover(into=Into(blank(states), strict=strict))
    assert "into a state that another one was begun in" in caught.value.causes[1]
    assert "w4" in caught.value.causes[1]
    assert "overwritten in part" in caught.value.causes[-1]


def test_load_into_damaged_slot_is_mended(rig, states):
    run = rig()
    run.save(states.of(1))
    run.slot_of(run.base).data[77] ^= 1
    recovered = run.recover(into=Into(blank(states)))
    assert recovered.report.source.startswith("local+")
    assert states.same(recovered.state, states.of(1))
    assert run.recover().report.source == "local"


@pytest.mark.parametrize("room", [True, False])
def test_load_into_keeps_a_copy_in_a_slot_that_has_the_room(rig, states, room):
    run = rig()
    run.save(states.of(1))
    run.forget_local()
    if not room:
        run.local.remove()
    recovered = run.recover(into=Into(blank(states)), free_slot=0)
    assert recovered.filled == (0 if room else None)
    assert states.same(run.recover().state, states.of(1))
    assert (run.recover().report.source == "local") == room
