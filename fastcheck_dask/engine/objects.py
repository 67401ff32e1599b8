"""Read chunks of the object tier, several at once, each to its place."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from fastcheck_dask.engine.encode import Region
from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

#: Raw bytes that one thread reads before it is given more, and how many threads do.
_BATCH_BYTES = 8 * 2**20
_READERS = 4


async def read_objects(
    keys: list[str], stored: StoredCheckpoint, *, region: Region, settle: Callable[[str], None]
) -> dict[str, int | FastCheckError]:
    """Read chunks and verify them.

    Parameters
    ----------
    keys : list of str
        Data chunks.
    stored : StoredCheckpoint
        The checkpoint.
    region, settle : callable
        Give the memory of a chunk, and are told that it is there; called from the threads that read.

    Returns
    -------
    dict
        For each chunk the bytes that were read; or why it could not be had, and then its memory holds
        anything.
    """
    results: dict[str, int | FastCheckError] = {}

    def read(batch: list[str]) -> None:
        for key in batch:
            try:
                _, received = stored.read(key, out=region(key))
            except FastCheckError as error:
                results[key] = error
            else:
                settle(key)
                results[key] = received

    batches = batches_of(keys, stored.manifest.nbytes_of, budget_bytes=_BATCH_BYTES)

    async def lane() -> None:
        for batch in batches:
            await asyncio.to_thread(read, batch)

    await asyncio.gather(*(lane() for _ in range(_READERS)))
    return results
