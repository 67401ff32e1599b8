"""A folder as an object store: all or nothing, durable, and clear about what went wrong."""

from __future__ import annotations

import errno
import itertools
import multiprocessing
import os
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.errors import ConfigError, ShardUnavailableError, TierError, TierFullError
from fastcheck_dask.tiers import folder_store
from fastcheck_dask.tiers.folder_store import ATTEMPTS, FolderStore
from fastcheck_dask.tiers.object_store import open_store


@pytest.fixture
def store(tmp_path):
    return FolderStore(str(tmp_path / "ckpts"), sleep=lambda seconds: None)


@pytest.fixture
def small_disk(tmp_path, small_file_system):
    with small_file_system(tmp_path / "disk", 2**20) as folder:
        yield folder


def files_in(folder: Path) -> list[str]:
    return sorted(str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file())


def failing(number: int, *, times: int, call):
    """Return `call` made to fail the first `times` times with an errno."""
    left = [times]

    def wrapped(*args, **kwargs):
        if left[0]:
            left[0] -= 1
            raise OSError(number, os.strerror(number), "somewhere")
        return call(*args, **kwargs)

    return wrapped


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"abc",
        bytearray(b"abc"),
        memoryview(np.arange(6, dtype=np.uint16)),
        np.zeros(0, np.uint8),
        np.arange(3 * 2**20, dtype=np.uint32).view(np.uint8),
        np.arange(6, dtype=np.uint8).reshape(2, 3),
        np.frombuffer(b"read-only", np.uint8),
    ],
)
def test_write_any_buffer_reads_back_equal(store, data):
    store.write("a/b/c/0", data)
    assert store.read("a/b/c/0") == bytes(data)
    assert store.size("a/b/c/0") == len(bytes(data))
    assert store.list("") == ("a/b/c/0",)


@pytest.mark.parametrize("data", [np.arange(4, dtype=np.int8), np.arange(8, dtype=np.uint8)[::2]])
def test_write_array_that_is_not_plain_bytes_is_refused(store, data):
    with pytest.raises(ConfigError, match="contiguous"):
        store.write("a", data)
    assert store.list("") == ()


def test_write_over_existing_replaces_it_and_leaves_no_temporary(store):
    store.write("a", b"a long first version")
    store.write("a", b"new")
    assert store.read("a") == b"new"
    assert files_in(Path(store.location)) == ["a"]


def test_write_short_writes_of_the_system_still_store_everything(store, monkeypatch):
    real = os.write
    monkeypatch.setattr(folder_store.os, "write", lambda fd, view: real(fd, view[:1000]))
    data = np.random.default_rng(0).bytes(10_001)
    store.write("a", data)
    assert store.read("a") == data


def test_create_second_time_returns_false_and_keeps_the_first(store):
    assert store.create("a/b", b"first") is True
    assert store.create("a/b", b"second") is False
    assert store.read("a/b") == b"first"
    assert files_in(Path(store.location)) == ["a/b"]


def test_create_answer_of_the_link_lost_counts_as_created(store, monkeypatch):
    real = os.link

    def link(source, target):
        real(source, target)
        raise FileExistsError(errno.EEXIST, "the server made it, and the retransmission found it", target)

    monkeypatch.setattr(folder_store.os, "link", link)
    assert store.create("a", b"mine") is True


def _race(location, number, barrier, results):
    store = FolderStore(location)
    barrier.wait(30)
    results.put((number, store.create("commits/x", str(number).encode() * 1000)))


def test_create_raced_by_processes_has_one_winner(tmp_path):
    context = multiprocessing.get_context("fork")
    barrier, results = context.Barrier(3), context.Queue()
    racers = [
        context.Process(target=_race, args=(str(tmp_path), number, barrier, results)) for number in range(3)
    ]
    try:
        for racer in racers:
            racer.start()
        outcomes = dict(results.get(timeout=60) for _ in racers)
    finally:
        for racer in racers:
            racer.join(10)
            racer.kill()
            racer.join()
    winners = [number for number, won in outcomes.items() if won]
    assert len(winners) == 1
    assert FolderStore(str(tmp_path)).read("commits/x") == str(winners[0]).encode() * 1000


