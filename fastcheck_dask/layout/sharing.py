"""Which chunks a checkpoint of the object tier leaves to its base. Pure."""

from __future__ import annotations

from fastcheck_dask.layout.manifest import Manifest


def is_shared(manifest: Manifest, base: Manifest, key: str) -> bool:
    """Say whether a chunk is, bit for bit, in the base under the same key: then it lies there alone."""
    return key in base.chunks and base.digests[key] == manifest.digests[key]


def keys_apart(manifest: Manifest, base: Manifest) -> list[str]:
    """Return the chunks that lie in the checkpoint's own directory, in array order."""
    return [key for key in manifest.chunks if not is_shared(manifest, base, key)]
