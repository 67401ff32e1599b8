"""Save a snapshot to the storage nodes: begin, send, prepare, commit.

What must hold: before the coordinator has the commit record nothing of the save can be loaded; after it has,
every node of the group holds its shard (staged or committed) and the manifest. Whatever fails before that
moment leaves the former checkpoint in force on every node.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastcheck_codecs import is_delta

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, RunClaim
from fastcheck_dask.engine.compression import CompressionPolicy, Meter
from fastcheck_dask.engine.plan import Content, jobs_for_peers
from fastcheck_dask.engine.reservation import Reservations, Room, shard_sizes
from fastcheck_dask.engine.sending import JOB_BYTES, EncodedChunk, Encoder, send_jobs, together
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FencedError,
    NodeFullError,
    StaleBaseError,
)
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.layout.stripes import Layout, assign
from fastcheck_dask.placement.policy import Choice
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: How long a commit is tried again while the coordinator does not answer, in seconds.
COMMIT_PATIENCE = 30.0
_COMMIT_RETRY = 0.5
#: As long as every digest.
_NO_DIGEST = "0" * 32


@dataclass(frozen=True)
class Snapshot:
    """A complete copy of the state in a slot, not yet committed."""

    slot: Path
    token: str
    tag: str
    created_unix: float
    tree: Any
    content: Content
    #: Of all arrays; what is inline in the tree does not count.
    raw_bytes: int
    #: Digests of the chunks of derived arrays, which are not sent.
    derived_digests: Mapping[str, str] = field(default_factory=dict, repr=False)


@dataclass(frozen=True)
class Base:
    """The committed checkpoint that a slot holds: what deltas are made against."""

    slot: Path
    manifest: Manifest
    content: Content


@dataclass
class SaveStats:
    """What a save moved."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    #: Of `raw_bytes`, those of derived arrays: verified here and not sent.
    derived_bytes: int = 0
    #: Of the chunks sent, how many were deltas against the base.
    deltas: int = 0
    chunks: int = 0
    nodes: tuple[str, ...] = ()
    degraded: str | None = None
    seconds: float = 0.0
    #: False: the chunks went raw and whole, because the links are faster than the encoders or by setting.
    compressed: bool = True
    #: Raw bytes that one encoder process took in a second, and bytes that all nodes together took.
    encode_bytes_per_second: float | None = None
    link_bytes_per_second: float | None = None


@dataclass(frozen=True)
class Saved:
    """A committed save."""

    record: CommitRecord
    manifest: Manifest
    manifest_bytes: bytes
    stats: SaveStats