def test_list_prefix_is_sorted_and_ends_at_the_folder(store):
    for path in ("b/2", "b/10", "a/x/y", "bb/1", "b/c/0"):
        store.write(path, b"x")
    assert store.list("b") == ("b/10", "b/2", "b/c/0")
    assert store.list("absent") == ()
    assert store.list("") == ("a/x/y", "b/10", "b/2", "b/c/0", "bb/1")


def test_read_absent_name_raises_and_says_where(store):
    store.write("a", b"x")
    for path in ("b", "a/b"):
        assert not store.exists(path)
        for ask in (store.read, store.size):
            with pytest.raises(ShardUnavailableError, match=f"{path} is not in .*ckpts"):
                ask(path)
    assert store.exists("a")


def test_exists_of_a_folder_is_false(store):
    store.write("a/b", b"x")
    assert not store.exists("a")


def test_delete_is_idempotent(store):
    store.write("a/b", b"x")
    for _ in range(2):
        store.delete("a/b")
        store.delete("never/was")
    assert store.list("") == ()


def test_delete_tree_takes_temporaries_and_leaves_what_links_point_to(store, tmp_path):
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "kept").write_bytes(b"x")
    store.write("a/b/c", b"x")
    store.write("ab", b"x")
    (Path(store.location) / "a/b/.tmp-0123").write_bytes(b"half")
    (Path(store.location) / "a/link").symlink_to(outside)
    for _ in range(2):
        store.delete_tree("a")
    assert files_in(Path(store.location)) == ["ab"]
    assert (outside / "kept").exists()


@pytest.mark.parametrize(
    "path",
    ["", "/etc/x", "..", "../x", "a/../../x", "a//b", "a/", ".", "./a", "a\0b", "a/.tmp-1", "\ud800"],
)
@pytest.mark.parametrize("method", ["write", "create", "read", "size", "exists", "delete", "delete_tree"])
def test_name_that_leads_outside_is_refused(store, tmp_path, path, method):
    (tmp_path / "x").write_bytes(b"outside")
    arguments = (path, b"data") if method in ("write", "create") else (path,)
    with pytest.raises(ConfigError):
        getattr(store, method)(*arguments)
    assert files_in(tmp_path) == ["x"]


def test_name_with_escapes_and_odd_characters_is_literal(store):
    for name in ("%2E%2E/x", "a b/ä", "..a/b..", "back\\slash"):
        store.write(name, name.encode())
    assert {name: store.read(name).decode() for name in store.list("")} == {
        name: name for name in ("%2E%2E/x", "a b/ä", "..a/b..", "back\\slash")
    }


def test_open_store_missing_folder_is_made(tmp_path):
    for location in (str(tmp_path / "a/b"), f"file://{tmp_path}/c%20d/e"):
        open_store(location).write("x", b"1")
    assert files_in(tmp_path) == ["a/b/x", "c%20d/e/x"]


@pytest.mark.parametrize(
    "location", ["", "gs://bucket/run", "gs://b", "https://host/x", "file://host/x", "file://", "file:///a?b"]
)
def test_open_store_what_is_no_folder_is_refused(location):
    with pytest.raises(ConfigError):
        open_store(location)


def test_open_store_file_in_the_way_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    for location in (tmp_path / "file", tmp_path / "file/below"):
        with pytest.raises(ConfigError, match="is a file, wanted a folder"):
            open_store(str(location))


def test_full_disk_behind_a_link_raises_with_its_own_free_bytes_and_shows_nothing(tmp_path, small_disk):
    (tmp_path / "link").symlink_to(small_disk)
    store = open_store(str(tmp_path / "link"))
    store.write("old", b"x" * 200_000)
    with pytest.raises(TierFullError) as caught:
        store.write("new/c/0", bytes(2**20))
    assert caught.value.wanted_bytes == 2**20
    assert 0 < caught.value.free_bytes < 900_000
    assert str(small_disk) in str(caught.value)
    with pytest.raises(TierFullError):
        store.write("old", bytes(2**20))
    with pytest.raises(TierFullError):
        store.create("marker", bytes(2**20))
    assert files_in(small_disk) == ["old"]
    assert store.read("old") == b"x" * 200_000
    store.write("new/c/0", bytes(100_000))
    assert store.size("new/c/0") == 100_000


