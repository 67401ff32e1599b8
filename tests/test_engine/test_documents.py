from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.documents import Included, exact_objects, find_damaged, mend
from fastcheck_dask.engine.folder_run import FolderRun
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.errors import TierError
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten, select
from fastcheck_dask.testing.checkpoints import write_checkpoint
from fastcheck_dask.tiers.checkpoint_folder import WHOLE, CheckpointFolder, marker_path
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store

STATE = {"w": np.arange(3000.0), "m": {"s": np.float32([1.5, 2.5])}}
NAMES = ["zarr.json", "w/zarr.json", "m/zarr.json", "m/s/zarr.json", "m/s/c/0"]
ALL = ["a/x", "a/y", "b/d/z", "tiny", "b/t"]


@pytest.fixture
def folder(tmp_path):
    write_checkpoint(str(tmp_path / "c"), STATE, "t1", generation=1)
    return CheckpointFolder(open_store(str(tmp_path / "c")))


@pytest.fixture
def local(tmp_path):
    with LocalTier("run", tmp_path / "shm") as tier:
        yield tier


def recover(folder, local, *, include=None, **options):
    recovery = Recovery(local, folder, lambda *_: pytest.fail("no nodes"), **options)
    return asyncio.run(recovery.load((), include=include))


def parts(folder):
    (marker,) = folder.committed()
    return folder, marker, folder.load_manifest(marker)


def test_exact_objects_are_all_that_is_no_encoded_chunk(folder):
    _, marker, manifest = parts(folder)
    lie_there = {name.removeprefix("00000001-t1/") for name in folder.store.list("00000001-t1")}
    assert lie_there == {*exact_objects(manifest, marker.needs), *manifest.chunks}


@pytest.mark.parametrize("name", [*NAMES, "marker"])
@pytest.mark.parametrize("fault", ["missing", "other bytes", "longer"])
def test_any_object_is_named_and_mended(folder, name, fault):
    path = marker_path("00000001-t1") if name == "marker" else f"00000001-t1/{name}"
    good = folder.store.read(path)
    found = parts(folder)
    assert find_damaged(*found) == []
    if fault == "missing":
        folder.store.delete(path)
    else:
        folder.store.write(path, bytes(len(good)) if fault == "other bytes" else good + b" ")
    (damage,) = find_damaged(*found)
    assert damage.name == path
    gone = (name, fault) == ("marker", "missing")
    # Without a marker it may have been removed: nothing is written then.
    assert mend(*found, damaged=[damage]) == ([] if gone else [path])
    assert gone or folder.store.read(path) == good


def test_checkpoint_that_is_removed_meanwhile_leaves_nothing(folder, monkeypatch):
    found = parts(folder)
    folder.store.write("00000001-t1/zarr.json", b"{}")
    damaged = find_damaged(*found)
    write = folder.store.write

    def removed_before_the_write(path, data):
        monkeypatch.setattr(folder.store, "write", write)
        folder.remove("00000001-t1")
        write(path, data)

    monkeypatch.setattr(folder.store, "write", removed_before_the_write)
    assert mend(*found, damaged=damaged) == []
    assert folder.store.list("") == ()


def test_load_names_mends_and_says_so_once(folder, local, caplog):
    for name in NAMES[:3]:
        folder.store.delete(f"00000001-t1/{name}")
    recovered = recover(folder, local)
    assert recovered.state["w"].tobytes() == STATE["w"].tobytes()
    assert len(recovered.report.damaged) == 3
    assert all("written anew" in line for line in recovered.report.damaged)
    assert caplog.text.count("3 objects that other readers need") == 1
    assert find_damaged(*parts(folder)) == []


def test_load_of_a_store_that_cannot_be_written_names_all_the_same(folder, local, monkeypatch, caplog):
    folder.store.delete("00000001-t1/zarr.json")

    def refused(path, data):
        raise TierError("read-only")

    monkeypatch.setattr(folder.store, "write", refused)
    (line,) = recover(folder, local).report.damaged
    assert line.startswith("00000001-t1/zarr.json: ")
    assert "anew" not in line
    assert "read-only" in caplog.text


def test_store_that_cannot_be_listed_is_named_and_nothing_is_written(folder, monkeypatch):
    found = parts(folder)

    def refused(prefix):
        raise TierError("away")

    monkeypatch.setattr(folder.store, "listing", refused)
    (damage,) = find_damaged(*found)
    assert "away" in damage.detail
    assert mend(*found, damaged=[damage]) == []


