"""Copies of a checkpoint that the storage nodes hold, for repairs of the object tier."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.engine.rebuild import loaded
from fastcheck_dask.inspection.repair import Sources
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker
from fastcheck_dask.tiers.peer import PeerClient

#: Raw bytes of the chunks that are in memory at once.
_BATCH_BYTES = 64 * 2**20


def node_sources(
    coordinator: str,
    folders: Sequence[CheckpointFolder] = (),
    *,
    client: Callable[[str, str], PeerClient] = PeerClient,
) -> Sources:
    """Return sources for `repair.repair`: other locations, and the nodes that a coordinator knows.

    Parameters
    ----------
    coordinator : str
        ``zk://...`` or ``sqlite:///...``.
    folders : sequence of CheckpointFolder
        Asked first.
    client : callable
        Opens a node by name and address.
    """

    def record_of(run: str, generation: int, token: str) -> CommitRecord | None:
        with contextlib.closing(connect(coordinator)) as connected:
            records = connected.commits(run)
        return next((r for r in records if (r.generation, r.token) == (generation, token)), None)

    def manifest(marker: CommitMarker) -> bytes | None:
        record = record_of(marker.run, marker.generation, marker.token)
        found = None if record is None else asyncio.run(manifest_from_nodes(record, client, causes=[]))
        return None if found is None else found[1]

    def chunks(of: Manifest, keys: Sequence[str]) -> Iterator[tuple[str, Bits]]:
        record = record_of(of.run, of.generation, of.token)
        if record is None or not record.nodes:
            return
        for batch in batches_of(list(keys), of.nbytes_of, budget_bytes=_BATCH_BYTES):
            yield from asyncio.run(_loaded(of, batch, record, client))

    return Sources(folders, manifest, chunks)


async def _loaded(
    manifest: Manifest, keys: Sequence[str], record: CommitRecord, client: Callable[[str, str], PeerClient]
) -> list[tuple[str, Bits]]:
    found: list[tuple[str, Bits]] = []
    async with contextlib.aclosing(loaded(manifest, keys, record=record, client=client)) as batches:
        async for batch, bits in batches:
            found += [(key, bits(key)) for key in batch]
    return found
