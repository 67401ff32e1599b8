"""Which checkpoint a load gives, from where, and what it does to the slots."""

from __future__ import annotations

import asyncio
import logging

import numpy as np
import pytest

from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.engine.snapshot import as_base
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    LayoutError,
    TierError,
    TierFullError,
    UnrecoverableError,
)
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import marker_path
from fastcheck_dask.tiers.local import SlotState
from fastcheck_dask.tiers.slot_header import HEADER_BYTES


def save_persisted(run, states, *steps):
    """Save and persist each step; return what was saved."""
    found = []
    for step in steps:
        found.append(run.save(states.of(1, step=step), tag=f"t{step}"))
        run.persist(found[-1])
    return found


def down(run, *names):
    for name in names or ("n0", "n1", "n2", "n3"):
        run.nodes[name].down = True


def break_object(run, saved):
    """Damage one chunk of a checkpoint in the object tier."""
    key = next(iter(saved.manifest.chunks))
    run.folder.store.write(f"{saved.record.generation:08d}-{saved.record.tag}/{key}", b"damaged")


def test_load_never_saved_is_none(rig):
    run = rig()
    assert run.recover() is None
    assert run.recover(folder=False) is None
    with pytest.raises(CheckpointNotFoundError):
        run.recover(tag="t1")


def test_load_from_own_slot_asks_no_node(rig, states):
    run = rig()
    run.save(states.of(1))
    calls = len(run.nodes["n0"].calls)
    recovered = run.recover()
    assert recovered.report.source == "local"
    assert recovered.filled is None
    assert states.same(recovered.state, states.of(1))
    assert len(run.nodes["n0"].calls) == calls


def test_load_state_is_a_copy_of_the_slot(rig, states):
    run = rig()
    run.save(states.of(1))
    recovered = run.recover()
    recovered.state["w1"][:] = 0
    again = run.recover()
    assert again.report.source == "local"
    assert states.same(again.state, states.of(1))


def test_load_damaged_slot_is_mended_in_place(rig, states):
    run = rig()
    run.save(states.of(1))
    run.slot_of(run.base).data[77] ^= 1
    recovered = run.recover()
    assert recovered.report.source == "local+peers"
    assert states.same(recovered.state, states.of(1))
    assert run.recover().report.source == "local"


def test_load_damaged_slot_manifest_comes_from_node(rig, states):
    run = rig()
    run.save(states.of(1))
    path = run.base.slot.with_name(run.base.slot.name + ".manifest")
    path.write_bytes(path.read_bytes()[:-1])
    recovered = run.recover()
    assert recovered.report.source == "local"
    assert states.same(recovered.state, states.of(1))


def test_load_damaged_slot_header_is_no_candidate(rig, states):
    run = rig()
    run.save(states.of(1))
    with run.base.slot.open("r+b") as file:
        file.write(b"\xff" * HEADER_BYTES)
    recovered = run.recover()
    assert recovered.report.source == "peers"
    assert states.same(recovered.state, states.of(1))


# Fallback


def test_load_newest_unrecoverable_falls_back_and_says_why(rig, states, caplog):
    run = rig()
    save_persisted(run, states, 1)
    run.save(states.of(1, step=2), tag="t2")
    run.forget_local()
    down(run, "n0", "n1")
    recovered = run.recover()
    assert recovered.manifest.tag == "t1"
    assert states.same(recovered.state, states.of(1, step=1))
    (why,) = recovered.report.skipped
    assert "generation 2 (t2)" in why
    assert "n0" in why
    assert "skipped generation 2" in caplog.text


def test_load_with_tag_of_unrecoverable_raises_and_does_not_fall_back(rig, states):
    run = rig()
    save_persisted(run, states, 1)
    run.save(states.of(1, step=2), tag="t2")
    run.forget_local()
    down(run)
    with pytest.raises(UnrecoverableError, match="generation 2") as caught:
        run.recover(tag="t2")
    assert "every committed" not in str(caught.value)
    assert run.recover(tag="t1").manifest.generation == 1
    with pytest.raises(CheckpointNotFoundError, match="t2, t1"):
        run.recover(tag="t3")


def test_load_every_checkpoint_unrecoverable_names_all(rig, states):
    run = rig()
    for saved in save_persisted(run, states, 1, 2):
        break_object(run, saved)
    run.forget_local()
    down(run)
    with pytest.raises(UnrecoverableError) as caught:
        run.recover()
    assert [cause.split(":")[0] for cause in caught.value.causes] == [
        "generation 2 (t2)",
        "generation 1 (t1)",
    ]


def test_load_one_damaged_object_of_newest_falls_back(rig, states):
    run = rig()
    first, second = save_persisted(run, states, 1, 2)
    break_object(run, second)
    run.forget_local()
    down(run)
    recovered = run.recover()
    assert recovered.manifest == first.manifest
    assert recovered.report.source == "object"
    assert states.same(recovered.state, states.of(1, step=1))


