"""One slot: what each step leaves, and what damage does."""

from __future__ import annotations

import os
import re
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.errors import (
    ConfigError,
    CorruptDataError,
    LayoutError,
    ShardUnavailableError,
    TierError,
    UnknownFormatError,
)
from fastcheck_dask.tiers import slot
from fastcheck_dask.tiers.local import LocalTier, Slot, SlotState, SlotStatus
from fastcheck_dask.tiers.slot_header import BLOCK_BYTES, HEADER_BYTES, block_offset, encode

MIB = 2**20


def _descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


# --- one save after the other


def test_slot_never_used_is_empty_and_has_no_data(tier):
    for target in tier.slots:
        assert target.status == SlotStatus()
        assert not target.torn
        with pytest.raises(CorruptDataError, match="EMPTY"):
            target.read_manifest()
        with pytest.raises(ShardUnavailableError, match=target.path.name):
            _ = target.data
        with pytest.raises(LayoutError, match="reserve first"):
            target.begin("token", "tag")
        target.clear()
    assert list(tier.path.iterdir()) == []


def test_slot_through_all_states_says_what_it_holds(tier):
    target = tier.slots[0]
    target.reserve(1000)
    assert target.status == SlotStatus(sequence=1, capacity_bytes=2 * MIB)
    target.begin("token", "tag")
    status = target.status
    assert (status.state, status.generation, status.token, status.tag) == (
        SlotState.WRITING,
        None,
        "token",
        "tag",
    )
    target.data[:1000] = 9
    target.complete(b"the draft", 1000)
    status = target.status
    assert (status.state, status.data_bytes, status.sequence) == (SlotState.SNAPSHOT, 1000, 3)
    assert target.read_draft() == b"the draft"
    with pytest.raises(CorruptDataError, match="SNAPSHOT"):
        target.read_manifest()
    target.seal(b"the manifest")
    status = target.status
    assert (status.state, status.generation, status.token) == (SlotState.SEALED, None, "token")
    assert target.read_manifest() == b"the manifest"
    with pytest.raises(CorruptDataError, match="SEALED"):
        target.read_draft()
    target.commit(12)
    status = target.status
    assert (status.state, status.generation, status.tag) == (SlotState.COMMITTED, 12, "tag")
    assert target.read_manifest() == b"the manifest"
    target.begin("next", "later")
    status = target.status
    assert (status.state, status.generation, status.token, status.sequence) == (
        SlotState.WRITING,
        None,
        "next",
        6,
    )
    assert sorted(p.name for p in tier.path.iterdir()) == ["slot0"]
    target.clear()
    assert target.status == SlotStatus(sequence=7, capacity_bytes=2 * MIB)


_STEPS = {
    "begin": lambda target: target.begin("token", "tag"),
    "complete": lambda target: target.complete(b"draft", 5),
    "seal": lambda target: target.seal(b"manifest"),
    "commit": lambda target: target.commit(1),
}


@pytest.mark.parametrize("done", range(5))
@pytest.mark.parametrize("step", range(4))
def test_slot_step_out_of_order_raises_and_changes_nothing(tier, done, step):
    target = tier.slots[0]
    target.reserve(10)
    for name in list(_STEPS)[:done]:
        _STEPS[name](target)
    before, documents = target.status, {p.name: p.read_bytes() for p in tier.path.glob("slot0.*")}
    name = list(_STEPS)[step]
    if step == done % 4:
        _STEPS[name](target)
        assert target.status.sequence == before.sequence + 1
    else:
        with pytest.raises(LayoutError, match=f"from {before.state.name}"):
            _STEPS[name](target)
        assert target.status == before
        assert {p.name: p.read_bytes() for p in tier.path.glob("slot0.*")} == documents