class PeerSaver:
    """Saves snapshots of one run to storage nodes. Belongs to one event loop; one save at a time."""

    def __init__(
        self,
        run: str,
        coordinator: Coordinator,
        claim: RunClaim,
        encoder: Encoder,
        client: Callable[[str, str], PeerClient],
        *,
        compression: CompressionPolicy | None = None,
    ) -> None:
        self._compression = compression or CompressionPolicy("always", 1)
        self._reservations = Reservations()
        self._run = run
        self._coordinator = coordinator
        self._claim = claim
        self._encoder = encoder
        self._client = client

    async def save(
        self,
        snapshot: Snapshot,
        choice: Choice,
        *,
        latest: CommitRecord | None,
        base: Base | None,
        generation: int,
        seal: Callable[[bytes], None],
    ) -> Saved:
        """Make a snapshot the newest committed generation.

        Parameters
        ----------
        snapshot : Snapshot
            What is saved.
        choice : Choice
            The nodes, at least one.
        latest : CommitRecord or None
            The newest committed generation; its chunks on the nodes are protected, and are the base.
        base : Base or None
            The same checkpoint in the other slot, if this host has it.
        generation : int
            The number of the new one.
        seal : callable
            Stores the manifest beside the snapshot just before the commit, so that after a crash the slot
            is known to hold it.

        Raises
        ------
        NodeUnavailableError, TierFullError, StaleBaseError
            A node could not take its shard; nothing has changed.
        CommitConflictError, FencedError
            Another owner decided; nothing of this save is visible.
        CoordinationError
            The coordinator did not answer for `COMMIT_PATIENCE` seconds. Whether the commit happened is found
            out by asking for `latest` before the next save.
        """
        attempt = partial(
            self._save, snapshot, choice, latest=latest, base=base, generation=generation, seal=seal
        )
        if self._compression.compresses(snapshot.raw_bytes):
            return await attempt(compress=True)
        try:
            return await attempt(compress=False)
        except NodeFullError as error:
            if not self._compression.refuse_raw():
                raise
            log.warning("generation %d is compressed after all: %s", generation, error)
            return await attempt(compress=True)

    async def _save(
        self,
        snapshot: Snapshot,
        choice: Choice,
        *,
        latest: CommitRecord | None,
        base: Base | None,
        generation: int,
        seal: Callable[[bytes], None],
        compress: bool,
    ) -> Saved:
        if base is not None and (latest is None or base.manifest.token != latest.token):
            base = None
        layout = _layout(snapshot, choice, base)
        content = Content(snapshot.content.arrays, snapshot.content.placement, layout)
        clients = [self._client(node.name, node.address) for node in choice.nodes]
        # What goes raw goes whole. The stripes are those of the base in any case.
        before = base if compress else None
        draft = partial(manifest_of, self._run, generation, snapshot, choice=choice, layout=layout)
        room = self._reservations.room(
            shard_sizes(content),
            manifest_bytes=len(draft(dict.fromkeys(layout.position, _NO_DIGEST)).to_bytes()),
            compress=compress,
        )
        attempt = _Attempt(self._claim, snapshot, choice, clients, room)
        try:
            try:
                whole = await attempt.begin(layout, generation, latest, deltas=before is not None)
                jobs = [
                    replace(job, compress=compress)
                    for job in jobs_for_peers(
                        content, before.content if before else None, whole, budget_bytes=JOB_BYTES
                    )
                ]
                await send_jobs(
                    self._encoder, jobs, attempt.put, snapshot.slot, before.slot if before else None
                )
                manifest = draft(attempt.digests)
                data = manifest.to_bytes()
                await attempt.prepare(data)
                await asyncio.to_thread(seal, data)
            except BaseException as error:
                if isinstance(error, NodeFullError) and room.sent_bytes:
                    self._reservations.forget()
                await attempt.abort()
                raise
            record = record_of(manifest, data, choice, snapshot.raw_bytes)
            try:
                record = await publish(self._coordinator, record, self._claim)
            except (CommitConflictError, FencedError):
                await attempt.abort()
                raise
            # From here on it is committed: a node that does not hear so learns it at the next save or load.
            await attempt.announce(generation)
        finally:
            await attempt.close()
        self._compression.observe(attempt.meter, compressed=compress)
        self._reservations.learn(room)
        attempt.stats.compressed = compress
        attempt.stats.encode_bytes_per_second = attempt.meter.encode_bytes_per_second
        attempt.stats.link_bytes_per_second = attempt.meter.link_bytes_per_second
        return Saved(record, manifest, data, attempt.stats)


async def publish(coordinator: Coordinator, record: CommitRecord, claim: RunClaim) -> CommitRecord:
    """Commit, trying again while the coordinator does not answer: the token makes that safe."""
    deadline = Deadline.after(COMMIT_PATIENCE)
    while True:
        try:
            return await asyncio.to_thread(coordinator.commit, record, claim)
        except (CommitConflictError, FencedError):
            raise
        except CoordinationError as error:
            if deadline.passed:
                raise
            log.warning("generation %d: the commit is tried again: %s", record.generation, error)
            await asyncio.sleep(_COMMIT_RETRY)