def test_load_coordinator_lost_its_data_object_tier_knows(rig, states):
    run = rig()
    save_persisted(run, states, 1, 2)
    run.forget_local()
    recovery = Recovery(run.local, run.folder, run.nodes.client)
    recovered = asyncio.run(recovery.load(()))
    assert recovered.manifest.tag == "t2"
    assert recovered.report.source == "object"


def test_load_marker_of_newest_is_damaged_is_said(rig, states):
    run = rig()
    save_persisted(run, states, 1, 2)
    run.forget_local()
    path = ".fastcheck/commits/00000002-t2.json"
    run.folder.store.write(path, run.folder.store.read(path)[:-2])
    run.coordinator._shared.decisions.clear()
    recovered = run.recover()
    assert recovered.manifest.tag == "t1"
    (why,) = recovered.report.skipped
    assert "generation 2 (t2)" in why
    assert "marker" in why


def test_load_markers_gone_and_complete_data_there_refuses(rig, states):
    run = rig()
    save_persisted(run, states, 1)
    run.forget_local()
    run.coordinator._shared.decisions.clear()
    run.folder.store.delete_tree(".fastcheck")
    with pytest.raises(UnrecoverableError, match="00000001-t1"):
        run.recover()


def test_load_leftover_of_failed_attempt_is_not_refused(rig, states):
    run = rig()
    run.folder.store.write("00000001-t1/w0/c/0", b"x")
    run.folder.store.write("00000001-t1/w0/zarr.json", b"{}")
    assert run.recover() is None


def test_load_object_tier_cannot_be_listed_peers_give_it(rig, states, monkeypatch, caplog):
    run = rig()
    run.save(states.of(1))
    run.forget_local()

    def fails(_prefix):
        raise TierError("the folder is not mounted")

    monkeypatch.setattr(run.folder.store, "list", fails)
    recovered = run.recover()
    assert recovered.report.source == "peers"
    assert "not mounted" in caplog.text


@pytest.mark.parametrize("tag", [None, "t9"])
def test_load_object_tier_cannot_be_listed_and_nothing_else_is_no_fresh_start(rig, states, monkeypatch, tag):
    run = rig()
    if tag is not None:
        run.save(states.of(1))

    def fails(_prefix):
        raise TierError("the folder is not mounted")

    monkeypatch.setattr(run.folder.store, "list", fails)
    with pytest.raises(UnrecoverableError, match="not mounted"):
        run.recover(tag=tag)


def test_load_manifest_of_node_is_damaged_next_node_is_asked(rig, states):
    run = rig()
    run.save(states.of(1))
    run.forget_local()
    (held,) = run.nodes["n0"].store._runs["run-1"].generations()
    # Still a manifest, but not the one that was committed.
    other = bytes(held.manifest).replace(b'"created_unix":1.5', b'"created_unix":9.5')
    assert other != bytes(held.manifest)
    held.manifest = np.frombuffer(other, np.uint8)
    recovered = run.recover(folder=False)
    assert recovered.manifest.created_unix == 1.5
    assert states.same(recovered.state, states.of(1))
    assert "manifest" in run.nodes["n1"].calls


def test_load_no_manifest_anywhere_names_all_places(rig, states, caplog):
    run = rig()
    run.save(states.of(1))
    run.forget_local()
    down(run)
    caplog.set_level(logging.DEBUG)
    with pytest.raises(UnrecoverableError) as caught:
        run.recover()
    text = str(caught.value)
    assert all(name in caplog.text for name in ("n0", "n1", "n2", "n3"))
    assert all(name in text for name in ("n0", "n1", "n2", "n3", "no commit marker"))


# Parts


@pytest.mark.parametrize("local", [True, False])
def test_load_part_gives_only_that(rig, states, local):
    run = rig()
    run.save(states.of(1))
    if not local:
        run.forget_local()
    recovered = run.recover(include="w[12]")
    assert recovered.state.keys() == {"w1", "w2"}
    assert all((recovered.state[key] == states.of(1)[key]).all() for key in ("w1", "w2"))
    assert recovered.filled is None
    want = sum(states.of(1)[key].nbytes for key in ("w1", "w2"))
    assert sum(recovered.report.raw_bytes.values()) == want


def test_load_part_that_is_damaged_locally_comes_from_peers(rig, states):
    run = rig()
    run.save(states.of(1))
    offset = run.base.content.placement.offsets["w1"]
    run.slot_of(run.base).data[offset] ^= 1
    recovered = run.recover(include="w1")
    assert (recovered.state["w1"] == states.of(1)["w1"]).all()


def test_load_part_that_matches_nothing_is_refused(rig, states):
    run = rig()
    run.save(states.of(1))
    with pytest.raises(LayoutError):
        run.recover(include="nothing/*")


# The slot that is filled


