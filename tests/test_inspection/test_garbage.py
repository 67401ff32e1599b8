from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.inspection.garbage import LEAST_GRACE_SECONDS, collect
from fastcheck_dask.inspection.leftovers import Kind
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

LATER = 2 * 86400.0


def later() -> float:
    return time.time() + LATER


@pytest.fixture
def littered(location, checkpoints) -> CheckpointFolder:
    """Return a location with a committed checkpoint, and every kind of leftover but temporaries."""
    checkpoints.save(location, "good", generation=1)
    checkpoints.save(location, "attempt", generation=2, publish=False)
    checkpoints.save(location, "unmarked", generation=3)
    checkpoints.save(location, "harmed", generation=4)
    store = open_store(location)
    store.delete(".fastcheck/commits/00000003-unmarked.json")
    store.write(".fastcheck/commits/00000004-harmed.json", b"harmed")
    store.write(".fastcheck/manifests/00000005-orphan.json", b"{}")
    store.write("notes.txt", b"mine")
    return CheckpointFolder(store)


def test_only_what_died_is_removed(littered):
    before = set(littered.store.list(""))
    gone = {name for name in before if "00000002-attempt" in name or "00000005-orphan" in name}
    assert collect(littered, now=later, dry_run=True).nbytes > 0
    assert set(littered.store.list("")) == before
    found = collect(littered, now=later)
    assert [(f.kind, f.name) for f in found.removed] == [
        (Kind.MANIFEST, ".fastcheck/manifests/00000005-orphan.json"),
        (Kind.UNFINISHED, "00000002-attempt"),
    ]
    assert [(f.name, "marker may have been lost" in why) for f, why in found.kept] == [
        ("00000003-unmarked", True)
    ]
    assert set(littered.store.list("")) == before - gone
    assert collect(littered, now=later).removed == ()


def test_what_is_being_written_is_left(littered):
    before = littered.store.list("")
    found = collect(littered, grace_seconds=LEAST_GRACE_SECONDS)
    assert found.removed == ()
    assert sum("save may be under way" in why for _, why in found.kept) == 3
    assert littered.store.list("") == before


def test_grace_that_is_too_short_is_refused(littered):
    for seconds in (0.0, LEAST_GRACE_SECONDS - 1, float("nan")):
        with pytest.raises(ConfigError, match="at least 600 s"):
            collect(littered, grace_seconds=seconds)


def test_attempt_of_which_one_object_is_new_is_left(folder, checkpoints):
    checkpoints.save(folder, "attempt", publish=False)
    for path in Path(folder).rglob("*"):
        os.utime(path, (1.0, 1.0))
    (Path(folder) / "00000001-attempt/model/w/c/0/0").touch()
    assert collect(CheckpointFolder(open_store(folder))).removed == ()


def test_committed_between_listing_and_removal_is_left(folder, checkpoints, monkeypatch):
    manifest = checkpoints.save(folder, "attempt", publish=False)
    found = CheckpointFolder(open_store(folder))
    listing = found.store.listing

    def publish_after(prefix):
        seen = listing(prefix)
        CheckpointFolder(open_store(folder)).publish(manifest)
        return seen

    monkeypatch.setattr(found.store, "listing", publish_after)
    collected = collect(found, now=later)
    assert collected.removed == ()
    assert "committed just now" in collected.kept[0][1]
    assert found.load_manifest(found.committed()[0]) == manifest


def test_temporaries_are_removed_when_they_are_old(folder, checkpoints):
    checkpoints.save(folder)
    old, new = (Path(folder) / "00000001-t1" / f".tmp-{n}" for n in "ab")
    old.write_bytes(b"xy")
    new.write_bytes(b"x")
    os.utime(old, (1.0, 1.0))
    found = CheckpointFolder(open_store(folder))
    assert [f.name for f in collect(found, dry_run=True).removed] == ["00000001-t1/.tmp-a"]
    assert old.exists()
    assert collect(found).nbytes == 2
    assert (old.exists(), new.exists()) == (False, True)
