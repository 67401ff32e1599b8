"""What is suspicious about a checkpoint, given the one before it. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from fastcheck_dask.layout.chunks import Chunk
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.nonfinite import has_nonfinite, is_float
from fastcheck_dask.layout.notes import Notes
from fastcheck_dask.layout.tree import inline_arrays


def notes_of(
    metrics: Mapping[str, float],
    tree: Any,
    *,
    chunks: Mapping[str, Chunk],
    digests: Mapping[str, str],
    nonfinite: Iterable[str],
    before: Manifest | None,
) -> Notes:
    """Return what a checkpoint says of itself.

    An array that is not finite is suspicious unless that was accepted before, and stays so until it is.
    Nothing changed if every chunk of floats has the bits that it had: counters and the states of random
    generators go on even when training stands still.

    Parameters
    ----------
    metrics : mapping of str to float
        What the user gave.
    tree : JSON
        Of the state; the small arrays in it are looked at here.
    chunks, digests : mapping
        The data chunks by key, and the digests of those that were encoded.
    nonfinite : iterable of str
        Keys of the chunks in which an encoder found a NaN or an infinity.
    before : Manifest or None
        Of the checkpoint before. Without one, what is not finite is accepted: a mask may well be so.
    """
    found = {chunks[key].path for key in nonfinite} | inline_nonfinite(tree)
    if before is None:
        return Notes(dict(metrics), (), tuple(sorted(found)))
    floats = [key for key in digests if key in chunks and is_float(chunks[key].dtype)]
    unchanged = bool(floats) and all(before.digests.get(key) == digests[key] for key in floats)
    accepted = found & set(before.notes.accepted)
    return Notes(dict(metrics), tuple(sorted(found - accepted)), tuple(sorted(accepted)), unchanged)


def inline_nonfinite(tree: Any) -> set[str]:
    """Return the paths of the arrays in a tree that have a NaN or an infinity."""
    return {
        path
        for path, dtype, _, bits in inline_arrays(tree)
        if bits and has_nonfinite(np.frombuffer(bits, np.uint8), codec_dtype(dtype))
    }