@pytest.fixture
def asked(folder, monkeypatch):
    """Return the names of what is read, a list that grows."""
    found = []
    read = folder.store.read
    monkeypatch.setattr(folder.store, "read", lambda path: found.append(path) or read(path))
    return found


@pytest.mark.parametrize("include", [None, "w"])
def test_load_that_shall_be_fast_reads_no_documents(folder, local, asked, include):
    assert recover(folder, local, include=include, check_documents=False).report.damaged == []
    assert not [path for path in asked if path.endswith("zarr.json")]


@pytest.mark.parametrize(
    ("include", "compared"),
    [
        ("w", ["w/zarr.json"]),
        (["w", "m/*"], ["m/s/c/0", "m/s/zarr.json", "m/zarr.json", "w/zarr.json"]),
    ],
)
def test_load_of_a_part_compares_and_mends_what_is_of_it(folder, local, asked, include, compared):
    good = {name: folder.store.read(f"00000001-t1/{name}") for name in NAMES}
    for name in NAMES:
        folder.store.write(f"00000001-t1/{name}", b"x" * len(good[name]))
    asked.clear()
    recovered = recover(folder, local, include=include)
    assert recovered.state["w"].tobytes() == STATE["w"].tobytes()
    told = sorted(line.partition(": ")[0].removeprefix("00000001-t1/") for line in recovered.report.damaged)
    assert told == compared
    assert sorted(path.removeprefix("00000001-t1/") for path in asked if path.endswith("zarr.json")) == [
        name for name in compared if name.endswith("zarr.json")
    ]
    mended = [name for name in NAMES if folder.store.read(f"00000001-t1/{name}") == good[name]]
    assert sorted(mended) == compared


@settings(deadline=None)
@given(st.lists(st.sampled_from(ALL), min_size=1, unique=True))
def test_objects_of_a_part_are_those_of_the_whole(names):
    values = {name: np.arange(2.0 if name in ("tiny", "b/t") else 300.0) for name in ALL}
    flat = flatten(nested(values), chunk_bytes=4096)
    manifest = Manifest("r", 1, "t", "token", 1.0, flat.tree, flat.arrays, digests_of_none(flat.arrays))
    paths, tree = select(manifest.tree, names)
    arrays = [spec for spec in manifest.arrays if spec.path in paths]
    whole = exact_objects(manifest, WHOLE)
    part = exact_objects(manifest, WHOLE, of=Included(tree, arrays))
    assert part.items() <= whole.items()
    assert {f"{name}/zarr.json" for name in names} <= part.keys()
    assert not [key for key in part if any(key.startswith(f"{name}/") for name in set(ALL) - set(names))]


def nested(values):
    """Return the state whose leaves have these paths."""
    state = {}
    for path, value in values.items():
        *above, last = path.split("/")
        inner = state
        for name in above:
            inner = inner.setdefault(name, {})
        inner[last] = value
    return state


def digests_of_none(arrays):
    return {chunk.key: "0" * 32 for spec in arrays for chunk in spec.chunks}


def test_deltas_are_named_and_what_is_made_whole_at_this_moment_is_not_damaged(tmp_path):
    folder = CheckpointFolder(open_store(str(tmp_path / "deltas")))
    run = FolderRun(folder, run="r", policy=ChainPolicy(), retention=Retention(), chunk_bytes=4096)
    for step in range(2):
        run.save({"w": np.arange(3000.0) + step}, f"s{step}")
    marker = folder.committed()[1]
    manifest = folder.load_manifest(marker)
    assert marker.base is not None
    assert find_damaged(folder, marker, manifest) == []
    folder.store.write(f"{marker.directory}/w/zarr.json", b"{}")
    damaged = find_damaged(folder, marker, manifest)
    assert [damage.name for damage in damaged] == [f"{marker.directory}/w/zarr.json"]
    assert mend(folder, marker, manifest, damaged=damaged) == []
    list(compact(folder.store.location, tag="s1"))
    # By the marker of before, as who read it just before it changed.
    names = [damage.name for damage in find_damaged(folder, marker, manifest)]
    assert names == [marker_path(marker.directory)]


def test_load_of_a_run_in_one_folder_names_and_mends_too(tmp_path, caplog):
    folder = CheckpointFolder(open_store(str(tmp_path / "one")))
    run = FolderRun(folder, run="r", policy=ChainPolicy(), retention=Retention(), chunk_bytes=4096)
    run.save({"w": np.arange(3000.0)}, "s0")
    folder.store.delete("00000001-s0/w/zarr.json")
    run.load()
    assert "00000001-s0/w/zarr.json" in caplog.text
    assert "1 were written anew" in caplog.text
    assert find_damaged(*parts(folder)) == []
