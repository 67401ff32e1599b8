from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.agent.slots import SlotUse
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.local import LocalTier, SlotState

SPEC = ArraySpec("w", "float32", (8,), (8,))


@pytest.fixture
def local(tmp_path: Path) -> Iterator[LocalTier]:
    with LocalTier("run", tmp_path) as tier:
        yield tier


@pytest.fixture
def freed() -> list[int]:
    return []


@pytest.fixture
def slots(local: LocalTier, freed: list[int]) -> SlotUse:
    return SlotUse(local, freed.append)


def record(token: str, generation: int = 1) -> CommitRecord:
    return CommitRecord("run", generation, "t", token, "0" * 64, (), (), 0, False, 32, 1.0)


def fill(local: LocalTier, number: int, token: str, state: SlotState, generation: int = 1) -> None:
    slot = local.slots[number]
    slot.reserve(32)
    slot.begin(token, "t")
    slot.data[:32] = 1
    if state == SlotState.WRITING:
        return
    tree = {"kind": "none"}
    slot.complete(describe(token=token, tag="t", created_unix=1.0, tree=tree, arrays=(SPEC,)), 32)
    if state == SlotState.SNAPSHOT:
        return
    manifest = Manifest(
        run="run",
        generation=generation,
        tag="t",
        token=token,
        created_unix=1.0,
        tree=tree,
        arrays=(SPEC,),
        digests={key.key: "0" * 32 for key in SPEC.chunks},
        layout=None,
        nodes=(),
    )
    slot.seal(manifest.to_bytes())
    if state == SlotState.COMMITTED:
        slot.commit(generation)


def test_slot_with_two_uses_is_free_after_both(slots: SlotUse, freed: list[int]) -> None:
    assert slots.free == [0, 1]
    slots.hold(0, "snapshot")
    slots.hold(0, "persist")
    assert slots.free == [1]
    slots.release(0, "snapshot")
    assert freed == []
    slots.release(0, "persist")
    assert freed == [0]
    slots.release(0, "persist")
    assert freed == [0], "told once"
    assert slots.free == [0, 1]


def test_rebase_gives_the_former_base_back(slots: SlotUse, freed: list[int]) -> None:
    slots.rebase(0, None)
    slots.rebase(1, None)
    assert (slots.base_number, freed) == (1, [0])
    slots.rebase(1, None)
    assert (slots.base_number, freed) == (1, [0])
    slots.rebase(None, None)
    assert (slots.base_number, freed) == (None, [0, 1])


def test_recognise_sealed_and_committed_by_the_coordinator_is_adopted(
    slots: SlotUse, local: LocalTier
) -> None:
    fill(local, 0, "aa", SlotState.SEALED)
    fill(local, 1, "bb", SlotState.SEALED)
    slots.recognise({"aa": record("aa")})
    assert local.slots[0].status.state is SlotState.COMMITTED
    assert local.slots[1].status.state is SlotState.SEALED
    assert not slots.adopt(1, record("bb"))
    assert slots.adopt(0, record("aa"))
    assert slots.base is not None
    assert slots.base.manifest.token == "aa"
    assert slots.free == [1]


def test_adopt_other_token_or_damaged_manifest_refused(slots: SlotUse, local: LocalTier) -> None:
    fill(local, 0, "aa", SlotState.COMMITTED)
    assert not slots.adopt(0, record("zz"))
    manifest = local.path / "slot0.manifest"
    manifest.write_bytes(manifest.read_bytes()[:-1] + b"?")
    assert not slots.adopt(0, record("aa"))
    assert slots.free == [0, 1]


@pytest.mark.parametrize("state", [SlotState.WRITING, SlotState.SNAPSHOT, SlotState.SEALED])
def test_drop_unfinished_leaves_committed_and_the_one_at_work(
    slots: SlotUse, local: LocalTier, state: SlotState
) -> None:
    fill(local, 0, "aa", state)
    fill(local, 1, "bb", SlotState.COMMITTED)
    slots.drop_unfinished(keep=0)
    assert local.slots[0].status.state is state
    slots.drop_unfinished(keep=None)
    assert local.slots[0].status.state is SlotState.EMPTY
    assert local.slots[1].status.state is SlotState.COMMITTED


def test_orphans_are_complete_snapshots_that_nobody_saves(slots: SlotUse, local: LocalTier) -> None:
    fill(local, 0, "aa", SlotState.SNAPSHOT)
    fill(local, 1, "bb", SlotState.WRITING)
    assert slots.orphans() == [0]
    slots.hold(0, "snapshot")
    assert slots.orphans() == []


def test_status_damaged_slot_is_emptied(slots: SlotUse, local: LocalTier) -> None:
    fill(local, 0, "aa", SlotState.COMMITTED)
    local.slots[0].close()
    with (local.path / "slot0").open("r+b") as file:
        file.write(np.zeros(8192, np.uint8).tobytes())
    assert slots.status(0).state is SlotState.EMPTY
