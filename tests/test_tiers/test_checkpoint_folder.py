"""Whole checkpoints in a folder: all or nothing whatever dies, and readable by stock zarr."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CorruptDataError,
    ShardUnavailableError,
    TierError,
    TierFullError,
)
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.layout.state import inline_arrays, unflatten
from fastcheck_dask.testing.saved_state import SavedState
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker
from fastcheck_dask.tiers.folder_store import FolderStore

torch = pytest.importorskip("torch")

READER = """
import json, sys
import numpy as np, zarr
group = zarr.open_group(sys.argv[1], mode="r")
print(json.dumps({path: np.asarray(node[...]).tobytes().hex()
                  for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)}))
"""


def make_state(seed: int = 0):
    torch.manual_seed(seed)
    return {
        "model": {
            "layers.0.weight": torch.randn(13, 17),
            "layers.0.bias": torch.randn(3),
            "half": torch.randn(300).to(torch.bfloat16),
            "mask": torch.rand(700) > 0.5,
        },
        "optimizer": {"state": {0: {"step": torch.tensor(3.0), "exp_avg": torch.randn(13, 17)}}},
        "empty": torch.zeros(0, 3),
        "step": seed,
    }


def where(folder: CheckpointFolder) -> Path:
    return Path(folder.store.location)


def snapshot(path: Path) -> dict[str, bytes]:
    return {str(p.relative_to(path)): p.read_bytes() for p in path.rglob("*") if p.is_file()}


def test_persist_then_read_gives_every_bit_and_value(folder):
    saved = SavedState(make_state(), generation=12, tag="epoch3_step1200")
    marker = saved.persist(folder)
    assert folder.committed() == [marker]
    assert marker == CommitMarker(
        "run", 12, "epoch3_step1200", "author", digest_of_manifest(saved.manifest.to_bytes()),
        saved.manifest.raw_bytes, 1.5,
    )  # fmt: skip
    saved.assert_complete(folder, marker)
    manifest = folder.load_manifest(marker)
    back = unflatten(manifest.tree, lambda spec: saved.bits[spec.path], arrays=manifest.arrays)
    assert back["step"] == 0
    assert torch.equal(back["model"]["layers.0.bias"], saved.state["model"]["layers.0.bias"])


def test_persisted_checkpoint_stock_zarr_reads_every_named_tensor(folder):
    saved = SavedState(make_state())
    saved.persist(folder)
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, str(where(folder) / saved.directory)],
        capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    wanted = {path: bits.tobytes().hex() for path, bits in saved.bits.items()}
    wanted |= {path: bits.hex() for path, _, _, bits in inline_arrays(saved.manifest.tree)}
    assert found == wanted
    assert {"model/layers.0.bias", "optimizer/state/0/step", "empty"} <= found.keys()


class CrashingStore:
    """A store whose k-th call fails, before or after its work; later calls fail too: it is dead."""

    def __init__(self, store, k: int, *, after: bool):
        self._store, self._left, self._after = store, k, after
        self.location = store.location
        self.crashed = False

    def write_all(self, files):
        for path, data in files:
            self.write(path, data)

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*arguments):
            if self.crashed:
                raise TierError("dead")
            self._left -= 1
            if self._left:
                return method(*arguments)
            self.crashed = True
            if self._after:
                method(*arguments)
            raise TierError(f"crash at {name}")

        return call


@pytest.mark.parametrize("after", [False, True])
def test_crash_at_every_store_call_is_invisible_or_complete_and_retry_succeeds(tmp_path, after):
    # Few arrays: each crash point is a whole persist with its fsyncs.
    state = {"w": torch.arange(100, dtype=torch.float32), "b": torch.arange(3), "n": torch.tensor(1)}
    old, new = SavedState(make_state(), generation=1, tag="old"), SavedState(state, generation=2, tag="new")
    store = FolderStore(str(tmp_path))
    folder = CheckpointFolder(store)
    old_marker = old.persist(folder)
    before = snapshot(tmp_path)
    visible, k = [], 0
    while True:
        k += 1
        crashing = CrashingStore(store, k, after=after)
        try:
            new.persist(CheckpointFolder(crashing))
        except TierError:
            assert crashing.crashed
        committed = folder.committed()
        assert committed[0] == old_marker
        assert {path: data for path, data in snapshot(tmp_path).items() if path in before} == before
        visible.append(len(committed) == 2)
        if visible[-1]:
            new.assert_complete(folder, committed[1])
        marker = new.persist(folder)
        new.assert_complete(folder, marker)
        assert folder.committed() == [old_marker, marker]
        folder.remove(new.directory)
        assert snapshot(tmp_path) == before
        if not crashing.crashed:
            break
    assert k > 20
    assert visible[-1]
    # Once visible, always visible: nothing comes after the marker but what an author reads back.
    assert visible == sorted(visible)
    assert sum(visible) <= 2


@pytest.mark.timeout(300)
def test_process_killed_at_every_system_call_is_invisible_or_complete(tmp_path):
    new = SavedState({"w": torch.arange(100, dtype=torch.float32)}, generation=2, tag="new")
    folder = CheckpointFolder(FolderStore(str(tmp_path)))
    k, killed, seen_committed = 0, True, []
    while killed:
        k += 1
        child = os.fork()
        if not child:
            try:
                _die_at_call(k)
                new.persist(folder)
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        killed = os.WIFSIGNALED(status)
        assert killed or os.WEXITSTATUS(status) == 0
        committed = folder.committed()
        seen_committed.append(bool(committed))
        if committed:
            new.assert_complete(folder, committed[0])
        elif (tmp_path / new.directory / "zarr.json").exists():
            # The root document came last: whatever it names is there.
            for key in new.payloads:
                assert folder.read_chunk(new.directory, key).size
        if k % 8 == 0 or committed:
            new.assert_complete(folder, new.persist(folder))
            folder.remove(new.directory)
    assert k > 20
    assert seen_committed[-1]


def _die_at_call(k: int) -> None:
    left = [k]

    def dying(call):
        def wrapped(*arguments, **keywords):
            left[0] -= 1
            if not left[0]:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*arguments, **keywords)

        return wrapped

    for name in ("write", "fsync", "replace", "link", "unlink"):
        setattr(os, name, dying(getattr(os, name)))


def test_disk_full_nothing_becomes_visible_and_old_checkpoint_stays(tmp_path, small_file_system):
    with small_file_system(tmp_path / "disk", 2**20) as disk:
        folder = CheckpointFolder(FolderStore(str(disk)))
        old = SavedState({"w": torch.randn(1000)}, generation=1, tag="old")
        old_marker = old.persist(folder)
        big = SavedState({"w": torch.randint(0, 2**62, (200_000,))}, generation=2, tag="big")
        with pytest.raises(TierFullError) as caught:
            big.persist(folder)
        assert caught.value.wanted_bytes > 0
        assert folder.committed() == [old_marker]
        assert not (disk / big.directory / "zarr.json").exists()
        old.assert_complete(folder, old_marker)
        folder.clear_uncommitted(big.directory)
        small = SavedState({"w": torch.randn(1000)}, generation=2, tag="small")
        small_marker = small.persist(folder)
        assert folder.committed() == [old_marker, small_marker]


def test_publish_again_by_the_same_author_is_idempotent(folder):
    saved = SavedState(make_state())
    marker = saved.persist(folder)
    before = snapshot(where(folder))
    assert folder.publish(saved.manifest) == marker
    folder.write_metadata(saved.manifest)
    assert saved.persist(folder) == marker
    assert snapshot(where(folder)) == before


@pytest.mark.parametrize(
    ("seed", "other"),
    [
        (0, {"token": "another"}),
        (1, {"token": "another"}),
        (1, {}),
        (0, {"tag": "another_tag", "token": "another"}),
    ],
)
def test_second_author_of_a_generation_loses_and_touches_nothing(folder, seed, other):
    saved = SavedState(make_state())
    marker = saved.persist(folder)
    before = snapshot(where(folder))
    second = SavedState(make_state(seed), **other)
    with pytest.raises(CommitConflictError):
        folder.write_metadata(second.manifest)
    with pytest.raises(CommitConflictError):
        folder.publish(second.manifest)
    assert snapshot(where(folder)) == before
    assert folder.committed() == [marker]


def test_publish_other_author_commits_in_between_loses(folder, monkeypatch):
    mine, theirs = SavedState(make_state(), token="mine"), SavedState(make_state(), token="theirs")
    mine.write(folder)
    real = folder.store.create

    def create(path, data):
        monkeypatch.setattr(folder.store, "create", real)
        # Their metadata stands where mine stood: the race is lost only at the marker.
        theirs.write(folder)
        folder.publish(theirs.manifest)
        return real(path, data)

    monkeypatch.setattr(folder.store, "create", create)
    with pytest.raises(CommitConflictError, match="with token theirs"):
        folder.publish(mine.manifest)
    (marker,) = folder.committed()
    theirs.assert_complete(folder, marker)


def test_publish_everything_is_durable_before_the_root_and_the_root_before_the_marker(folder, monkeypatch):
    saved = SavedState(make_state())
    saved.write(folder)
    calls = []
    for name in ("write", "create", "sync"):
        real = getattr(folder.store, name)

        def recorded(path, *data, name=name, real=real):
            calls.append((name, path))
            return real(path, *data)

        monkeypatch.setattr(folder.store, name, recorded)
    folder.publish(saved.manifest)
    d = saved.directory
    assert calls[:5] == [
        ("sync", d),
        ("sync", f".fastcheck/manifests/{d}.json"),
        ("write", f"{d}/zarr.json"),
        ("sync", f"{d}/zarr.json"),
        ("create", f".fastcheck/commits/{d}.json"),
    ]


def _publish_race(location, token, barrier, results):
    saved = SavedState(make_state(), token=token)
    folder = CheckpointFolder(FolderStore(location))
    original = folder.store.create

    def create(path, data):
        barrier.wait(60)
        return original(path, data)

    folder.store.create = create
    # Both wrote the same chunks and metadata; only the tokens differ, and each checks what it wrote itself.
    folder._check_complete = lambda *_: None
    try:
        results.put((token, folder.publish(saved.manifest).token))
    except CommitConflictError as error:
        results.put((token, str(error)))


def test_publish_raced_by_processes_has_one_winner(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(2), context.Queue()
    SavedState(make_state()).write(CheckpointFolder(FolderStore(str(tmp_path))))
    racers = [
        context.Process(target=_publish_race, args=(str(tmp_path), token, barrier, results))
        for token in ("author1", "author2")
    ]
    try:
        for racer in racers:
            racer.start()
        outcomes = dict(results.get(timeout=100) for _ in racers)
    finally:
        for racer in racers:
            racer.join(10)
            racer.kill()
            racer.join()
    (marker,) = CheckpointFolder(FolderStore(str(tmp_path))).committed()
    loser = {"author1": "author2", "author2": "author1"}[marker.token]
    assert outcomes[marker.token] == marker.token
    assert f"with token {marker.token}" in outcomes[loser]


@pytest.mark.parametrize("what", ["chunk", "empty chunk", "document", "inline chunk", "manifest"])
def test_publish_something_is_missing_is_refused_without_marker_or_root(folder, what):
    saved = SavedState(make_state())
    saved.write(folder)
    inside = where(folder) / saved.directory
    if what == "empty chunk":
        (inside / list(saved.payloads)[2]).write_bytes(b"")
    else:
        {
            "chunk": inside / list(saved.payloads)[-1],
            "document": inside / "model/half/zarr.json",
            "inline chunk": inside / "model/layers.0.bias/c/0",
            "manifest": where(folder) / ".fastcheck/manifests" / f"{saved.directory}.json",
        }[what].unlink()
    with pytest.raises(ShardUnavailableError):
        folder.publish(saved.manifest)
    assert folder.committed() == []
    assert not (inside / "zarr.json").exists()


def test_publish_other_manifest_was_written_is_refused(folder):
    saved = SavedState(make_state())
    saved.write(folder)
    with pytest.raises(CorruptDataError, match="sha256"):
        folder.publish(replace(saved.manifest, created_unix=2.5))
    with pytest.raises(CorruptDataError, match="sha256"):
        folder.publish(saved.manifest, b"other bytes")
    assert folder.committed() == []


def test_clear_others_removes_what_another_author_left(folder):
    left, ours = SavedState(make_state(1), token="gone"), SavedState(make_state(), token="ours")
    left.write(folder)
    stray = f"{left.directory}/model/no_longer_there/c/0"
    root = f"{left.directory}/zarr.json"
    folder.store.write(stray, b"old")
    folder.store.write(root, b"{}")
    folder.clear_others(ours.manifest)
    assert not folder.store.exists(stray)
    assert not folder.store.exists(root)
    ours.write(folder)
    ours.assert_complete(folder, folder.publish(ours.manifest))


def test_clear_others_takes_nothing_from_whoever_writes_the_same(folder):
    saved = SavedState(make_state())
    saved.write(folder)
    before = snapshot(where(folder))
    folder.clear_others(saved.manifest)
    assert snapshot(where(folder)) == before
    marker = folder.publish(saved.manifest)
    before = snapshot(where(folder))
    folder.clear_others(saved.manifest)
    assert snapshot(where(folder)) == before
    saved.assert_complete(folder, marker)


def test_clear_others_committed_by_another_author_raises_and_keeps_it(folder):
    first = SavedState(make_state(), token="first")
    first.persist(folder)
    before = snapshot(where(folder))
    with pytest.raises(CommitConflictError, match="first"):
        folder.clear_others(SavedState(make_state(), token="second").manifest)
    assert snapshot(where(folder)) == before


def test_clear_uncommitted_leaves_committed_ones_alone(folder):
    first, second = SavedState(make_state(), generation=1), SavedState(make_state(), generation=2)
    first.persist(folder)
    before = snapshot(where(folder))
    second.write(folder)
    (where(folder) / second.directory / "model/.tmp-0123").write_bytes(b"half")
    folder.clear_uncommitted(second.directory)
    folder.clear_uncommitted(second.directory)
    assert snapshot(where(folder)) == before
    with pytest.raises(CommitConflictError, match="has a commit marker"):
        folder.clear_uncommitted(first.directory)
    (where(folder) / ".fastcheck/commits" / f"{first.directory}.json").write_bytes(b"damaged")
    with pytest.raises(CommitConflictError, match="has a commit marker"):
        folder.clear_uncommitted(first.directory)
    for name in (".fastcheck", "..", "my-data", ""):
        with pytest.raises(ConfigError):
            folder.clear_uncommitted(name)
        with pytest.raises(ConfigError):
            folder.remove(name)


def test_remove_takes_the_marker_first(folder):
    saved = SavedState(make_state())
    saved.persist(folder)
    crashing = CrashingStore(folder.store, 3, after=False)
    with pytest.raises(TierError):
        CheckpointFolder(crashing).remove(saved.directory)
    assert folder.committed() == []
    folder.remove(saved.directory)
    folder.remove(saved.directory)
    assert snapshot(where(folder)) == {}


def test_committed_order_is_numeric(folder):
    generations = [(9, "step_9000"), (10, "step_10000"), (100_000_000, "b"), (99_999_999, "a"), (2, "z")]
    for generation, tag in generations:
        SavedState({"n": generation}, generation=generation, tag=tag).persist(folder)
    assert [(m.generation, m.tag) for m in folder.committed()] == sorted(generations)


def test_nothing_saved_yet_is_an_empty_list(folder):
    assert folder.committed() == []
    assert folder.survey() == ((), ())
