"""What is damaged or foreign in a folder of checkpoints is told, and never read as if it were whole."""

from __future__ import annotations

import logging
import pickle
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.errors import (
    ConfigError,
    CorruptDataError,
    ShardUnavailableError,
    TierError,
    UnknownFormatError,
)
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.testing.saved_state import SavedState
from fastcheck_dask.tiers import checkpoint_folder
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import CommitMarker

STATE = {"w": np.arange(300, dtype=np.float32), "n": 1}
MARKER = CommitMarker("run", 3, "t", "author", "0" * 64, 17, 1.5)
BAD_MARKERS = {
    "truncated": MARKER.to_bytes()[:-1],
    "empty": b"",
    "too_large": MARKER.to_bytes() + b" " * 100_000,
    "of_another_generation": replace(MARKER, generation=4).to_bytes(),
    "of_another_tag": replace(MARKER, tag="other").to_bytes(),
    "newer": MARKER.to_bytes().replace(b'"version":1', b'"version":9'),
    "pickle": pickle.dumps(MARKER),
}


def where(folder: CheckpointFolder) -> Path:
    return Path(folder.store.location)


@pytest.mark.parametrize("data", BAD_MARKERS.values(), ids=BAD_MARKERS)
def test_marker_damaged_is_skipped_with_a_reason(folder, caplog, data):
    good = SavedState({"n": 1}, generation=2, tag="good")
    marker = good.persist(folder)
    path = where(folder) / ".fastcheck/commits/00000003-t.json"
    path.write_bytes(data)
    with caplog.at_level(logging.WARNING):
        survey = folder.survey()
    assert survey.committed == (marker,)
    ((name, reason),) = survey.damaged
    assert name == ".fastcheck/commits/00000003-t.json"
    assert "00000003-t.json" in reason
    assert "00000003-t.json" in caplog.text
    with pytest.raises(CorruptDataError):
        folder.marker("00000003-t")


def test_foreign_files_among_markers_are_no_checkpoints(folder):
    commits = where(folder) / ".fastcheck/commits"
    commits.mkdir(parents=True)
    for name in ("notes.txt", "00000003-t.json~", "t.json", ".tmp-12", ".DS_Store"):
        (commits / name).write_bytes(MARKER.to_bytes())
    survey = folder.survey()
    assert survey.committed == ()
    assert {Path(path).name for path, _ in survey.damaged} == {"notes.txt", "00000003-t.json~", "t.json"}


def test_listing_store_fails_raises_and_does_not_look_empty(folder, monkeypatch):
    SavedState({"n": 1}).persist(folder)
    monkeypatch.setattr(Path, "read_bytes", lambda self: (_ for _ in ()).throw(OSError(5, "I/O error")))
    with pytest.raises(TierError, match="EIO"):
        folder.committed()


class Bomb:
    """Writes a file when it is unpickled."""

    def __init__(self, path: str):
        self.path = path

    def __reduce__(self):
        return Path(self.path).write_text, ("ran",)


@pytest.mark.parametrize("marker_fits", [False, True])
def test_manifest_replaced_by_a_pickle_is_refused_and_not_run(folder, tmp_path, marker_fits):
    marker = SavedState(STATE).persist(folder)
    bomb = pickle.dumps(Bomb(str(tmp_path / "ran")))
    path = where(folder) / ".fastcheck/manifests" / f"{marker.directory}.json"
    path.write_bytes(bomb)
    if marker_fits:
        marker = replace(marker, manifest_sha256=digest_of_manifest(bomb))
    with pytest.raises(UnknownFormatError if marker_fits else CorruptDataError, match=str(path.name)):
        folder.load_manifest(marker)
    assert not (tmp_path / "ran").exists()


def test_manifest_damaged_swapped_or_missing_is_named(folder, monkeypatch):
    one, two = SavedState(STATE, generation=1), SavedState(STATE, generation=2)
    marker = one.persist(folder)
    two.persist(folder)
    manifests = where(folder) / ".fastcheck/manifests"
    path = manifests / f"{one.directory}.json"
    good = path.read_bytes()
    path.write_bytes(good[:-1])
    with pytest.raises(CorruptDataError, match=r"00000001-t\.json"):
        folder.load_manifest(marker)
    other = (manifests / f"{two.directory}.json").read_bytes()
    path.write_bytes(other)
    with pytest.raises(CorruptDataError, match=r"00000001-t\.json"):
        folder.load_manifest(marker)
    with pytest.raises(CorruptDataError, match="not the manifest of 00000001-t"):
        folder.load_manifest(replace(marker, manifest_sha256=digest_of_manifest(other)))
    path.write_bytes(good)
    monkeypatch.setattr(checkpoint_folder, "LIMIT_BYTES", len(good) - 1)
    with pytest.raises(CorruptDataError, match="at most"):
        folder.load_manifest(marker)
    path.unlink()
    with pytest.raises(ShardUnavailableError, match=r"00000001-t\.json"):
        folder.load_manifest(marker)


def test_read_chunk_missing_empty_or_outside_is_refused(folder):
    saved = SavedState(STATE)
    marker = saved.persist(folder)
    key = next(iter(saved.payloads))
    got = folder.read_chunk(marker.directory, key)
    assert (got.dtype, got.tobytes()) == (np.uint8, saved.payloads[key].tobytes())
    target = where(folder) / marker.directory / key
    target.write_bytes(b"")
    with pytest.raises(ShardUnavailableError, match="is empty"):
        folder.read_chunk(marker.directory, key)
    target.unlink()
    with pytest.raises(ShardUnavailableError, match=key):
        folder.read_chunk(marker.directory, key)
    with pytest.raises(ConfigError):
        folder.read_chunk(marker.directory, "../../../etc/passwd")
