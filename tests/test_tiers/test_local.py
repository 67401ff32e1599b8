"""The local tier: room, and the lack of it; whose folders and files are; what is left behind."""

from __future__ import annotations

import itertools
import os
import stat
from pathlib import Path

import pytest

from fastcheck_dask.errors import ConfigError, LayoutError, TierError, TierFullError
from fastcheck_dask.tiers import local, slot, slot_files
from fastcheck_dask.tiers.local import LocalTier, Slot, SlotState, SlotStatus
from fastcheck_dask.tiers.slot_header import HEADER_BYTES

MIB = 2**20
#: Files that a slot makes beside its own.
_LEFT = ("new", "draft", "draft.new", "manifest.new")


@pytest.fixture
def small_root(tmp_path, request, small_file_system):
    """Yield a file system of that many MiB."""
    with small_file_system(tmp_path / "small", request.param * MIB) as folder:
        yield folder


# --- room


def test_slot_with_room_keeps_its_file_and_content(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1)
    before = target.path.stat().st_ino, target.status
    for capacity in (0, MIB, 2 * MIB):
        target.reserve(capacity)
    assert (target.path.stat().st_ino, target.status) == before
    assert len(target.data) == 2 * MIB
    assert target.path.stat().st_blocks * 512 >= 2 * MIB + HEADER_BYTES


def test_slot_too_small_is_made_anew_and_readers_can_tell(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1)
    sequence = target.status.sequence
    reader = Slot.open(target.path, readonly=True)
    old = reader.data
    assert not reader.replaced
    target.reserve(2 * MIB + 1)
    assert target.status.state is SlotState.EMPTY
    assert target.status.capacity_bytes == len(target.data) == 4 * MIB
    assert target.status.sequence > sequence
    assert stat.S_IMODE(target.path.stat().st_mode) == 0o600
    assert reader.replaced
    # Given back, however long it stays mapped.
    assert (len(old), int(old[0])) == (2 * MIB, 0)
    target.begin("token", "tag")
    target.data[:] = 3
    assert (len(reader.data), int(reader.data[0])) == (4 * MIB, 3)
    assert not reader.replaced
    assert int(old[0]) == 0
    reader.close()


def test_slot_in_use_is_not_made_anew(save_slot, tier):
    target = tier.slots[0]
    save_slot(target, 1, generation=None)
    with pytest.raises(LayoutError, match="SEALED"):
        target.reserve(4 * MIB)
    assert target.read_manifest() == b"manifest 1"


def test_slot_replaced_under_a_copy_cannot_be_completed(tier):
    target, other = tier.slots[0], Slot(tier.slots[0].path)
    target.reserve(10)
    assert len(target.data) == 2 * MIB
    other.reserve(3 * MIB)
    other.begin("token", "tag")
    with pytest.raises(LayoutError, match="replaced"):
        target.complete(b"draft", 10)
    other.close()


@pytest.mark.parametrize("small_root", [4], indirect=True)
def test_tier_too_small_raises_with_both_numbers_and_leaves_nothing(save_slot, small_root):
    with LocalTier("run", small_root) as tier:
        with pytest.raises(TierFullError) as caught:
            tier.slots[0].reserve(8 * MIB)
        error = caught.value
        assert (error.wanted_bytes, error.where) == (8 * MIB + HEADER_BYTES, str(tier.path))
        assert 3 * MIB < error.free_bytes <= 4 * MIB
        assert "local_dir=" in str(error)
        assert "remount,size=" in str(error)
        assert f"{error.free_bytes:,}" in str(error)
        assert list(tier.path.iterdir()) == []
        save_slot(tier.slots[0], 1)
        for target, capacity in ((tier.slots[1], MIB), (tier.slots[0], 4 * MIB)):
            with pytest.raises(TierFullError):
                target.reserve(capacity)
        assert tier.slots[0].read_manifest() == b"manifest 1"
        assert tier.slots[1].status == SlotStatus()
        assert sorted(p.name for p in tier.path.iterdir()) == ["slot0", "slot0.manifest"]


