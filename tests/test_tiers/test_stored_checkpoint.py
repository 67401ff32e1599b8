"""Reading through a chain: a base that is another one is refused, and authors agree on a plan."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import xxhash
from fastcheck_codecs import PrefixIndex, XorDelta

from fastcheck_dask.config import Group
from fastcheck_dask.errors import CommitConflictError, CorruptDataError, ShardUnavailableError
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import Mix, Needs, Plan
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint


def persist(folder, generation, values, *, base=None, before=None):
    """Write a checkpoint of one array of one chunk, whole or against another one."""
    array = np.asarray(values, np.float32)
    flat = flatten({"w": array})
    digest = xxhash.xxh3_128_hexdigest(array.tobytes())
    manifest = Manifest(
        "run",
        generation,
        "t",
        f"token-{generation}-{array[0]}",
        1.5,
        flat.tree,
        flat.arrays,
        {"w/c/0": digest},
    )
    codec = PrefixIndex() if before is None else XorDelta(base=np.asarray(before, np.float32))
    folder.write_chunk(f"{generation:08d}-t", "w/c/0", codec.encode(array))
    needs = Needs(None if base is None else base.link)
    folder.write_metadata(manifest, needs=needs)
    return folder.publish(manifest, needs=needs)


@pytest.fixture
def folder(tmp_path):
    return CheckpointFolder(FolderStore(str(tmp_path)))


ONE, TWO = np.arange(1.0, 101.0), np.arange(2.0, 102.0)


def test_read_follows_the_chain(folder):
    first = persist(folder, 1, ONE)
    second = persist(folder, 2, TWO, base=first, before=ONE)
    stored = StoredCheckpoint(folder, second)
    bits, received = stored.read("w/c/0")
    assert bits.view(np.float32).tolist() == TWO.tolist()
    assert received > 0
    assert [one.marker for one in stored.others] == [first]
    assert not stored.is_whole_here("w/c/0")
    assert stored.base.is_whole_here("w/c/0")


def test_read_refuses_a_base_that_was_replaced_by_another(folder):
    first = persist(folder, 1, ONE)
    second = persist(folder, 2, TWO, base=first, before=ONE)
    folder.remove(first.directory)
    persist(folder, 1, TWO)
    with pytest.raises(CorruptDataError, match=r"stored against 00000001-t, which has token token-1-2\.0"):
        StoredCheckpoint(folder, second).read("w/c/0")


def test_read_refuses_a_delta_without_a_base(folder):
    persist(folder, 1, ONE)
    alone = persist(folder, 2, TWO, before=ONE)
    with pytest.raises(CorruptDataError, match="w/c/0 of 00000002-t is a delta, and there is no base"):
        StoredCheckpoint(folder, alone).read("w/c/0")


def test_publish_refuses_a_base_that_is_not_there(folder):
    first = persist(folder, 1, ONE)
    folder.remove(first.directory)
    with pytest.raises(ShardUnavailableError, match="stored against 00000001-t, which is not in"):
        persist(folder, 2, TWO, base=first, before=ONE)
    assert folder.committed() == []


def test_plan_first_author_decides_and_another_token_replaces_it(folder):
    link = persist(folder, 1, ONE).link
    needs = Plan(Needs(link, (link, link)), Mix(link, (Group("g", "w*", 3),), ("g",)))
    assert folder.planned("00000002-t", "a") is None
    assert folder.plan("00000002-t", "a", needs) == needs
    assert folder.plan("00000002-t", "a", Plan()) == needs
    assert folder.planned("00000002-t", "a") == needs
    assert folder.planned("00000002-t", "b") is None
    assert folder.plan("00000002-t", "b", Plan()) == Plan()
    assert folder.planned("00000002-t", "b") == Plan()
    folder.clear_uncommitted("00000002-t")
    assert folder.planned("00000002-t", "b") is None


def test_plan_of_many_authors_at_once_is_one(folder):
    link, found = persist(folder, 1, ONE).link, []
    start = threading.Barrier(6)

    def author(number):
        start.wait()
        found.append(folder.plan("00000002-t", "a", Plan(Needs(link)) if number % 2 else Plan()))

    threads = [threading.Thread(target=author, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_plan_damaged_is_refused(folder):
    folder.store.write(".fastcheck/plans/00000002-t.json", b'{"token": "a"}')
    with pytest.raises(CorruptDataError, match="plans/00000002-t"):
        folder.planned("00000002-t", "a")


def test_plan_that_comes_and_goes_is_a_conflict(folder, monkeypatch):
    monkeypatch.setattr(folder.store, "create", lambda *_: False)
    with pytest.raises(CommitConflictError, match="comes and goes"):
        folder.plan("00000002-t", "a", Plan())


def test_newest_generation_counts_damaged_markers(folder):
    assert folder.newest_generation() == 0
    persist(folder, 7, ONE)
    folder.store.write(".fastcheck/commits/00000009-x.json", b"damaged")
    folder.store.write(".fastcheck/commits/junk.json", b"")
    assert folder.newest_generation() == 9
