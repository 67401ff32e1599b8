"""Save a snapshot when there are no storage nodes: the training host writes the object tier itself."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.save import Base, Saved, SaveStats, Snapshot, manifest_of, record_of
from fastcheck_dask.layout.health import notes_of
from fastcheck_dask.layout.manifest import Manifest
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
    base: Base | None = None,
    before: Manifest | None = None,
) -> Saved:
    """Write a snapshot to the object tier and publish it there: its marker is the commit.

    Parameters
    ----------
    run, snapshot, generation
        What is saved.
    persister : Persister
        Writes.
    seal : callable
        Stores the manifest beside the snapshot just before the commit.
    degraded : str or None
        Why there are no nodes.
    base : Base, optional
        The checkpoint in the other slot.
    before : Manifest, optional
        Of the checkpoint before: what is suspicious is judged by it.

    Raises
    ------
    TierError
        If the object tier refused; nothing of the save is visible.
    """
    stats = SaveStats(raw_bytes=snapshot.raw_bytes, degraded=degraded)
    written = await persister.write_snapshot(run, snapshot, generation=generation, stats=stats, before=base)
    notes = notes_of(
        snapshot.metrics,
        snapshot.tree,
        chunks=snapshot.content.chunks,
        digests=written.digests,
        nonfinite=written.nonfinite,
        before=before,
    )
    stats.flags = notes.flags
    manifest = manifest_of(run, generation, snapshot, written.digests, nodes=(), layout=None, notes=notes)
    data = manifest.to_bytes()
    await asyncio.to_thread(seal, data)
    await asyncio.to_thread(persister.publish, manifest, data, written.base)
    record = replace(record_of(manifest, data, _NO_NODES, snapshot.raw_bytes), persisted=True)
    return Saved(record, manifest, data, stats)