@pytest.mark.parametrize("small_root", [4], indirect=True)
def test_tier_filled_by_others_in_the_meantime_raises_and_leaves_nothing(small_root, monkeypatch):
    with LocalTier("run", small_root) as tier:
        monkeypatch.setattr(slot, "free_bytes", lambda folder: 2**40)
        monkeypatch.setattr(slot_files, "check_room", lambda *arguments: None)
        with pytest.raises(TierFullError, match=f"{8 * MIB + HEADER_BYTES:,} bytes are needed"):
            tier.slots[0].reserve(8 * MIB)
        assert list(tier.path.iterdir()) == []
        tier.slots[0].reserve(MIB)
        tier.slots[0].begin("token", "tag")
        with pytest.raises(TierFullError, match=f"{3 * MIB:,} bytes are needed"):
            tier.slots[0].complete(bytes(3 * MIB), 10)
        assert [p.name for p in tier.path.iterdir()] == ["slot0"]


@pytest.mark.parametrize("small_root", [4], indirect=True)
def test_slot_without_room_for_a_document_stays_as_it_was(small_root):
    with LocalTier("run", small_root) as tier:
        target = tier.slots[0]
        target.reserve(MIB)
        target.begin("token", "tag")
        with pytest.raises(TierFullError):
            target.complete(bytes(3 * MIB), 10)
        assert target.status.state is SlotState.WRITING
        target.complete(b"draft", 10)
        with pytest.raises(TierFullError):
            target.seal(bytes(3 * MIB))
        assert target.read_draft() == b"draft"
        assert sorted(p.name for p in tier.path.iterdir()) == ["slot0", "slot0.draft"]


@pytest.mark.parametrize("small_root", [8], indirect=True)
def test_slot_grows_where_old_and_new_do_not_fit_together(save_slot, small_root):
    with LocalTier("run", small_root) as tier:
        target = tier.slots[0]
        save_slot(target, 1, nbytes=4 * MIB)
        target.reserve(6 * MIB)
        assert len(target.data) == 6 * MIB
        assert target.status.state is SlotState.EMPTY


@pytest.mark.parametrize("small_root", [8], indirect=True)
def test_slot_grows_though_others_map_the_old_memory(save_slot, small_root):
    with LocalTier("run", small_root) as tier:
        target = tier.slots[0]
        save_slot(target, 1, nbytes=4 * MIB)
        with Slot.open(target.path, readonly=True) as reader:
            assert int(reader.data[0]) == 1
            target.reserve(6 * MIB)
            assert len(target.data) == 6 * MIB
            assert reader.replaced


@pytest.mark.parametrize("small_root", [8], indirect=True)
def test_slot_grows_while_old_memory_is_not_given_back_raises_and_works_later(
    save_slot, small_root, monkeypatch
):
    monkeypatch.setattr(slot, "give_back", lambda descriptor: None)
    with LocalTier("run", small_root) as tier:
        target = tier.slots[0]
        save_slot(target, 1, nbytes=4 * MIB)
        with Slot.open(target.path, readonly=True) as reader:
            with pytest.raises(TierFullError):
                target.reserve(6 * MIB)
            assert reader.replaced
            assert target.status == SlotStatus()
            assert list(tier.path.iterdir()) == []
        target.reserve(6 * MIB)
        assert len(target.data) == 6 * MIB


# --- whose it is


def test_tier_given_root_holds_the_run_in_a_private_folder(tier, root):
    assert tier.path == root / "run"
    assert stat.S_IMODE(tier.path.stat().st_mode) == 0o700
    with pytest.raises(ConfigError, match="run"):
        LocalTier("../run", root)


@pytest.fixture
def shared_memory(tmp_path, monkeypatch):
    folder = tmp_path / "shm"
    folder.mkdir()
    monkeypatch.setattr(local, "SHARED_MEMORY", folder)
    return folder


def test_tier_default_root_is_private(shared_memory):
    assert Path("/dev/shm") not in shared_memory.parents
    tier = LocalTier("run")
    assert tier.path == shared_memory / f"fastcheck-{os.geteuid()}" / "run"
    assert stat.S_IMODE(tier.path.parent.stat().st_mode) == 0o700
    tier.remove()
    assert list(shared_memory.iterdir()) == []


