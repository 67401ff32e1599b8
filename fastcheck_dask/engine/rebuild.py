"""Make chunks again that their node cannot give: from the others of their stripe and its parity."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Sequence
from contextlib import aclosing

import numpy as np

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.encode import Bits, Region, encoded_whole
from fastcheck_dask.engine.load import ChunkLoader
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

#: Raw bytes of the chunks that are in memory at once, those that others are made of included.
BATCH_BYTES = 128 * 2**20


async def loaded(
    manifest: Manifest,
    keys: Sequence[str],
    *,
    record: CommitRecord,
    client: Callable[[str, str], PeerClient],
    stored: StoredCheckpoint | None = None,
    without: Collection[int] = (),
) -> AsyncGenerator[tuple[list[str], Region]]:
    """Load chunks of a committed generation, a bounded number at a time; verified by their digests.

    Parameters
    ----------
    manifest : Manifest
        Of the generation.
    keys : sequence of str
        Keys of data and parity chunks.
    record : CommitRecord
        Names the nodes.
    client : callable
        Opens a node by name and address.
    stored : StoredCheckpoint, optional
        Gives what the nodes cannot give.
    without : collection of int
        Shards that are not asked for anything.

    Yields
    ------
    tuple of (list of str, Region)
        Some of the keys, and what gives the bits of the data chunks; for a parity chunk, of all chunks that
        it is the parity of.

    Raises
    ------
    UnrecoverableError
        If a chunk cannot be had in any way.

    Notes
    -----
    For a chunk that its node does not give the other chunks of its stripe are read, each once.
    `BATCH_BYTES` bound what is in memory, unless a single stripe has more.
    """
    width = 1 if manifest.layout is None else manifest.layout.nodes_wanted
    for batch in batches_of(keys, lambda key: width * manifest.nbytes_of(key), budget_bytes=BATCH_BYTES):
        bits: dict[str, Bits] = {}

        def region(key: str, bits: dict[str, Bits] = bits) -> Bits:
            return bits.setdefault(key, np.empty(manifest.nbytes_of(key), np.uint8))

        report = LoadReport(manifest.generation, manifest.tag)
        loader = ChunkLoader(
            manifest, region, record=record, client=client, stored=stored, report=report, without=without
        )
        await loader.load(dict.fromkeys(_data_chunks(manifest, batch)))
        yield batch, region


async def rebuilt(
    manifest: Manifest,
    keys: Sequence[str],
    *,
    record: CommitRecord,
    client: Callable[[str, str], PeerClient],
    stored: StoredCheckpoint | None = None,
    without: Collection[int] = (),
) -> AsyncGenerator[tuple[Descriptor, Bits]]:
    """Yield chunks of a committed generation, encoded whole; parameters and errors as with :func:`loaded`.

    Yields
    ------
    tuple of (Descriptor, ndarray of uint8)
        What the chunk is, and its payload.
    """
    batches = loaded(manifest, keys, record=record, client=client, stored=stored, without=without)
    async with aclosing(batches):
        async for batch, region in batches:
            for key in batch:
                yield await asyncio.to_thread(encoded_whole, manifest, key, region)


def _data_chunks(manifest: Manifest, keys: Iterable[str]) -> Iterable[str]:
    """Yield data chunks, and for each parity chunk those that it is the parity of."""
    for key in keys:
        if key in manifest.chunks:
            yield key
        else:
            assert manifest.layout is not None
            yield from filter(None, manifest.layout.position[key][0].members)