def test_read_only_disk_raises_and_says_so(small_disk):
    store = open_store(str(small_disk / "ckpts"))
    store.write("old", b"x")
    subprocess.run(["mount", "-o", "remount,ro", str(small_disk)], check=True)
    with pytest.raises(TierError, match=r"EROFS.*read-only"):
        store.write("new", b"x")
    with pytest.raises(TierError, match=r"EROFS.*read-only"):
        store.delete("old")
    assert open_store(str(small_disk / "ckpts")).read("old") == b"x"


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
@pytest.mark.parametrize(
    ("number", "kind", "advice"),
    [
        (errno.ENOSPC, TierFullError, "free some room"),
        (errno.EDQUOT, TierFullError, "quota"),
        (errno.EACCES, TierError, "right to write"),
        (errno.ENOTDIR, TierError, "move it away"),
        (errno.EIO, TierError, "again and again"),
        (errno.EFBIG, TierError, "ulimit"),
    ],
)
def test_write_system_call_fails_for_good_raises_and_keeps_the_old(
    store, monkeypatch, *, call, number, kind, advice
):
    store.write("a", b"old")
    with monkeypatch.context() as patched:
        patched.setattr(folder_store.os, call, failing(number, times=99, call=None))
        with pytest.raises(kind, match=advice) as caught:
            store.write("a", b"new")
    assert type(caught.value) is kind
    assert f"{store.location}/a" in str(caught.value)
    assert store.read("a") == b"old"
    assert files_in(Path(store.location)) == ["a"]


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_write_error_that_passes_is_repeated_with_growing_pauses(tmp_path, monkeypatch, call):
    pauses = []
    store = FolderStore(str(tmp_path / "ckpts"), sleep=pauses.append)
    with monkeypatch.context() as patched:
        patched.setattr(folder_store.os, call, failing(errno.EIO, times=ATTEMPTS - 1, call=getattr(os, call)))
        store.write("a", b"new")
    assert store.read("a") == b"new"
    assert files_in(Path(store.location)) == ["a"]
    assert len(pauses) == ATTEMPTS - 1
    assert pauses == sorted(set(pauses))


