"""Which locations are behind a network."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from fastcheck_dask.tiers.object_store import is_remote


def mounts(monkeypatch: pytest.MonkeyPatch, **kinds: str) -> None:
    found = [SimpleNamespace(mountpoint=path, fstype=kind) for path, kind in kinds.items()]
    monkeypatch.setattr(
        psutil, "disk_partitions", lambda **options: found if options == {"all": True} else []
    )


@pytest.mark.parametrize(
    ("location", "remote"),
    [
        ("s3://bucket/run?endpoint=http://127.0.0.1:9", True),
        ("/data/run", True),
        ("file:///data/run", True),
        ("/data/scratch/run", False),
        ("/database/run", False),
        ("/home/run", True),
        ("/run", False),
    ],
)
def test_location_is_remote_by_the_mount_that_holds_it(
    monkeypatch: pytest.MonkeyPatch, location: str, *, remote: bool
) -> None:
    kinds = {"/": "ext4", "/data": "nfs4", "/data/scratch": "xfs", "/home": "fuse.sshfs"}
    mounts(monkeypatch, **kinds)
    assert is_remote(location) is remote


def test_location_behind_a_link_is_where_the_link_leads(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "far").mkdir()
    (tmp_path / "near").symlink_to(tmp_path / "far")
    mounts(monkeypatch, **{"/": "ext4", str((tmp_path / "far").resolve()): "lustre"})
    assert is_remote(str(tmp_path / "near" / "run"))


def test_location_on_this_machine_is_not_remote(tmp_path: Path) -> None:
    assert not is_remote(str(tmp_path))