class _Attempt:
    """One save on its way: the connections to its nodes and what was sent so far."""

    def __init__(
        self, claim: RunClaim, snapshot: Snapshot, choice: Choice, clients: list[PeerClient], room: Room
    ) -> None:
        self._room = room
        self._run, self._order, self._token = claim.run, claim.order, snapshot.token
        self._names = tuple(node.name for node in choice.nodes)
        self._clients = clients
        self.digests: dict[str, str] = {}
        self.meter = Meter()
        self.stats = SaveStats(
            raw_bytes=snapshot.raw_bytes,
            derived_bytes=sum(a.nbytes for a in snapshot.content.arrays if a.source is not None),
            nodes=self._names,
            degraded=choice.degraded,
        )

    async def begin(
        self, layout: Layout, generation: int, latest: CommitRecord | None, *, deltas: bool
    ) -> Collection[str]:
        """Announce the save to every node; return the keys that have to go whole, whatever base there is.

        `deltas` says whether chunks go as deltas to nodes that hold their base.
        """

        async def one(shard: int, client: PeerClient) -> Sequence[str]:
            keys = layout.keys_of(shard)
            arguments: dict[str, Any] = {
                "run": self._run,
                "generation": generation,
                "token": self._token,
                "shard": shard,
                "keys": list(keys),
                "order": self._order,
            }
            if latest is None or self._names[shard] not in latest.nodes:
                await self._reserve(shard, partial(client.begin, base=None, **arguments))
                return keys
            if deltas:
                self._room.deltas.add(shard)
            try:
                # Naming what is committed also protects it, where the node has not heard of the commit.
                base = latest.generation, latest.token
                return await self._reserve(shard, partial(client.begin, base=base, **arguments))
            except StaleBaseError as error:
                log.warning("generation %d, shard %d goes whole: %s", generation, shard, error)
                self._room.deltas.discard(shard)
                await self._reserve(shard, partial(client.begin, base=None, **arguments))
                return keys

        found = await together(one(shard, client) for shard, client in enumerate(self._clients))
        return {key for keys in found for key in keys}

    async def _reserve(self, shard: int, begin: Callable[..., Awaitable[list[str]]]) -> Sequence[str]:
        """Begin with what the save is likely to take; with less if the node has less, and it may do."""
        wish = self._room.wish(shard)
        try:
            return await begin(reserve_bytes=wish.wanted_bytes)
        except NodeFullError as error:
            if error.free_bytes < wish.least_bytes or wish.least_bytes == wish.wanted_bytes:
                raise
            return await begin(reserve_bytes=min(error.free_bytes, wish.wanted_bytes))

    async def put(self, chunks: list[EncodedChunk]) -> None:
        """Send the chunks of one job, to all nodes at once."""
        by_shard: dict[int, list[EncodedChunk]] = {}
        for chunk in chunks:
            by_shard.setdefault(chunk.shard, []).append(chunk)
            self.digests[chunk.key] = chunk.digest
            self.meter.encoded(chunk.raw_nbytes, chunk.encode_seconds)
        with self.meter.sending(sum(chunk.payload.nbytes for chunk in chunks)):
            await together(
                self._clients[shard].put(
                    run=self._run,
                    token=self._token,
                    chunks=[chunk.descriptor for chunk in group],
                    frames=[chunk.payload for chunk in group],
                )
                for shard, group in by_shard.items()
            )
        for chunk in chunks:
            self._room.sent(chunk.shard, chunk.payload.nbytes)
        self.stats.chunks += len(chunks)
        self.stats.deltas += sum(is_delta(chunk.payload) for chunk in chunks)
        self.stats.sent_bytes += sum(chunk.payload.nbytes for chunk in chunks)

    async def prepare(self, manifest: bytes) -> None:
        """Have every node promise that it can commit; it keeps its shard and the manifest until told."""
        digest = digest_of_manifest(manifest)
        await together(
            client.prepare(self._run, self._token, digest=digest, manifest=manifest)
            for client in self._clients
        )

    async def abort(self) -> None:
        """Drop what is staged, where the node can still be reached."""
        await asyncio.gather(
            *(client.abort(run=self._run, token=self._token) for client in self._clients),
            return_exceptions=True,
        )

    async def announce(self, generation: int) -> None:
        """Tell the nodes of the commit."""
        results = await asyncio.gather(
            *(
                client.commit(run=self._run, generation=generation, token=self._token)
                for client in self._clients
            ),
            return_exceptions=True,
        )
        for name, result in zip(self._names, results, strict=True):
            if isinstance(result, Exception):
                log.warning("generation %d: node %s was not told of the commit: %s", generation, name, result)

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(client.close() for client in self._clients), return_exceptions=True)


def _layout(snapshot: Snapshot, choice: Choice, base: Base | None) -> Layout:
    previous = base.manifest.layout if base is not None else None
    return assign(
        snapshot.content.sizes_at_peers, shards=choice.shards, parity=choice.parity, previous=previous
    )


def manifest_of(
    run: str,
    generation: int,
    snapshot: Snapshot,
    digests: dict[str, str],
    *,
    choice: Choice,
    layout: Layout | None,
) -> Manifest:
    """Return the manifest of a snapshot whose chunks, unless derived, have these digests."""
    return Manifest(
        run=run,
        generation=generation,
        tag=snapshot.tag,
        token=snapshot.token,
        created_unix=snapshot.created_unix,
        tree=snapshot.tree,
        arrays=snapshot.content.arrays,
        digests={**snapshot.derived_digests, **digests},
        layout=layout,
        nodes=tuple(node.name for node in choice.nodes),
    )


def record_of(manifest: Manifest, data: bytes, choice: Choice, raw_bytes: int) -> CommitRecord:
    """Return the commit record of a manifest."""
    return CommitRecord(
        run=manifest.run,
        generation=manifest.generation,
        tag=manifest.tag,
        token=manifest.token,
        manifest_digest=digest_of_manifest(data),
        nodes=tuple(node.name for node in choice.nodes),
        addresses=tuple(node.address for node in choice.nodes),
        shards=choice.shards,
        parity=choice.parity,
        raw_bytes=raw_bytes,
        created_unix=manifest.created_unix,
    )