def test_slot_wrong_arguments_raise_and_change_nothing(tier):
    target = tier.slots[0]
    target.reserve(10)
    with pytest.raises(ConfigError, match="token"):
        target.begin("", "tag")
    with pytest.raises(ConfigError, match="tag"):
        target.begin("token", "no/slash")
    with pytest.raises(LayoutError, match="-1"):
        target.reserve(-1)
    assert target.status.state is SlotState.EMPTY
    target.begin("token", "tag")
    for nbytes in (-1, 2 * MIB + 1):
        with pytest.raises(LayoutError, match=str(nbytes)):
            target.complete(b"draft", nbytes)
    with pytest.raises(LayoutError, match="'other'"):
        target.complete(b"draft", 10, token="other")
    assert target.status.state is SlotState.WRITING
    target.complete(b"draft", 10, token="token")
    with pytest.raises(LayoutError, match="'other'"):
        target.seal(b"manifest", token="other")
    assert target.read_draft() == b"draft"
    target.seal(b"manifest", token="token")
    with pytest.raises(LayoutError, match="generation"):
        target.commit(-1)
    with pytest.raises(LayoutError, match="'other'"):
        target.commit(1, token="other")
    assert target.status.state is SlotState.SEALED


def test_slots_hold_two_checkpoints_independently(save_slot, tier):
    save_slot(tier.slots[0], 1, generation=1)
    save_slot(tier.slots[1], 2, generation=2)
    save_slot(tier.slots[0], 3, generation=3)
    assert [s.status.generation for s in tier.slots] == [3, 2]
    assert [s.read_manifest() for s in tier.slots] == [b"manifest 3", b"manifest 2"]
    assert [set(s.data[:MIB].tolist()) for s in tier.slots] == [{3}, {2}]


def test_slot_many_saves_keep_memory_and_descriptors(save_slot, tier):
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    seen = []
    for number in range(30):
        save_slot(tier.slots[number % 2], number, nbytes=16 * MIB, generation=number)
        assert tier.slots[number % 2].read_manifest() == b"manifest %d" % number
        seen.append((resident(), _descriptors()))
    assert seen[29][0] < seen[4][0] * 1.05
    assert seen[29][1] == seen[4][1]


def test_slot_reserved_is_faulted_in_before_the_copy(tier):
    tier.slots[0].reserve(8 * MIB)
    maps = Path("/proc/self/smaps").read_text()
    faulted = re.search(rf"{re.escape(str(tier.slots[0].path))}\n(?:.*\n)*?Rss: +(\d+) kB", maps)
    assert int(faulted[1]) * 1024 >= 8 * MIB


