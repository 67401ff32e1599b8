"""Derived arrays: which are found, that the nodes hold none of them, and that every bit comes back."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine import derive as module
from fastcheck_dask.engine import load as load_module
from fastcheck_dask.engine.derive import as_cast, derive, guesses
from fastcheck_dask.engine.save_objects import save_to_objects
from fastcheck_dask.errors import UnrecoverableError
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.testing.encoder import InlineEncoder
from fastcheck_dask.tiers.peer import PeerClient

BF16, F16 = torch.bfloat16, torch.float16


def floats(seed, *shape):
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape).astype(np.float32))


def one_bit_off(tensor, index):
    wrong = tensor.clone()
    wrong.view(-1).view(torch.int16)[index] ^= 1
    return wrong


def mixed(seed, *, derived=True, size=3000):
    """Return weights of half the width, their float32 masters, and what else a state has."""
    master = {"a": floats(seed, size), "b": floats(seed + 1, 3, 2, 1100), "tiny": floats(seed + 2, 100)}
    model = {name: values.to(BF16) for name, values in master.items()}
    if not derived:
        model = {name: one_bit_off(values, -1) for name, values in model.items()}
    moments = {name: floats(seed + 9, *values.shape) for name, values in master.items()}
    return {
        "model": model,
        "opt": {"master": master, "exp_avg": moments, "lr": torch.tensor(0.5)},
        "step": seed,
    }


def bits_of(state):
    flat = flatten(state)
    return [source.contiguous().view(torch.uint8).numpy().tobytes() for source in flat.sources], flat.tree


def same(left, right):
    return bits_of(left) == bits_of(right)


def marked(saved):
    return {spec.path: spec.source for spec in saved.manifest.arrays if spec.source is not None}


def found_in(state):
    flat = flatten(state)
    arrays = {
        spec.path: t.contiguous().view(-1).view(torch.uint8).numpy()
        for spec, t in zip(flat.arrays, flat.sources, strict=True)
    }
    return guesses(flat.arrays, lambda spec: arrays[spec.path])


# ---- what is found


def test_guesses_by_content_whatever_the_names_and_the_order():
    master = [floats(seed, 30, 20) for seed in range(3)]
    state = {
        "z": master[2].to(BF16),
        "y": master,
        "x": [master[0].to(F16), master[1].to(BF16)],
        "n": floats(9, 600),
    }
    assert found_in(state) == {"z": ["y/2"], "x/0": ["y/0"], "x/1": ["y/1"]}


def test_guesses_other_shape_or_dtype_or_value_is_none():
    master = floats(1, 30, 20)
    state = {
        "master": master,
        "flat": master.reshape(-1).to(BF16),
        "turned": master.T.contiguous().to(BF16),
        "double": master.double().to(BF16) + 1,
        "int": master.to(BF16).view(torch.int16),
        "last": one_bit_off(master.to(BF16), -1),
        "first": one_bit_off(master.to(BF16), 0),
    }
    assert found_in(state) == {}


def test_guesses_every_source_that_agrees_in_state_order():
    zeros = torch.zeros(500)
    assert found_in({"w": zeros.to(BF16), "m": zeros.clone(), "v": zeros.clone(), "h": zeros.to(F16)}) == {
        "w": ["m", "v"],
        "h": ["m", "v"],
    }


@given(st.integers(129, 3000), st.data())
def test_guesses_never_miss_a_cast(size, data):
    dtype = data.draw(st.sampled_from([BF16, F16]))
    master = torch.from_numpy(np.random.default_rng(size).normal(size=size).astype(np.float32))
    assert found_in({"m": master, "w": master.to(dtype)}) == {"w": ["m"]}


def test_as_cast_has_the_chunks_of_its_source():
    flat = flatten({"m": floats(1, 500, 7), "w": floats(1, 500, 7).to(BF16)}, chunk_bytes=3000)
    source, narrow = flat.arrays
    made = as_cast(narrow, source)
    assert narrow.chunk_shape != source.chunk_shape
    assert [c.nbytes * 2 for c in made.chunks] == [c.nbytes for c in source.chunks]
    assert sum(c.nbytes for c in made.chunks) == narrow.nbytes


def test_save_marks_only_what_is_derived_and_sends_none_of_it(rig):
    run = rig()
    saved = run.save(mixed(1))
    assert marked(saved) == {"model/a": "opt/master/a", "model/b": "opt/master/b"}
    assert saved.stats.derived_bytes == saved.manifest.derived_bytes == 2 * (3000 + 6600)
    sent = {task.key for job in run.encoder.jobs for task in job.tasks}
    assert sent == set(saved.manifest.digests) - set(saved.manifest.sources)
    assert len(saved.manifest.sources) > 2
    assert same(run.recover().state, mixed(1))


@pytest.mark.parametrize(
    "shape",
    [
        *((), (0,), (0, 5), (1,), (128,), (129,), (1, 1, 130), (1023,), (1024,), (1025,), (2048,), (2049,)),
        *((5, 1024), (2, 1, 1025), (1500, 1, 1)),
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", [BF16, F16], ids=str)
def test_save_of_any_shape_is_derived_where_it_has_chunks_and_exact(rig, shape, dtype):
    run = rig()
    master = floats(1, *shape)
    state = {"m": master, "w": master.to(dtype), "other": floats(2, 2000)}
    saved = run.save(state)
    assert marked(saved) == ({"w": "m"} if master.numel() > 128 else {})
    run.persist(saved, from_host=False)
    group = zarr.open_group(f"{run.folder.store.location}/00000001-t", mode="r")
    assert group["w"][...].tobytes() == state["w"].view(torch.int16).numpy().tobytes()
    run.forget_local()
    run.nodes["n0"].down = True
    assert same(run.recover(folder=False).state, state)


@pytest.mark.parametrize("index", [-1, 0, 1, 1023, 1024, 2047, 2048, 2998])
def test_save_one_bit_off_anywhere_is_not_derived_and_exact(rig, index):
    run = rig()
    state = mixed(1)
    state["model"]["a"] = one_bit_off(state["model"]["a"], index)
    saved = run.save(state)
    assert marked(saved) == {"model/b": "opt/master/b"}
    run.forget_local()
    assert same(run.recover(folder=False).state, state)


def test_save_nan_is_not_derived_and_exact(rig):
    run = rig()
    state = mixed(1)
    state["opt"]["master"]["a"][70] = torch.nan
    state["model"]["a"] = state["opt"]["master"]["a"].to(BF16)
    saved = run.save(state)
    assert "model/a" not in marked(saved)
    run.forget_local()
    assert same(run.recover(folder=False).state, state)


def test_derive_of_several_that_agree_in_the_sample_finds_the_right_one(rig):
    run = rig()
    sparse = [torch.zeros(5000) for _ in range(6)]
    for number, values in enumerate(sparse):
        values[10 + number] = 1.0
    state = {"m": sparse, "found": sparse[3].to(BF16), "beyond": sparse[5].to(BF16)}
    saved = run.save(state)
    # More guesses than four are not verified.
    assert marked(saved) == {"found": "m/3"}
    run.forget_local()
    assert same(run.recover(folder=False).state, state)


def test_derive_gives_up_an_array_at_its_first_wrong_batch(rig, monkeypatch):
    monkeypatch.setattr(module, "JOB_BYTES", 4096)
    asked = []

    class Counting(InlineEncoder):
        async def check(self, checks, current):
            asked.append([check.key for check in checks])
            return await super().check(checks, current)

    run = rig(encoder=Counting(1))
    master = floats(1, 8000)
    run.snapshot({"m": master, "w": one_bit_off(master.to(BF16), 1500)})
    assert asked == [["w/c/0"], ["w/c/1"]]


def test_derive_of_nothing_is_the_same_snapshot(rig):
    run = rig()
    snapshot = run.snapshot({"step": 1, "w": floats(1, 500), "h": floats(2, 500).to(BF16)})
    assert asyncio.run(derive(snapshot, run.encoder)) is snapshot


def test_two_casts_of_one_source_and_one_of_each_dtype(rig):
    run = rig()
    master = floats(1, 3000)
    state = {"m": master, "w": master.to(BF16), "ema": master.to(BF16), "h": master.to(F16)}
    saved = run.save(state)
    assert marked(saved) == {"w": "m", "ema": "m", "h": "m"}
    run.persist(saved, from_host=False)
    run.forget_local()
    assert same(run.recover(folder=False).state, state)


# ---- every tier, with what can be lost


@pytest.mark.parametrize("lost", [(), *((n,) for n in range(4)), (0, 3), tuple(range(4))], ids=str)
def test_load_derived_with_nodes_lost_comes_back_exact(rig, lost):
    run = rig()
    state = mixed(1)
    run.persist(run.save(state), from_host=False)
    run.forget_local()
    for number in lost:
        run.nodes[f"n{number}"].down = True
    found = run.recover()
    assert same(found.state, state)
    # Whatever gave the sources: the casts are made of them, and not read.
    assert found.report.raw_bytes["derived"] == found.manifest.derived_bytes
    sources = {"peers", "derived"} if not lost or lost == (3,) else None
    assert sources is None or set(found.report.raw_bytes) == sources


@pytest.mark.parametrize("lost", [(), (0,), (1,), (2,), tuple(range(4))], ids=str)
@pytest.mark.parametrize("batch", [4096, 2**26])
def test_load_only_the_derived_comes_back_exact(rig, lost, batch, monkeypatch):
    monkeypatch.setattr(load_module, "_SOURCE_BYTES", batch)
    run = rig()
    state = mixed(1)
    run.persist(run.save(state), from_host=False)
    run.forget_local()
    for number in lost:
        run.nodes[f"n{number}"].down = True
    found = run.recover(include="model/*")
    assert same(found.state, {"model": state["model"]})
    if len(lost) == 4:
        # The object tier has the chunks themselves, of half the bytes.
        assert set(found.report.raw_bytes) == {"object"}
    else:
        assert found.report.raw_bytes["derived"] == found.manifest.derived_bytes


def test_load_only_the_derived_without_object_tier_and_two_nodes_lost_raises(rig):
    run = rig()
    run.save(mixed(1))
    run.forget_local()
    run.nodes["n0"].down = run.nodes["n1"].down = True
    with pytest.raises(UnrecoverableError, match=r"first model/.*n0: is down.*n1: is down"):
        run.recover(folder=False, include="model/*")


def test_load_derived_source_lost_with_nodes_comes_from_objects_chunk_by_chunk(rig):
    run = rig()
    state = mixed(1)
    saved = run.save(state)
    run.persist(saved)
    run.forget_local()
    # One chunk of the source twice gone: with its stripe's parity.
    key = "opt/master/a/c/1"
    stripe, shard = saved.manifest.layout.position[key]
    for number, lost in ((shard, key), (3, stripe.parity_key)):
        run.nodes[f"n{number}"].store.quarantine("run-1", 1, saved.record.token, [lost])
    found = run.recover()
    assert same(found.state, state)
    assert found.report.raw_bytes["object"] == saved.manifest.sizes[key]


@pytest.mark.parametrize("which", ["model/a", "opt/master/a"])
def test_load_damaged_in_the_slot_is_made_again(rig, which):
    run = rig()
    state = mixed(1)
    saved = run.save(state)
    slot = run.slot_of(run.base)
    slot.data[run.base.content.placement.offsets[which] + 100] ^= 1
    found = run.recover(folder=False)
    assert same(found.state, state)
    other = "derived" if which == "model/a" else "peers"
    assert set(found.report.raw_bytes) == {"local", other}
    assert saved.manifest.chunks[f"{which}/c/0"].nbytes == found.report.raw_bytes[other]


def test_load_source_damaged_on_a_node_is_repaired_by_a_load_of_the_derived_alone(rig):
    run = rig()
    saved = run.save(mixed(1))
    run.forget_local()
    key = "opt/master/a/c/0"
    node = run.nodes[f"n{saved.manifest.layout.position[key][1]}"]
    node.store.quarantine("run-1", 1, saved.record.token, [key])
    assert same(run.recover(folder=False, include="model/*").state, {"model": mixed(1)["model"]})
    assert node.store.read("run-1", 1, saved.record.token, keys=[key]).missing == []


def test_load_never_returns_a_cast_with_another_digest(rig):
    run = rig()
    saved = run.save(mixed(1))
    wrong = {**saved.manifest.digests, "model/a/c/0": "0" * 32}
    loader = run.loader(replace(saved, manifest=replace(saved.manifest, digests=wrong)), {})
    with pytest.raises(UnrecoverableError, match=r"first model/a/c/0.*gives other bits"):
        asyncio.run(loader.load(saved.manifest.chunks))


def test_load_fills_the_slot_and_the_next_save_is_a_delta(rig):
    run = rig()
    run.save(mixed(1))
    run.forget_local()
    found = run.recover(folder=False, free_slot=0)
    assert found.filled == 0
    again = run.recover(folder=False)
    assert again.report.source == "local"
    assert same(again.state, mixed(1))


#: What the derived arrays of each kind of state are.
KINDS = {
    "derived": {"model/a", "model/b"},
    "longer": {"model/a", "model/b"},
    "near": set(),
    "no master": {"model/b"},
    "swapped": {"opt/master/a", "opt/master/b"},
}


def of_kind(kind, step):
    state = mixed(step, derived=kind != "near", size=4200 if kind == "longer" else 3000)
    if kind == "no master":
        del state["opt"]["master"]["a"]
    if kind == "swapped":
        state["model"], state["opt"]["master"] = state["opt"]["master"], state["model"]
    return state


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.sampled_from(sorted(KINDS)), min_size=2, max_size=6))
def test_flag_flips_in_any_order_with_deltas_and_any_node_lost_exact(rig, kinds):
    run = rig()
    for step, kind in enumerate(kinds):
        saved = run.save(of_kind(kind, step // 2))
        assert marked(saved).keys() == KINDS[kind]
        slot, offsets = run.slot_of(run.base).data, run.base.content.placement.offsets
        for lost in range(4):
            run.nodes[f"n{lost}"].down = True
            memory = {}
            asyncio.run(run.loader(saved, memory).load(saved.manifest.chunks))
            for key, chunk in saved.manifest.chunks.items():
                start = offsets[chunk.path] + chunk.offset
                assert memory[key].tobytes() == slot[start : start + chunk.nbytes].tobytes()
            run.nodes[f"n{lost}"].heal()
    run.close()


def test_unchanged_state_goes_as_deltas_and_what_the_nodes_never_had_goes_whole(rig):
    run = rig()
    run.save(mixed(1))
    second = run.save(mixed(1))
    assert second.stats.deltas == second.stats.chunks
    before = len(run.encoder.jobs)
    off = run.save(mixed(1, derived=False))
    bases = {task.key: task.base for job in run.encoder.jobs[before:] for task in job.tasks}
    # Though the slot of the base has them.
    assert all(bases[key] is None for key in off.manifest.chunks if key.startswith("model/"))
    assert all(bases[key] is not None for key in off.manifest.chunks if key.startswith("opt/"))


# ---- the object tier


def test_persist_nodes_write_derived_chunks_and_stock_zarr_reads_them(rig):
    run = rig()
    state = mixed(1)
    saved = run.save(state)
    moved = run.persist(saved, from_host=False)
    assert moved.by_host_bytes == 0
    group = zarr.open_group(f"{run.folder.store.location}/00000001-t", mode="r")
    assert group["model/a"][:].tobytes() == state["model"]["a"].view(torch.int16).numpy().tobytes()
    assert group["model/b"][:].tobytes() == state["model"]["b"].view(torch.int16).numpy().tobytes()
    assert group["model/a"].chunks == group["opt/master/a"].chunks


def test_persist_nodes_that_know_no_derived_chunks_host_writes_them(rig, monkeypatch):
    run = rig()
    saved = run.save(mixed(1))
    persist = PeerClient.persist
    # What a node does that ignores the field.
    monkeypatch.setattr(PeerClient, "persist", lambda self, *, derived, **rest: persist(self, **rest))
    assert run.persist(saved).by_host_bytes > 0
    run.forget_local()
    for node in run.nodes:
        node.down = True
    assert same(run.recover(include="model/*").state, {"model": mixed(1)["model"]})


@pytest.mark.parametrize("lost", range(3))
@pytest.mark.parametrize("from_host", [True, False])
def test_persist_node_lost_what_it_would_have_written_comes_from_the_slot_or_parity(rig, lost, from_host):
    run = rig()
    saved = run.save(mixed(1))
    run.nodes[f"n{lost}"].down = True
    assert run.persist(saved, from_host=from_host).by_host_bytes > 0
    run.forget_local()
    for node in run.nodes:
        node.down = True
    assert same(run.recover().state, mixed(1))
    assert same(run.recover(include="model/*").state, {"model": mixed(1)["model"]})


def test_save_without_nodes_writes_derived_chunks_as_they_are(rig):
    run = rig(nodes=0)
    snapshot = run.snapshot(mixed(1))
    seal = run.slot_of(snapshot).seal
    saved = asyncio.run(
        save_to_objects("run-1", snapshot, generation=1, persister=run.persister, seal=seal, degraded=None)
    )
    assert saved.stats.derived_bytes == 0
    run.coordinator.commit(saved.record, run.claim)
    run.forget_local()
    assert same(run.recover().state, mixed(1))
    assert same(run.recover(include="model/*").state, {"model": mixed(1)["model"]})


# ---- tied tensors


def test_tied_tensors_are_one_array_in_every_tier(rig):
    run = rig()
    weight = floats(1, 50, 60)
    state = {"emb": weight, "head": weight, "half": [weight.to(BF16)] * 2}
    saved = run.save(state)
    assert [spec.path for spec in saved.manifest.arrays] == ["emb", "half/0"]
    run.persist(saved, from_host=False)
    for lost in itertools.chain([None], range(4)):
        if lost is not None:
            run.forget_local()
            run.nodes[f"n{lost}"].down = True
        found = run.recover().state
        assert found["emb"] is found["head"]
        assert found["half"][0] is found["half"][1]
        assert same(found, state)
