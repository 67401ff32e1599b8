"""From a location to its store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from urllib.parse import urlsplit

import psutil

from fastcheck_dask.errors import ConfigError, RootAwayError, TierError
from fastcheck_dask.ids import is_url
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.s3_location import S3Location
from fastcheck_dask.tiers.store import ObjectStore

#: File systems behind which there is a network; those in user space (``fuse.sshfs``) count as such, too.
_REMOTE_FILE_SYSTEMS = frozenset(
    ("9p", "afs", "beegfs", "ceph", "cifs", "fuse", "glusterfs", "gpfs", "lustre", "nfs", "nfs4", "smb3")
)
_WANTED = "the path of a folder, or s3://bucket/folder"


def open_store(location: str, *, sleep: Callable[[float], None] = time.sleep) -> ObjectStore:
    """Return the store at a location.

    Parameters
    ----------
    location : str
        A folder, made if missing; a ``file://`` URL; or ``s3://bucket/folder?endpoint=...``.
    sleep : callable
        Takes seconds; called between attempts in a folder.

    Raises
    ------
    ConfigError
        If it is empty, a URL of another kind, or if a file is there; if S3 is asked for and its client
        library is not installed.
    TierError
        If the folder cannot be made.
    """
    if not location:
        raise ConfigError(f"the checkpoint directory is empty; wanted {_WANTED}")
    if not is_url(location):
        return FolderStore(location, sleep=sleep)
    parts = urlsplit(location)
    if parts.scheme == "s3":
        credentials = tuple(sorted(item for item in os.environ.items() if item[0].startswith("AWS_")))
        return _open_s3(S3Location.parse(location).text, credentials)
    if parts.scheme != "file":
        raise ConfigError(f"checkpoint directory {location!r}: no {parts.scheme}:// here; give {_WANTED}")
    if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or len(parts.path) < 2:
        raise ConfigError(f"checkpoint directory {location!r}: wanted file:///absolute/path")
    return FolderStore(parts.path, sleep=sleep)


def is_there(location: str) -> bool:
    """Say whether a folder is there, and make none; of what is behind a URL only asking tells."""
    return is_url(location) or Path(location).is_dir()


def open_existing(location: str) -> ObjectStore:
    """Return the store at a location in which something was written; a folder is not made.

    Raises
    ------
    RootAwayError
        If it is not there, or cannot be opened.
    """
    if not is_there(location):
        raise RootAwayError(f"{location} is not there: look whether its file system is mounted")
    try:
        return open_store(location)
    except (TierError, ConfigError) as error:
        raise RootAwayError(f"{location} cannot be opened: {error}") from error


def is_remote(location: str) -> bool:
    """Say whether what is written to a location goes over the network, as far as the system tells."""
    if is_url(location) and urlsplit(location).scheme == "s3":
        return True
    path = Path(os.path.realpath(urlsplit(location).path if is_url(location) else location))
    mounts = {Path(mount.mountpoint): mount.fstype for mount in psutil.disk_partitions(all=True)}
    kinds = (mounts[folder] for folder in (path, *path.parents) if folder in mounts)
    return next(kinds, "").partition(".")[0] in _REMOTE_FILE_SYSTEMS


@lru_cache(maxsize=32)
def _open_s3(location: str, _credentials: tuple[tuple[str, str], ...]) -> ObjectStore:
    """Return the one store of a location and its credentials: its connections are worth keeping."""
    try:
        # Optional, and slow to import: only who uses S3 needs it.
        from fastcheck_dask.tiers.s3_store import S3Store
    except ImportError as error:
        raise ConfigError(
            f"checkpoint directory {location}: S3 needs obstore: pip install 'fastcheck-dask[s3]' ({error})"
        ) from error
    return S3Store(location)
