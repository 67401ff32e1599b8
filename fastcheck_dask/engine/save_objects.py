"""Save a snapshot when there are no storage nodes: the training host writes the object tier itself."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.object_writer import Written
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.save import Base, Saved, SaveStats, Snapshot, manifest_of, record_of
from fastcheck_dask.errors import TierFullError
from fastcheck_dask.layout.health import notes_of
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.placement.policy import Choice

log = logging.getLogger(__name__)

_NO_NODES = Choice(0, False, ())


async def save_to_objects(
    run: str,
    snapshot: Snapshot,
    *,
    generation: int,
    persister: Persister,
    compression: CompressionPolicy | None = None,
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
    compression : CompressionPolicy, optional
        Decides by what the saves before measured; without it every save is compressed.
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
    compression = compression or CompressionPolicy("always", 1)
    compress = compression.compresses(snapshot.raw_bytes)
    write = partial(persister.write_snapshot, run, snapshot, generation=generation, before=base)
    try:
        written = await write(compress=compress)
    except TierFullError as error:
        if compress or not compression.refuse_raw():
            raise
        log.warning("generation %d is compressed after all: %s", generation, error)
        compress = True
        written = await write(compress=True)
    compression.observe(written.meter, compressed=compress)
    notes = notes_of(
        snapshot.metrics,
        snapshot.tree,
        chunks=snapshot.content.chunks,
        digests=written.digests,
        nonfinite=written.nonfinite,
        before=before,
    )
    manifest = manifest_of(run, generation, snapshot, written.digests, nodes=(), layout=None, notes=notes)
    data = manifest.to_bytes()
    await asyncio.to_thread(seal, data)
    stored = written.planned.stored_as(manifest)
    stored_data = data if stored is manifest else stored.to_bytes()
    await asyncio.to_thread(persister.publish, stored, stored_data, written.planned.needs)
    record = replace(record_of(manifest, data, _NO_NODES, snapshot.raw_bytes), persisted=True)
    stats = _stats(snapshot, written, degraded=degraded, compressed=compress)
    stats.flags = notes.flags
    return Saved(record, manifest, data, stats)


def _stats(snapshot: Snapshot, written: Written, *, degraded: str | None, compressed: bool) -> SaveStats:
    meter = written.meter
    return SaveStats(
        raw_bytes=snapshot.raw_bytes,
        sent_bytes=meter.sent_bytes,
        chunks=len(written.digests),
        deltas=written.deltas,
        degraded=degraded,
        compressed=compressed,
        encode_bytes_per_second=meter.encode_bytes_per_second,
        link_bytes_per_second=meter.link_bytes_per_second,
    )
