"""Checkpoints in an object tier, written without a manager: for tests that only read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.engine.encode import digest
from fastcheck_dask.ids import directory_name, new_token
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker, location_of_rank
from fastcheck_dask.tiers.object_store import open_store


def write_checkpoint(
    location: str,
    state: Any,
    tag: str,
    *,
    generation: int,
    chunk_bytes: int = 4096,
    created_unix: float = 1.7e9,
    publish: bool = True,
) -> Manifest:
    """Write a state as a checkpoint, as a save does that has no storage nodes.

    Parameters
    ----------
    location : str
        Of the object tier.
    state : object
        Nested containers of tensors, arrays and plain values.
    tag, generation : str, int
        Of the checkpoint.
    chunk_bytes : int
        Largest chunk.
    created_unix : float
        Seconds.
    publish : bool
        If False, it is left without root group and commit marker, as an attempt that died before the end.
    """
    folder = CheckpointFolder(open_store(location))
    flat = flatten(state, chunk_bytes=chunk_bytes)
    digests = {}
    for spec, source in zip(flat.arrays, flat.sources, strict=True):
        bits = np.empty(spec.nbytes, np.uint8)
        copy_bits(source, bits)
        for chunk in spec.chunks:
            raw = bits[chunk.offset : chunk.offset + chunk.nbytes]
            digests[chunk.key] = digest(raw)
            payload = PrefixIndex(dtype=codec_dtype(spec.dtype)).encode(raw)
            folder.write_chunk(directory_name(generation, tag), chunk.key, payload)
    token = new_token()
    manifest = Manifest("run", generation, tag, token, created_unix, flat.tree, flat.arrays, digests)
    folder.write_metadata(manifest)
    if publish:
        folder.publish(manifest)
    return manifest


def write_joint(
    location: str, states: Sequence[Any], tag: str, *, number: int, generations: Sequence[int] | None = None
) -> JointMarker:
    """Write one checkpoint of several ranks, as they do without storage nodes.

    Parameters
    ----------
    location : str
        Of all ranks.
    states : sequence of object
        By rank.
    tag, number : str, int
        Of the checkpoint; it is as old as its number says.
    generations : sequence of int, optional
        By rank; otherwise all are `number`.
    """
    created = 1.7e9 + number
    parts = [
        write_checkpoint(
            location_of_rank(location, rank),
            state,
            tag,
            generation=number if generations is None else generations[rank],
            created_unix=created,
        )
        for rank, state in enumerate(states)
    ]
    tokens, numbers = tuple(part.token for part in parts), tuple(part.generation for part in parts)
    marker = JointMarker(number, tag, len(parts), created, tokens, numbers)
    assert JointFolder(location).publish(marker)
    return marker
