"""Which chunks a checkpoint of the object tier leaves to others. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from fastcheck_dask.layout.manifest import Manifest


def is_shared(manifest: Manifest, other: Manifest, key: str) -> bool:
    """Say whether a chunk is, bit for bit, in another checkpoint under the same key."""
    return key in other.chunks and other.digests[key] == manifest.digests[key]


def left_to(manifest: Manifest, others: Sequence[Manifest], key: str) -> int | None:
    """Return which of the needed checkpoints has a chunk, the first that does; None: it lies in its own."""
    return next((number for number, other in enumerate(others) if is_shared(manifest, other, key)), None)


def keys_apart(manifest: Manifest, others: Sequence[Manifest]) -> list[str]:
    """Return the chunks that lie in the checkpoint's own directory, in array order."""
    return [key for key in manifest.chunks if left_to(manifest, others, key) is None]