@pytest.mark.parametrize("readonly", [False, True])
@pytest.mark.parametrize("level", ["root", "run"])
@pytest.mark.parametrize("attack", ["symlink", "open", "file", "owner"])
def test_tier_folder_that_may_be_anothers_is_refused(shared_memory, tmp_path, attack, level, readonly):
    root = shared_memory / f"fastcheck-{os.geteuid()}"
    folder = root if level == "root" else root / "run"
    folder.parent.mkdir(mode=0o700, exist_ok=True)
    victim = tmp_path / "victim"
    victim.mkdir(mode=0o700)
    if attack == "symlink":
        folder.symlink_to(victim)
    elif attack == "file":
        folder.touch(mode=0o600)
    else:
        folder.mkdir(mode=0o700)
    if attack == "open":
        folder.chmod(0o770)
    elif attack == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(folder, 12345, 12345)
    with pytest.raises(ConfigError, match=str(folder)):
        LocalTier("run", readonly=readonly)
    assert list(victim.iterdir()) == []


def test_tier_without_shared_memory_advises_a_folder(shared_memory):
    shared_memory.rmdir()
    with pytest.raises(ConfigError, match="local_dir="):
        LocalTier("run")


def test_tier_root_that_is_a_file_raises(tmp_path):
    (tmp_path / "root").touch()
    for readonly in (False, True):
        with pytest.raises(ConfigError, match="local_dir="):
            LocalTier("run", tmp_path / "root", readonly=readonly)


@pytest.mark.parametrize(
    "name", ["slot0", "slot0.new", "slot0.draft", "slot0.draft.new", "slot0.manifest.new"]
)
def test_slot_symbolic_link_in_a_files_place_never_reaches_its_target(save_slot, tier, tmp_path, name):
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    (tier.path / name).symlink_to(victim)
    if name == "slot0":
        for use in (lambda: tier.slots[0].status, lambda: tier.slots[0].reserve(10), tier.slots[0].clear):
            with pytest.raises(ConfigError, match="slot0"):
                use()
    else:
        save_slot(tier.slots[0], 1)
        assert tier.slots[0].read_manifest() == b"manifest 1"
    assert victim.read_bytes() == b"mine"


def test_slot_document_that_is_a_symbolic_link_is_not_read(save_slot, tier, tmp_path):
    save_slot(tier.slots[0], 1)
    (tmp_path / "victim").write_bytes(b"manifest 1")
    (tier.path / "slot0.manifest").unlink()
    (tier.path / "slot0.manifest").symlink_to(tmp_path / "victim")
    with pytest.raises(ConfigError, match="manifest"):
        tier.slots[0].read_manifest()


# --- reading and removing


def test_tier_readonly_makes_nothing_and_refuses_changes(save_slot, root, tier):
    save_slot(tier.slots[0], 1)
    with LocalTier("run", root, readonly=True) as reader:
        target = reader.slots[0]
        assert target.read_manifest() == b"manifest 1"
        with pytest.raises(ValueError, match="read-only"):
            target.data[0] = 2
        for use in (target.clear, lambda: target.reserve(1), lambda: target.begin("t", "t"), reader.remove):
            with pytest.raises(LayoutError, match="read-only"):
                use()
        assert int(target.data[0]) == 1
    LocalTier("other", root / "deeper", readonly=True)
    assert sorted(p.name for p in root.iterdir()) == ["run"]


def test_tier_removed_leaves_nothing(save_slot, root):
    tiers = [LocalTier(name, root) for name in ("a", "b")]
    for tier, target in itertools.product(tiers, range(2)):
        save_slot(tier.slots[target], 1)
    (tiers[0].path / "lock").touch()
    view = tiers[0].slots[0].data
    tiers[0].remove()
    tiers[0].remove()
    assert [p.name for p in root.iterdir()] == ["b"]
    assert int(view[0]) == 1
    assert tiers[0].slots[0].status == SlotStatus()
    with pytest.raises(TierError):
        tiers[0].slots[0].reserve(10)
    assert tiers[1].slots[1].read_manifest() == b"manifest 1"
    tiers[1].remove()
    assert not root.exists()


def test_tier_root_removed_by_another_run_meanwhile_is_made_again(root, monkeypatch):
    private_folder, calls = local._private_folder, []

    def after_a_removal(path, *, make):
        calls.append(path)
        if len(calls) == 1:
            root.rmdir()
        private_folder(path, make=make)

    monkeypatch.setattr(local, "_private_folder", after_a_removal)
    assert LocalTier("run", root).path.is_dir()
    assert len(calls) == 2
