"""Save a snapshot when there are no storage nodes: the training host writes the object tier itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.save import Saved, SaveStats, Snapshot, manifest_of, record_of
from fastcheck_dask.placement.policy import Choice

_NO_NODES = Choice(0, False, ())


async def save_to_objects(
    run: str,
    snapshot: Snapshot,
    *,
    generation: int,
    persister: Persister,
    seal: Callable[[bytes], None],
    degraded: str | None,
) -> Saved:
    """Write a snapshot to the object tier and publish it there: its marker is the commit.

    Raises
    ------
    TierError
        If the object tier refused; nothing of the save is visible.
    """
    stats = SaveStats(raw_bytes=snapshot.raw_bytes, degraded=degraded)
    digests = await persister.write_whole(snapshot, generation, stats)
    manifest = manifest_of(run, generation, snapshot, digests, nodes=(), layout=None)
    data = manifest.to_bytes()
    await asyncio.to_thread(seal, data)
    await asyncio.to_thread(persister.publish, manifest, data)
    record = replace(record_of(manifest, data, _NO_NODES, snapshot.raw_bytes), persisted=True)
    return Saved(record, manifest, data, stats)