def test_slot_written_and_never_mapped_holds_the_bits(tier):
    target = tier.slots[0]
    target.reserve(MIB, mapped=False)
    target.begin("token", "tag")
    bits = np.arange(MIB, dtype=np.uint32).view(np.uint8)[:MIB]
    target.write(MIB // 2, bits[MIB // 2 :])
    target.write(0, bits[: MIB // 2])
    target.write(7, bits[:0])
    assert str(target.path) not in Path("/proc/self/maps").read_text()
    assert np.array_equal(target.data[:MIB], bits)
    room = target.status.capacity_bytes
    for offset, nbytes in ((-1, 1), (0, room + 1), (room, 1), (room - 5, 6)):
        with pytest.raises(LayoutError, match=f"{nbytes} bytes at {offset}"):
            target.write(offset, np.full(nbytes, 7, np.uint8))
    with pytest.raises(LayoutError, match="read-only"):
        Slot(target.path, readonly=True).write(0, bits)
    assert np.array_equal(target.data[:MIB], bits)
    target.complete(b"draft", MIB)
    tier.slots[1].path.unlink(missing_ok=True)
    with pytest.raises(TierError, match="cannot be written"):
        tier.slots[1].write(0, bits)


def test_slot_closed_gives_its_descriptors_back(save_slot, root):
    before = _descriptors()
    tier = LocalTier("run", root)
    for target in tier.slots:
        save_slot(target, 1)
    assert _descriptors() == before + 2
    view = tier.slots[0].data
    tier.close()
    tier.close()
    assert _descriptors() == before + 1
    assert int(view[0]) == 1
    del view
    assert _descriptors() == before
    assert int(tier.slots[0].data[0]) == 1
    tier.close()
    assert _descriptors() == before


# --- damage


def _overwrite(path: Path, at: int, data: bytes) -> None:
    descriptor = os.open(path, os.O_RDWR)
    try:
        os.pwrite(descriptor, data, at)
    finally:
        os.close(descriptor)


@pytest.mark.parametrize("step", list(_STEPS))
def test_slot_header_write_torn_leaves_the_former_state(tier, step):
    target = tier.slots[0]
    target.reserve(10)
    for name, act in _STEPS.items():
        former, before = target.status, target.path.read_bytes()[:HEADER_BYTES]
        act(target)
        if name == step:
            break
    following = target.status
    at, block = block_offset(following), encode(following)
    for cut in range(0, BLOCK_BYTES + 1, 7):
        torn = before[:at] + block[:cut] + before[at + cut :]
        _overwrite(target.path, 0, torn)
        expected = following if torn[at : at + BLOCK_BYTES] == block else former
        assert target.status == expected, cut
    # And the slot goes on from there.
    _overwrite(target.path, 0, before[:at] + block[:20] + before[at + 20 :])
    target.clear()
    assert target.status.sequence == former.sequence + 1


def test_slot_header_torn_after_begin_never_shows_the_overwritten_checkpoint(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1)
    target.begin("next", "tag")
    target.data[:100] = 2
    _overwrite(target.path, block_offset(target.status), b"\0" * 100)
    assert target.status.state is SlotState.COMMITTED
    with pytest.raises(CorruptDataError, match=r"slot0\.manifest"):
        target.read_manifest()


def test_slot_both_header_blocks_damaged_raises_until_cleared(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1)
    _overwrite(target.path, 0, bytes(HEADER_BYTES))
    for use in (lambda: target.status, lambda: target.torn, target.read_manifest, lambda: target.reserve(10)):
        with pytest.raises(CorruptDataError, match="slot0"):
            use()
    with pytest.raises(CorruptDataError):
        target.begin("token", "tag")
    target.clear()
    assert target.status == SlotStatus()
    assert list(tier.path.iterdir()) == []
    save_slot(target, 2)
    assert target.read_manifest() == b"manifest 2"


def test_slot_truncated_file_raises_instead_of_killing_the_process(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1)
    target.close()
    os.truncate(target.path, MIB)
    with pytest.raises(CorruptDataError, match=f"{MIB:,} bytes"):
        _ = target.data


@pytest.mark.parametrize("damage", ["flipped", "shorter", "longer", "missing"])
@pytest.mark.parametrize("kind", ["draft", "manifest"])
def test_slot_document_damaged_raises(tier, damage, kind):
    target = tier.slots[0]
    target.reserve(10)
    target.begin("token", "tag")
    target.complete(b"document", 10)
    if kind == "manifest":
        target.seal(b"document")
    path = tier.path / f"slot0.{kind}"
    damaged = {"flipped": b"documenu", "shorter": b"documen", "longer": b"document\0"}
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(damaged[damage])
    with pytest.raises(CorruptDataError, match=kind):
        (target.read_draft if kind == "draft" else target.read_manifest)()


def test_slot_of_a_newer_format_raises_unknown_format(tier, monkeypatch):
    target = tier.slots[0]
    monkeypatch.setattr("fastcheck_dask.tiers.slot_header.FORMAT_VERSION", 2)
    target.reserve(10)
    monkeypatch.undo()
    with pytest.raises(UnknownFormatError, match="format 2"):
        _ = target.status


def test_slot_unsealed_snapshot_of_an_earlier_boot_counts_as_torn(save_slot, tier, monkeypatch):
    unsealed, sealed = tier.slots
    save_slot(sealed, 1, generation=None)
    unsealed.reserve(10)
    unsealed.begin("token", "tag")
    unsealed.complete(b"draft", 10)
    monkeypatch.setattr(slot, "_boot_id", lambda: b"another boot  16")
    assert (unsealed.status.state, unsealed.torn) == (SlotState.WRITING, True)
    with pytest.raises(CorruptDataError):
        unsealed.read_draft()
    with pytest.raises(LayoutError, match="WRITING"):
        unsealed.seal(b"manifest")
    assert sealed.read_manifest() == b"manifest 1"