def test_create_no_hard_links_raises_and_says_so(store, monkeypatch):
    monkeypatch.setattr(folder_store.os, "link", failing(errno.ENOTSUP, times=99, call=None))
    with pytest.raises(TierError, match="no hard links"):
        store.create("a", b"x")
    assert files_in(Path(store.location)) == []


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_writer_killed_in_the_middle_old_stays_and_leftover_is_removable(store, call):
    store.write("a/b", b"old")
    child = os.fork()
    if not child:
        try:
            setattr(os, call, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
            store.write("a/b", b"new")
        finally:
            os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WTERMSIG(status) == signal.SIGKILL
    assert store.read("a/b") == b"old"
    assert store.list("") == ("a/b",)
    assert len(files_in(Path(store.location))) == 2
    (left,) = store.temporaries()
    assert left.path.startswith("a/.tmp-")
    assert store.remove_temporaries() == 0
    assert store.remove_temporaries(now=lambda: time.time() + 2 * 86400) == 1
    assert files_in(Path(store.location)) == ["a/b"]


def synced(monkeypatch, action) -> list[str]:
    """Return the paths that `action` fsyncs."""
    found = []
    real = os.fsync

    def fsync(descriptor):
        found.append(os.readlink(f"/proc/self/fd/{descriptor}"))
        real(descriptor)

    with monkeypatch.context() as patched:
        patched.setattr(folder_store.os, "fsync", fsync)
        action()
    return found


def test_write_fsyncs_the_file_before_it_gets_its_name(store, monkeypatch):
    found = synced(monkeypatch, lambda: store.write("a/b", b"x"))
    assert len(found) == 1
    assert found[0].startswith(f"{store.location}/a/.tmp-")


MANY = {f"a/{number}/c": b"%d" % number for number in range(150)}


def test_write_all_writes_each_and_leaves_no_temporary(store):
    store.write("a/7/c", b"old")
    store.write_all(iter(MANY.items()))
    assert {path: store.read(path) for path in store.list("")} == MANY
    assert files_in(Path(store.location)) == sorted(MANY)
    store.write_all([])


def test_write_all_writes_one_before_it_asks_for_the_next(store):
    def files():
        yield "a", (b"one", b"part")
        (begun,) = store.temporaries()
        assert begun.nbytes == 7
        yield "b", b"two"

    store.write_all(files())
    assert (store.read("a"), store.read("b")) == (b"onepart", b"two")


def test_write_all_fsyncs_every_file_under_its_temporary_name(store, monkeypatch):
    found = synced(monkeypatch, lambda: store.write_all(MANY.items()))
    assert len(set(found)) == len(found) == len(MANY)
    assert all("/.tmp-" in path for path in found)


@pytest.mark.parametrize("call", ["write", "fsync", "replace"])
def test_write_all_error_for_good_raises_and_leaves_whole_files_only(store, monkeypatch, call):
    real, calls = getattr(os, call), itertools.count(1)

    def fails(*arguments):
        if next(calls) >= 100:
            raise OSError(errno.ENOSPC, "full")
        return real(*arguments)

    with monkeypatch.context() as patched:
        patched.setattr(folder_store.os, call, fails)
        with pytest.raises(TierFullError):
            store.write_all(MANY.items())
    assert store.temporaries() == ()
    assert all(store.read(path) == MANY[path] for path in store.list(""))
    assert len(store.list("")) < len(MANY)


@pytest.mark.parametrize("call", ["open", "write", "fsync", "replace"])
def test_write_all_error_that_passes_is_repeated(store, monkeypatch, call):
    with monkeypatch.context() as patched:
        patched.setattr(folder_store.os, call, failing(errno.EIO, times=ATTEMPTS - 1, call=getattr(os, call)))
        store.write_all([("a", b"x"), ("b", b"y")])
    assert (store.read("a"), store.read("b")) == (b"x", b"y")
    assert files_in(Path(store.location)) == ["a", "b"]


def test_write_all_source_that_fails_leaves_no_temporary(store):
    def files():
        yield "a", b"x"
        raise LookupError("no more")

    with pytest.raises(LookupError, match="no more"):
        store.write_all(files())
    assert files_in(Path(store.location)) == []


def test_sync_covers_folders_that_others_made(store, monkeypatch):
    FolderStore(store.location).write("a/b/c/0", b"x")
    store.write("other/x", b"x")
    root = store.location
    wanted = [root, f"{root}/a", f"{root}/a/b", f"{root}/a/b/c"]
    for prefix in ("a", "a/b/c/0"):
        assert sorted(synced(monkeypatch, partial(store.sync, prefix))) == wanted


def test_create_is_durable_on_return(store, monkeypatch):
    found = synced(monkeypatch, lambda: store.create("a/b", b"x"))
    assert found[0].startswith(f"{store.location}/a/.tmp-")
    assert sorted(found[1:]) == [store.location, f"{store.location}/a"]


def test_sync_error_is_not_repeated(store, monkeypatch):
    store.write("a/b", b"x")
    monkeypatch.setattr(folder_store.os, "fsync", failing(errno.EIO, times=1, call=os.fsync))
    with pytest.raises(TierError, match="EIO"):
        store.sync("a")


def test_location_that_vanished_is_an_error_and_not_an_empty_one(store, tmp_path):
    store.write("a", b"x")
    Path(store.location).rename(tmp_path / "away")
    for ask in (lambda: store.list(""), lambda: store.read("a"), lambda: store.write("b", b"x")):
        with pytest.raises(TierError, match="mounted"):
            ask()
    assert not Path(store.location).exists()
