"""Write a checkpoint to the object tier: by the nodes that hold it, or from the snapshot when there are none.

The order is what makes it safe: chunks, array metadata and the manifest first, the root group after them,
the commit marker last. A reader that finds the marker finds everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.coordination.base import CommitRecord, Coordinator
from fastcheck_dask.engine.delivery import EncodedChunk, together
from fastcheck_dask.engine.plan import batches_of, jobs_for_objects
from fastcheck_dask.engine.rebuild import rebuilt
from fastcheck_dask.engine.save import (
    JOB_BYTES,
    Base,
    Encoder,
    SaveStats,
    Snapshot,
    send_jobs,
)
from fastcheck_dask.errors import FastCheckError, TierError, UnrecoverableError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: Raw bytes of the chunks that a node is asked to write by one message.
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Persisted:
    """What persisting a generation moved."""

    by_nodes_bytes: int
    by_host_bytes: int


class Persister:
    """Writes checkpoints of one run to the object tier.

    Parameters
    ----------
    location : str
        Of the object tier, for the nodes.
    folder : CheckpointFolder
        The same, for this process.
    encoder : Encoder or None
        Encodes what is in a slot of this host; None where there are no slots.
    coordinator : Coordinator
        Is told what is persisted.
    client : callable
        Opens a node by name and address.
    """

    def __init__(
        self,
        location: str,
        folder: CheckpointFolder,
        encoder: Encoder | None,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
    ) -> None:
        self._location, self._folder = location, folder
        self._encoder, self._coordinator, self._client = encoder, coordinator, client

    async def persist(
        self, manifest: Manifest, data: bytes, *, record: CommitRecord, source: Base | None
    ) -> Persisted:
        """Write a committed generation.

        Parameters
        ----------
        manifest, data : Manifest and its bytes
            The checkpoint.
        record : CommitRecord
            Names the nodes that hold it.
        source : Base or None
            The same checkpoint in a slot of this host: from it comes what no node can write. Without it,
            that is rebuilt from parity.

        Raises
        ------
        TierError
            If the object tier refused, or chunks are neither with a node nor in a slot, and parity does not
            give them.
        """
        directory = directory_name(manifest.generation, manifest.tag)
        if await asyncio.to_thread(self._begin, manifest):
            causes: list[str] = []
            written, left = await self._write_by_nodes(manifest, record, directory, causes)
            by_host = 0
            if left:
                if source is not None:
                    by_host = await self.write_from_slot(source, left, directory)
                else:
                    by_host = await self._write_rebuilt(manifest, left, record, directory, causes)
            await asyncio.to_thread(self.publish, manifest, data)
        else:
            written, by_host = 0, 0
        await asyncio.to_thread(
            self._coordinator.mark_persisted, manifest.run, manifest.generation, manifest.token
        )
        return Persisted(written, by_host)

    def _begin(self, manifest: Manifest) -> bool:
        """Make room for a committed generation; False if it is there already."""
        marker = self._folder.marker(directory_name(manifest.generation, manifest.tag))
        if marker is not None and marker.token == manifest.token:
            return False
        self._folder.clear_others(manifest)
        return True

    @property
    def _slot_encoder(self) -> Encoder:
        assert self._encoder is not None, "there are no slots on this host"
        return self._encoder

    def publish(self, manifest: Manifest, data: bytes) -> None:
        """Write the metadata, and the marker that makes the chunks of a generation a checkpoint."""
        self._folder.write_metadata(manifest)
        self._folder.publish(manifest, data)

    async def write_whole(self, snapshot: Snapshot, generation: int, stats: SaveStats) -> dict[str, str]:
        """Write every chunk of a snapshot that is not committed yet; return the digests."""
        directory = directory_name(generation, snapshot.tag)
        await asyncio.to_thread(self._folder.clear_uncommitted, directory)
        digests: dict[str, str] = {}

        async def write(chunks: list[EncodedChunk]) -> None:
            for chunk in chunks:
                digests[chunk.key] = chunk.digest
                await asyncio.to_thread(self._folder.write_chunk, directory, chunk.key, chunk.payload)
                stats.sent_bytes += chunk.payload.nbytes
                stats.chunks += 1

        jobs = list(jobs_for_objects(snapshot.content, budget_bytes=JOB_BYTES))
        await send_jobs(self._slot_encoder, jobs, write, snapshot.slot, None)
        return digests

    async def write_from_slot(self, source: Base, keys: Iterable[str], directory: str) -> int:
        """Encode data chunks from a slot and write them; return their bytes."""
        written = 0

        async def write(chunks: list[EncodedChunk]) -> None:
            nonlocal written
            for chunk in chunks:
                if chunk.digest != source.manifest.digests[chunk.key]:
                    raise TierError(f"chunk {chunk.key} changed in shared memory while it was persisted")
                await asyncio.to_thread(self._folder.write_chunk, directory, chunk.key, chunk.payload)
                written += chunk.payload.nbytes

        jobs = list(jobs_for_objects(source.content, keys, budget_bytes=JOB_BYTES))
        await send_jobs(self._slot_encoder, jobs, write, source.slot, None)
        return written

    async def _write_rebuilt(
        self, manifest: Manifest, keys: list[str], record: CommitRecord, directory: str, causes: list[str]
    ) -> int:
        """Rebuild data chunks from what the nodes have, and write them; return their bytes."""
        written = 0
        try:
            async for key, payload in rebuilt(manifest, keys, record=record, client=self._client):
                await asyncio.to_thread(self._folder.write_chunk, directory, key, payload)
                written += payload.nbytes
        except UnrecoverableError as error:
            raise TierError(
                f"generation {manifest.generation}: {len(keys)} chunks (first {keys[0]}) could be written by "
                f"no storage node, are not in shared memory, and cannot be rebuilt ({error}); it cannot be "
                f"persisted. Causes: {'; '.join(causes) or 'the nodes have no intact copy'}"
            ) from error
        return written

    async def _write_by_nodes(
        self, manifest: Manifest, record: CommitRecord, directory: str, causes: list[str]
    ) -> tuple[int, list[str]]:
        """Have each data shard written by its node; return the bytes, and the chunks that no node wrote."""
        if manifest.layout is None or not record.nodes:
            return 0, list(manifest.chunks)
        results = await together(
            self._write_shard(manifest, shard, record, directory, causes)
            for shard in range(manifest.layout.shards)
        )
        return sum(r[0] for r in results), [key for r in results for key in r[1]]

    async def _write_shard(
        self,
        manifest: Manifest,
        shard: int,
        record: CommitRecord,
        directory: str,
        causes: list[str],
    ) -> tuple[int, list[str]]:
        assert manifest.layout is not None
        keys = _keys_to_write(manifest, manifest.layout.keys_of(shard))
        client = self._client(record.nodes[shard], record.addresses[shard])
        identity: dict[str, Any] = {
            "run": manifest.run,
            "generation": manifest.generation,
            "token": manifest.token,
        }
        written, done = 0, 0
        missing: list[str] = []
        try:
            await client.pin(**identity)
            try:
                for batch in batches_of(keys, manifest.nbytes_of, budget_bytes=_BATCH_BYTES):
                    nbytes, lacking = await client.persist(
                        **identity,
                        location=self._location,
                        directory=directory,
                        keys=batch,
                        derived={
                            key: (source, manifest.chunks[key].dtype, manifest.digests[key])
                            for key in batch
                            if (source := manifest.sources.get(key)) is not None
                        },
                    )
                    written += nbytes
                    missing += lacking
                    done += len(batch)
            finally:
                await client.unpin(**identity)
        except FastCheckError as error:
            # Whatever kept the node from it: the host tries, and fails by itself where the object tier does.
            causes.append(f"shard {shard}: {error}")
            log.warning(
                "generation %d, shard %d: %s; the training host writes its chunks",
                manifest.generation,
                shard,
                error,
            )
        finally:
            await client.close()
        return written, missing + keys[done:]


def _keys_to_write(manifest: Manifest, held: Iterable[str]) -> list[str]:
    """Return the chunks that a node writes: those that it holds, each followed by the casts of it."""
    casts: dict[str, list[str]] = {}
    for key, source in manifest.sources.items():
        casts.setdefault(source, []).append(key)
    return [key for source in held for key in (source, *casts.get(source, ()))]
