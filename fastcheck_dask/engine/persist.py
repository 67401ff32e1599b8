"""Write a checkpoint to the object tier: by the nodes that hold it, or from the snapshot when there are none.

The order is what makes it safe: chunks, array metadata and the manifest first, the root group after them,
the commit marker last. A reader that finds the marker finds everything.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import starmap
from typing import Any

from fastcheck_dask.config import Group
from fastcheck_dask.coordination.base import CommitRecord, Coordinator
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compression import Meter
from fastcheck_dask.engine.object_writer import (
    ChunkWriter,
    Written,
    only_alike,
    write_chunks,
    write_encoded,
    write_raw,
)
from fastcheck_dask.engine.plan import batches_of, jobs_for_objects
from fastcheck_dask.engine.planning import Draft, Planned, PlannedPart, Planner
from fastcheck_dask.engine.rebuild import rebuilt
from fastcheck_dask.engine.references import digests_in
from fastcheck_dask.engine.retention import Retention, retire
from fastcheck_dask.engine.roots import retire_parts
from fastcheck_dask.engine.save import Base, Snapshot
from fastcheck_dask.engine.sending import JOB_BYTES, EncodedChunk, Encoder, send_jobs, together
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FastCheckError,
    TierError,
    UnrecoverableError,
)
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.sharing import keys_apart
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import WHOLE, Needs
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: Raw bytes of the chunks that a node is asked to write by one message.
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Persisted:
    """What persisting a generation moved."""

    by_nodes_bytes: int
    by_host_bytes: int
    #: Whether the coordinator knows; if not, persisting it again costs nothing and tells it.
    noted: bool = True


@dataclass(frozen=True)
class _Work:
    """A committed generation on its way into the object tier."""

    manifest: Manifest
    record: CommitRecord
    writer: ChunkWriter
    location: str
    planned: Planned
    #: What that location is going to have.
    stored: Manifest
    #: Why nodes did not write what they were asked to.
    causes: list[str] = field(default_factory=list)

    @property
    def directory(self) -> str:
        """Name of its directory there."""
        return directory_name(self.stored.generation, self.stored.tag)

    @property
    def keys(self) -> list[str]:
        """The chunks that are not with the others."""
        return keys_apart(self.stored, [other.manifest for other in self.planned.others])


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
    chains : ChainPolicy, optional
        When a checkpoint is stored against the one before it. Without it each is whole, unless another author
        of the same one said otherwise before.
    retention : Retention, optional
        What stays when a newer checkpoint is complete; everything, unless given.
    pacer : Pacer, optional
        Holds back the chunks that this process writes there.
    groups : sequence of Group, optional
        What goes there more rarely, or elsewhere.
    root_pacer : Pacer, optional
        Holds back the chunks that this process writes to roots of groups.
    """

    def __init__(
        self,
        location: str,
        folder: CheckpointFolder,
        encoder: Encoder | None,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
        *,
        chains: ChainPolicy | None = None,
        retention: Retention | None = None,
        pacer: Pacer | None = None,
        groups: Sequence[Group] = (),
        root_pacer: Pacer | None = None,
    ) -> None:
        self._writer = ChunkWriter(folder, pacer)
        self._retention = retention or Retention()
        self._planner = Planner(folder, chains, groups)
        self._groups, self._root_pacer = tuple(groups), root_pacer
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
        CommitConflictError
            If that number is another author's.
        TierError
            If the object tier refused, or chunks are neither with a node nor in a slot, and parity does not
            give them.
        """
        written = by_host = 0
        if not await asyncio.to_thread(self._is_there, manifest):
            planned = await asyncio.to_thread(self._planner.planned, Draft.of(manifest))
            # A part at the root of its group is published first: who finds the checkpoint finds it.
            works = [
                _Work(manifest, record, self._writer_of(part), part.location, part.planned, part.manifest)
                for part in planned.parts
            ]
            stored = planned.stored_as(manifest)
            works.append(_Work(manifest, record, self._writer, self._location, planned, stored))
            for work in works:
                moved = await self._write(work, source)
                written, by_host = written + moved[0], by_host + moved[1]
                if work is not works[-1]:
                    await asyncio.to_thread(
                        _publish_part, work.writer.folder, work.stored, work.planned.needs
                    )
            if stored is not manifest:
                data = stored.to_bytes()
            await asyncio.to_thread(self.publish, stored, data, planned.needs)
        noted = await asyncio.to_thread(self._note, manifest)
        await self._tell_nodes(record)
        return Persisted(written, by_host, noted)

    def _writer_of(self, part: PlannedPart) -> ChunkWriter:
        return ChunkWriter(part.folder, self._root_pacer)

    async def _write(self, work: _Work, source: Base | None) -> tuple[int, int]:
        """Write the chunks of a checkpoint to its location; return the bytes by nodes and by this host."""
        await asyncio.to_thread(work.writer.folder.clear_others, work.stored, needs=work.planned.needs)
        written, left = await self._write_by_nodes(work)
        if not left:
            return written, 0
        if source is not None:
            return written, await self._write_from_slot(work, source, left)
        return written, await self._write_rebuilt(work, left)

    def _note(self, manifest: Manifest) -> bool:
        """Tell the coordinator; the marker stands whether it can be told now or not."""
        generation = manifest.generation
        try:
            self._coordinator.mark_persisted(manifest.run, generation, manifest.token)
        except CommitConflictError:
            raise
        except CoordinationError as error:
            log.warning(
                "generation %d is persisted, and the coordinator does not know yet: %s", generation, error
            )
            return False
        return True

    async def retire(self, proven: int | None = None) -> None:
        """Remove what the rules do not keep; to be called when a newer checkpoint is complete.

        What cannot be removed now is next time; it is no reason to take a save for failed. See
        `engine.retention` for `proven`.
        """
        try:
            await asyncio.to_thread(retire, self._folder, self._retention, proven=proven)
            if not self._retention.keeps_all:
                await asyncio.to_thread(retire_parts, self._folder, self._groups)
        except FastCheckError as error:
            log.warning("old checkpoints could not be removed from %s: %s", self._location, error)

    async def _tell_nodes(self, record: CommitRecord) -> None:
        """Let the nodes evict the run once its lease has ended; who does not hear it asks the coordinator."""

        async def tell(name: str, address: str) -> None:
            client = self._client(name, address)
            try:
                await client.persisted(record.run, record.generation, record.token)
            except FastCheckError as error:
                log.debug(
                    "generation %d: node %s was not told of the persisting: %s",
                    record.generation,
                    name,
                    error,
                )
            finally:
                await client.close()

        await together(starmap(tell, zip(record.nodes, record.addresses, strict=True)))

    def _is_there(self, manifest: Manifest) -> bool:
        marker = self._folder.marker(directory_name(manifest.generation, manifest.tag))
        return marker is not None and marker.token == manifest.token

    @property
    def _slot_encoder(self) -> Encoder:
        assert self._encoder is not None, "there are no slots on this host"
        return self._encoder

    def publish(self, manifest: Manifest, data: bytes, needs: Needs = WHOLE) -> None:
        """Write the metadata, and the marker that makes the chunks of a generation a checkpoint."""
        self._folder.write_metadata(manifest, needs=needs)
        self._folder.publish(manifest, data, needs=needs)

    async def write_snapshot(
        self, run: str, snapshot: Snapshot, *, generation: int, before: Base | None, compress: bool
    ) -> Written:
        """Write the chunks of a snapshot that is not committed yet.

        Parameters
        ----------
        run, snapshot, generation
            What is written.
        before : Base or None
            The checkpoint in the other slot: deltas are made if it is the one that the policy wants as base.
        compress : bool
            If False the chunks are written whole and as they are.
        """
        directory = directory_name(generation, snapshot.tag)
        await asyncio.to_thread(self._folder.clear_uncommitted, directory)
        draft = Draft(
            run,
            generation,
            snapshot.tag,
            snapshot.token,
            snapshot.created_unix,
            snapshot.tree,
            snapshot.content.arrays,
            partial(digests_in, snapshot),
        )
        planned = await asyncio.to_thread(self._planner.planned, draft)
        written = Written(planned)
        for part in planned.parts:
            await asyncio.to_thread(part.folder.clear_uncommitted, part.directory)
            await self._write_of(
                _confined(snapshot, part.manifest.arrays),
                self._writer_of(part),
                part.planned,
                directory=directory,
                before=before,
                compress=compress,
                written=written,
            )
            changed = [k for k, d in part.manifest.digests.items() if written.digests.get(k) != d]
            if changed:
                raise TierError(f"chunk {changed[0]} changed in shared memory while it was written")
            await asyncio.to_thread(_publish_part, part.folder, part.manifest, part.planned.needs)
        there = {spec.path for part in planned.parts for spec in part.manifest.arrays}
        rest = [spec for spec in snapshot.content.arrays if spec.path not in there]
        await self._write_of(
            _confined(snapshot, rest) if there else snapshot,
            self._writer,
            planned,
            directory=directory,
            before=before,
            compress=compress,
            written=written,
            older=planned.older_keys(draft),
        )
        return written

    async def _write_of(
        self,
        snapshot: Snapshot,
        writer: ChunkWriter,
        planned: Planned,
        *,
        directory: str,
        before: Base | None,
        compress: bool,
        written: Written,
        older: Collection[str] = (),
    ) -> None:
        """Write the chunks of a snapshot to one location, but for those that the plan leaves to others."""
        base = planned.needs.base

        def elsewhere(key: str, digest: str) -> bool:
            return key in older or any(other.manifest.digests.get(key) == digest for other in planned.others)

        if not compress:
            await write_raw(writer, directory, snapshot, elsewhere=elsewhere, written=written)
            return
        if base is None or before is None or before.manifest.token != base.token:
            before = None
        else:
            before = only_alike(before, planned.others[0].manifest)
        await write_encoded(
            writer,
            directory,
            snapshot,
            encoder=self._slot_encoder,
            before=before,
            elsewhere=elsewhere,
            written=written,
        )

    async def _write_from_slot(self, work: _Work, source: Base, keys: Iterable[str]) -> int:
        """Encode data chunks from a slot and write them; return their bytes."""
        written = 0

        async def write(chunks: list[EncodedChunk]) -> None:
            nonlocal written
            for chunk in chunks:
                if chunk.digest != source.manifest.digests[chunk.key]:
                    raise TierError(f"chunk {chunk.key} changed in shared memory while it was persisted")
            payloads = [(chunk.key, (chunk.payload,)) for chunk in chunks]
            await write_chunks(work.writer, work.directory, payloads, Meter())
            written += sum(chunk.payload.nbytes for chunk in chunks)

        jobs = list(jobs_for_objects(source.content, keys, budget_bytes=JOB_BYTES))
        await send_jobs(self._slot_encoder, jobs, write, source.slot, None)
        return written

    async def _write_rebuilt(self, work: _Work, keys: list[str]) -> int:
        """Rebuild data chunks from what the nodes have, and write them; return their bytes."""
        written, manifest = 0, work.manifest
        try:
            async for chunk, payload in rebuilt(manifest, keys, record=work.record, client=self._client):
                await work.writer.write(work.directory, [(chunk.key, (payload,))])
                written += payload.nbytes
        except UnrecoverableError as error:
            raise TierError(
                f"generation {manifest.generation}: {len(keys)} chunks (first {keys[0]}) could be written by "
                f"no storage node, are not in shared memory, and cannot be rebuilt ({error}); it cannot be "
                f"persisted. Causes: {'; '.join(work.causes) or 'the nodes have no intact copy'}"
            ) from error
        return written

    async def _write_by_nodes(self, work: _Work) -> tuple[int, list[str]]:
        """Have each data shard written by its node; return the bytes, and the chunks that no node wrote."""
        layout, wanted = work.manifest.layout, work.keys
        if layout is None or not work.record.nodes:
            return 0, wanted
        chosen = set(wanted)
        by_shard = [
            [key for key in _keys_to_write(work.manifest, layout.keys_of(shard)) if key in chosen]
            for shard in range(layout.shards)
        ]
        results = await together(
            self._write_shard(work, shard, keys) for shard, keys in enumerate(by_shard) if keys
        )
        return sum(r[0] for r in results), [key for r in results for key in r[1]]

    async def _write_shard(self, work: _Work, shard: int, keys: list[str]) -> tuple[int, list[str]]:
        manifest = work.manifest
        client = self._client(work.record.nodes[shard], work.record.addresses[shard])
        identity: dict[str, Any] = {
            "run": manifest.run,
            "generation": manifest.generation,
            "token": manifest.token,
        }
        written, done = 0, 0
        missing: list[str] = []
        base = work.planned.needs.base
        try:
            await client.pin(**identity)
            try:
                for batch in batches_of(keys, manifest.nbytes_of, budget_bytes=_BATCH_BYTES):
                    nbytes, lacking = await client.persist(
                        **identity,
                        location=work.location,
                        directory=work.directory,
                        keys=batch,
                        derived={
                            key: (source, manifest.chunks[key].dtype, manifest.digests[key])
                            for key in batch
                            if (source := manifest.sources.get(key)) is not None
                        },
                        base=None if base is None else base.to_document(),
                    )
                    written += nbytes
                    missing += lacking
                    done += len(batch)
            finally:
                await client.unpin(**identity)
        except FastCheckError as error:
            # Whatever kept the node from it: the host tries, and fails by itself where the object tier does.
            work.causes.append(f"shard {shard}: {error}")
            log.warning(
                "generation %d, shard %d: %s; the training host writes its chunks",
                manifest.generation,
                shard,
                error,
            )
        finally:
            await client.close()
        return written, missing + keys[done:]


def _confined(snapshot: Snapshot, arrays: Iterable[ArraySpec]) -> Snapshot:
    """Return the snapshot with some of its arrays."""
    return replace(snapshot, content=replace(snapshot.content, arrays=tuple(arrays), _chunks={}))


def _publish_part(folder: CheckpointFolder, part: Manifest, needs: Needs) -> None:
    folder.write_metadata(part, needs=needs)
    folder.publish(part, needs=needs)


def _keys_to_write(manifest: Manifest, held: Iterable[str]) -> list[str]:
    """Return the chunks that a node writes: those that it holds, each followed by the casts of it."""
    casts: dict[str, list[str]] = {}
    for key, source in manifest.sources.items():
        casts.setdefault(source, []).append(key)
    return [key for source in held for key in (source, *casts.get(source, ()))]
