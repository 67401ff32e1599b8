from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from fastcheck_dask.inspection.repair import Sources, repair, repair_marker
from fastcheck_dask.inspection.verification import Fault, verify, verify_rest
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

CHUNK = "00000001-t1/model/w/c/0/0"
MANIFEST = ".fastcheck/manifests/00000001-t1.json"
MARKER = ".fastcheck/commits/00000001-t1.json"


@pytest.fixture
def found(folder, checkpoints) -> CheckpointFolder:
    checkpoints.save(folder)
    return CheckpointFolder(open_store(folder))


@pytest.fixture
def copy(found, folder, tmp_path) -> CheckpointFolder:
    shutil.copytree(folder, tmp_path / "copy")
    return CheckpointFolder(open_store(str(tmp_path / "copy")))


def mended(folder, sources=None):
    (marker,) = folder.committed()
    done = repair(folder, marker, verify(folder, marker), sources or Sources())
    return done, verify(folder, marker)


@pytest.mark.parametrize("name", ["zarr.json", "model/zarr.json", "model/w/zarr.json", "model/scale/c/0"])
def test_what_follows_from_the_manifest_needs_no_other_copy(found, name):
    found.store.write(f"00000001-t1/{name}", b"{}")
    done, after = mended(found)
    assert done.repaired == [f"00000001-t1/{name} from the manifest"]
    assert after.intact


def test_marker_in_other_bytes_is_written_anew(found):
    found.store.write(MARKER, found.store.read(MARKER) + b" ")
    (marker,) = found.committed()
    (problem,) = verify(found, marker).problems
    assert (problem.name, problem.fault, problem.fatal) == (MARKER, Fault.DAMAGED, False)
    assert mended(found)[1].intact


@pytest.mark.parametrize("harm", ["deleted", "damaged"])
@pytest.mark.parametrize("name", [CHUNK, MANIFEST])
def test_chunk_or_manifest_comes_from_another_location(found, copy, name, harm):
    if harm == "deleted":
        found.store.delete(name)
    else:
        found.store.write(name, b"x" * 50)
    done, after = mended(found)
    assert (done.repaired, done.left) == ([], [name])
    assert not after.restorable
    done, after = mended(found, Sources([copy]))
    assert len(done.repaired) == 1
    assert str(copy.store.location) in done.repaired[0]
    assert after.intact


def test_copy_that_is_damaged_too_is_not_taken(found, copy):
    for folder in (found, copy):
        folder.store.write(CHUNK, b"x" * 50)
    copy.store.write(MANIFEST, b"{}")
    done, _ = mended(found, Sources([copy]))
    assert done.left == [CHUNK]


def test_chunk_that_did_not_change_comes_from_the_checkpoint_before(folder, checkpoints, found):
    state = checkpoints.state(1)
    state["model"]["b"] = state["model"]["b"] + 1
    checkpoints.save(folder, "t2", generation=2, state=state)
    found.store.delete(CHUNK)
    found.store.delete("00000001-t1/model/b/c/0")
    marker = found.committed()[0]
    done = repair(found, marker, verify(found, marker), Sources())
    assert done.left == ["00000001-t1/model/b/c/0"]
    assert done.repaired == [f"{CHUNK} from model/w/c/0/0 of 00000002-t2 in {folder}"]


def test_cast_is_made_of_its_source(folder, checkpoints):
    master = torch.randn(3000, generator=torch.Generator().manual_seed(0))
    manifest = checkpoints.save(
        folder, state={"m": master, "w": master.bfloat16()}, publish=False, chunk_bytes=2**20
    )
    arrays = tuple(replace(s, source="m") if s.path == "w" else s for s in manifest.arrays)
    derived: Manifest = replace(manifest, arrays=arrays)
    found = CheckpointFolder(open_store(folder))
    found.write_metadata(derived)
    found.publish(derived)
    found.store.delete("00000001-t1/w/c/0")
    done, after = mended(found)
    assert done.repaired == ["00000001-t1/w/c/0 from m/c/0, of which it is the cast"]
    assert after.intact
    found.store.delete("00000001-t1/m/c/0")
    found.store.delete("00000001-t1/w/c/0")
    assert len(mended(found)[0].left) == 2


def test_nodes_that_give_other_bits_are_not_believed(found, checkpoints):
    bits = checkpoints.state(1)["model"]["w"].view(np.uint8).reshape(-1)
    good = bits[: found.load_manifest(found.committed()[0]).sizes["model/w/c/0/0"]]
    found.store.delete(CHUNK)
    wrong = good.copy()
    wrong[7] ^= 1
    done, _ = mended(found, Sources(chunks=lambda _m, keys: [(key, wrong) for key in keys]))
    assert done.left == [CHUNK]
    done, after = mended(found, Sources(chunks=lambda _m, keys: [(key, good) for key in keys]))
    assert (done.repaired, after.intact) == ([f"{CHUNK} from the storage nodes"], True)


def test_manifest_from_the_nodes_counts_by_its_digest(found):
    data = found.store.read(MANIFEST)
    found.store.delete(MANIFEST)
    assert mended(found, Sources(manifest=lambda _: data + b" "))[0].left == [MANIFEST]
    done, after = mended(found, Sources(manifest=lambda _: data))
    assert (done.repaired, after.intact) == ([f"{MANIFEST} from the storage nodes"], True)


def test_unexpected_object_is_reported_and_left(found):
    found.store.write("00000001-t1/extra/c/0", b"x")
    done, after = mended(found)
    assert (done.repaired, done.left) == ([], [])
    assert [(p.fault, p.name, p.fatal) for p in after.problems] == [
        (Fault.UNEXPECTED, "00000001-t1/extra/c/0", False)
    ]
    assert after.restorable


def test_damaged_marker_is_made_again_only_of_an_intact_checkpoint(found, folder):
    good = found.store.read(MARKER)
    found.store.write(MARKER, b"harmed")
    assert [p.name for p in verify_rest(found)] == [MARKER]
    moved = (Path(folder) / CHUNK).rename(Path(folder) / "away")
    assert not repair_marker(found, "00000001-t1")
    moved.rename(Path(folder) / CHUNK)
    root = found.store.read("00000001-t1/zarr.json")
    found.store.write("00000001-t1/zarr.json", root.replace(b"small", b"large") + b" ")
    assert not repair_marker(found, "00000001-t1")
    found.store.write("00000001-t1/zarr.json", root)
    assert repair_marker(found, "00000001-t1")
    assert found.store.read(MARKER) == good


def test_lost_marker_is_never_made_again(found):
    found.store.delete(MARKER)
    assert not repair_marker(found, "00000001-t1")
    assert found.committed() == []


def test_chunk_that_is_missing_behind_a_missing_manifest_is_repaired_too(found, copy):
    for name in (CHUNK, MANIFEST, "00000001-t1/zarr.json"):
        found.store.delete(name)
    done, after = mended(found, Sources([copy]))
    assert (len(done.repaired), after.intact) == (3, True)
