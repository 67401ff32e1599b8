"""From a location to its store."""

from __future__ import annotations

import time
from collections.abc import Callable
from urllib.parse import urlsplit

from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import is_url
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.store import ObjectStore


def open_store(location: str, *, sleep: Callable[[float], None] = time.sleep) -> ObjectStore:
    """Return the store at `location`, a folder or a ``file://`` URL; the folder is made if missing.

    Raises
    ------
    ConfigError
        If it is empty, a URL of another kind, or if a file is there.
    TierError
        If the folder cannot be made.
    """
    if not location:
        raise ConfigError("the checkpoint directory is empty; wanted the path of a folder")
    if is_url(location):
        parts = urlsplit(location)
        if parts.scheme != "file":
            raise ConfigError(
                f"checkpoint directory {location!r}: this version has only folders, no {parts.scheme}://; "
                "give a path, for instance of a folder that all machines mount"
            )
        if parts.netloc not in ("", "localhost") or parts.query or parts.fragment or len(parts.path) < 2:
            raise ConfigError(f"checkpoint directory {location!r}: wanted file:///absolute/path")
        return FolderStore(parts.path, sleep=sleep)
    return FolderStore(location, sleep=sleep)
