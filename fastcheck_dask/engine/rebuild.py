"""Make chunks again that no node can give as they are: from the others of their stripe and its parity."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence

import numpy as np
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.load import ChunkLoader
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.peer import PeerClient

#: Raw bytes of the chunks that are in memory at once.
BATCH_BYTES = 32 * 2**20


async def rebuilt(
    manifest: Manifest,
    keys: Sequence[str],
    *,
    record: CommitRecord,
    client: Callable[[str, str], PeerClient],
) -> AsyncIterator[tuple[str, Bits]]:
    """Yield data chunks of a committed generation, encoded whole; verified by their digests.

    Parameters
    ----------
    manifest : Manifest
        Of the generation.
    keys : sequence of str
        Keys of data chunks.
    record : CommitRecord
        Names the nodes.
    client : callable
        Opens a node by name and address.

    Yields
    ------
    tuple of (str, ndarray of uint8)
        Key and payload.

    Raises
    ------
    UnrecoverableError
        If the nodes cannot give a chunk in any way.
    """
    for batch in batches_of(list(keys), manifest.nbytes_of, budget_bytes=BATCH_BYTES):
        bits: dict[str, Bits] = {}

        def region(key: str, bits: dict[str, Bits] = bits) -> Bits:
            return bits.setdefault(key, np.empty(manifest.nbytes_of(key), np.uint8))

        report = LoadReport(manifest.generation, manifest.tag)
        loader = ChunkLoader(manifest, region, record=record, client=client, stored=None, report=report)
        await loader.load(batch)
        for key in batch:
            yield key, PrefixIndex(dtype=codec_dtype(manifest.chunks[key].dtype)).encode(bits[key])