def test_load_fills_free_slot_so_that_next_save_is_a_delta(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    run.forget_local()
    recovered = run.recover(free_slot=1)
    assert recovered.filled == 1
    status = run.local.slots[1].status
    assert (status.state, status.generation, status.token) == (SlotState.COMMITTED, 1, saved.record.token)
    assert run.recover().report.source == "local"
    run.base = _base_in(run, 1)
    assert run.save(states.of(1, step=1)).stats.deltas > 0


def _base_in(run, number):
    slot = run.local.slots[number]
    return as_base(slot.path, Manifest.from_bytes(slot.read_manifest()))


@pytest.mark.parametrize("options", [{"include": "w1"}, {"tag": "t1"}])
def test_load_part_or_older_fills_nothing(rig, states, options):
    run = rig()
    save_persisted(run, states, 1, 2)
    run.forget_local()
    assert run.recover(free_slot=0, **options).filled is None
    assert run.local.slots[0].status.state is SlotState.EMPTY


def test_load_fails_filled_slot_is_empty_again(rig, states):
    run = rig()
    run.save(states.of(1))
    run.forget_local()
    for name in ("n0", "n1"):
        run.nodes[name].fail("read", TierError("injected"))
    with pytest.raises(UnrecoverableError):
        run.recover(free_slot=0)
    assert run.local.slots[0].status.state is SlotState.EMPTY
    for node in run.nodes:
        node.heal()
    assert states.same(run.recover(free_slot=0).state, states.of(1))


@pytest.mark.parametrize("missing", ["everything", "chunks"])
def test_load_newest_fails_older_one_in_the_free_slot_survives(rig, states, missing):
    run = rig()
    run.save(states.of(1, step=1), tag="t1")
    run.save(states.of(1, step=2), tag="t2")
    # The slot of the newest is lost, the other one still holds the one before; it is nowhere else.
    run.local.slots[1].clear()
    if missing == "everything":
        down(run)
    else:
        for node in run.nodes:
            node.fail("read", TierError("injected"))
    recovered = run.recover(free_slot=0)
    assert recovered.manifest.tag == "t1"
    assert recovered.report.source == "local"
    assert states.same(recovered.state, states.of(1, step=1))
    assert len(recovered.report.skipped) == 1


def test_load_newest_replaces_older_one_in_the_free_slot_when_it_is_there(rig, states):
    run = rig()
    run.save(states.of(1, step=1), tag="t1")
    run.save(states.of(1, step=2), tag="t2")
    run.local.slots[1].clear()
    recovered = run.recover(free_slot=0)
    assert recovered.manifest.tag == "t2"
    assert recovered.filled == 0
    again = run.recover()
    assert again.report.source == "local"
    assert again.manifest.tag == "t2"
    assert states.same(again.state, recovered.state)
    assert states.same(again.state, states.of(1, step=2))


@pytest.mark.parametrize("step", ["reserve", "write", "complete", "seal", "commit"])
@pytest.mark.parametrize("older", [False, True])
def test_load_slot_cannot_be_filled_state_comes_all_the_same(rig, states, monkeypatch, step, older, caplog):
    run = rig()
    run.save(states.of(1, step=1), tag="t1")
    run.save(states.of(1, step=2), tag="t2")
    run.local.slots[1].clear()
    if not older:
        run.local.slots[0].clear()

    def no_room(*_arguments, **_options):
        raise TierFullError("/dev/shm", 2, 1, "make room")

    monkeypatch.setattr(run.local.slots[0], step, no_room)
    recovered = run.recover(free_slot=0)
    assert recovered.manifest.tag == "t2"
    assert recovered.report.skipped == []
    assert recovered.filled is None
    assert states.same(recovered.state, states.of(1, step=2))
    assert run.local.slots[0].status.state is SlotState.EMPTY
    assert "not kept in shared memory" in caplog.text


def test_load_zero_byte_state_comes_back(rig):
    run = rig()
    state = {"empty": np.zeros((0, 5), np.float32), "none": None, "list": []}
    run.save(state)
    run.forget_local()
    recovered = run.recover(free_slot=0)
    assert recovered.state["none"] is None
    assert recovered.state["list"] == []
    assert recovered.state["empty"].shape == (0, 5)
    assert recovered.state["empty"].dtype == np.float32


def test_load_slot_says_other_generation_than_its_manifest_is_not_believed(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    slot = run.slot_of(run.base)
    slot.clear()
    slot.begin(saved.record.token, "t")
    slot.complete(b"{}", 0)
    slot.seal(saved.manifest_bytes)
    slot.commit(9)
    recovered = run.recover()
    assert recovered.manifest.generation == 1
    assert recovered.report.source == "peers"
    assert "generation 9" in recovered.report.skipped[0]


def test_load_tag_whose_marker_is_damaged_says_so(rig, states):
    run = rig(nodes=0)
    run.save_to_objects(states.of(1), "s1")
    run.forget_local()
    run.folder.store.write(marker_path("00000001-s1"), b"{}")
    recovery = Recovery(run.local, run.folder, run.nodes.client)
    with pytest.raises(CorruptDataError, match="checkpoint 's1': its commit marker cannot be read"):
        asyncio.run(recovery.load((), tag="s1"))
    with pytest.raises(CheckpointNotFoundError):
        asyncio.run(recovery.load((), tag="s2"))
