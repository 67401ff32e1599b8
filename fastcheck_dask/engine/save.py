"""Save a snapshot to the storage nodes: begin, send, prepare, commit.

What must hold: before the coordinator has the commit record nothing of the save can be loaded; after it has,
every node of the group holds its shard (staged or committed) and the manifest. Whatever fails before that
moment leaves the former checkpoint in force on every node.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo, RunClaim
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.dealing import Dealer
from fastcheck_dask.engine.delivery import Delivery, Substitute
from fastcheck_dask.engine.plan import Content, jobs_for_peers
from fastcheck_dask.engine.reservation import Reservations, shard_sizes
from fastcheck_dask.engine.sending import JOB_BYTES, Encoder, send_jobs
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FastCheckError,
    FencedError,
    NodeFullError,
)
from fastcheck_dask.layout.health import notes_of
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.layout.notes import Notes
from fastcheck_dask.layout.stripes import Layout
from fastcheck_dask.placement.policy import Choice
from fastcheck_dask.tiers.local import Slot
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
    #: What the user said of it.
    metrics: Mapping[str, float] = field(default_factory=dict)
    #: The slot, if this process keeps it mapped.
    opened: Slot | None = field(default=None, repr=False, compare=False)


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
    #: Nodes that failed during the save and were replaced, each with the reason.
    replaced: dict[str, str] = field(default_factory=dict)
    #: Bytes and seconds of what each node took.
    transfers: dict[str, tuple[int, float]] = field(default_factory=dict)
    degraded: str | None = None
    #: Why the checkpoint is not taken for healthy.
    flags: tuple[str, ...] = ()
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
    #: Why no storage node has it, where some were tried.
    unplaced: FastCheckError | None = None


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
        substitute: Substitute | None = None,
    ) -> None:
        self._compression = compression or CompressionPolicy("always", 1)
        self._reservations = Reservations()
        self._dealer = Dealer()
        self._run = run
        self._coordinator = coordinator
        self._claim = claim
        self._encoder = encoder
        self._client = client
        self._substitute = substitute
        self._attempts = itertools.count(1)

    async def save(
        self,
        snapshot: Snapshot,
        choice: Choice,
        *,
        latest: CommitRecord | None,
        base: Base | None,
        generation: int,
        seal: Callable[[bytes], None],
        before: Manifest | None = None,
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
        before : Manifest, optional
            Of the checkpoint before, base or not: what is suspicious is judged by it.

        Raises
        ------
        NodeUnavailableError, TierFullError, StaleBaseError
            A node could not take its shard, and no other was to be had; nothing has changed.
        CommitConflictError, FencedError
            Another owner decided; nothing of this save is visible.
        CoordinationError
            The coordinator did not answer for `COMMIT_PATIENCE` seconds. Whether the commit happened is found
            out by asking for `latest` before the next save.
        """
        attempt = partial(
            self._save,
            snapshot,
            choice,
            latest=latest,
            base=base,
            generation=generation,
            seal=seal,
            before=before,
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
        before: Manifest | None,
        compress: bool,
    ) -> Saved:
        if base is not None and (latest is None or base.manifest.token != latest.token):
            base = None
        choice, layout = self._deal(snapshot, choice, base, compress=compress)
        content = Content(snapshot.content.arrays, snapshot.content.placement, layout)
        # What goes raw goes whole. The stripes are those of the base in any case.
        against = base if compress else None
        delivery = self._delivery(
            snapshot,
            content,
            choice.nodes,
            latest=latest,
            generation=generation,
            compress=compress,
            deltas=against is not None,
        )
        try:
            manifest, data = await self._held(
                delivery, snapshot, content, against, compress=compress, before=before, seal=seal
            )
            choice = replace(choice, nodes=delivery.nodes)
            record = record_of(manifest, data, choice, snapshot.raw_bytes)
            try:
                record = await publish(self._coordinator, record, self._claim)
            except (CommitConflictError, FencedError):
                await delivery.abort()
                raise
            # From here on it is committed: a node that does not hear so learns it at the next save or load.
            await delivery.announce()
        finally:
            await delivery.close()
        if not delivery.replaced:
            # The time that a node's failure took says nothing about the link.
            self._compression.observe(delivery.meter, compressed=compress)
        self._reservations.learn(delivery.room)
        self._dealer.done()
        stats = _stats(snapshot, choice, delivery, compressed=compress)
        stats.flags = manifest.notes.flags
        return Saved(record, manifest, data, stats)

    def _delivery(
        self,
        snapshot: Snapshot,
        content: Content,
        nodes: Sequence[NodeInfo],
        *,
        latest: CommitRecord | None,
        generation: int,
        compress: bool,
        deltas: bool,
    ) -> Delivery:
        """Return what brings a snapshot to its nodes, and knows how much room it asks them for."""
        layout = content.layout
        assert layout is not None
        digests = dict.fromkeys(layout.position, _NO_DIGEST)
        draft = manifest_of(self._run, generation, snapshot, digests, nodes=nodes, layout=layout)
        room = self._reservations.room(
            shard_sizes(content), manifest_bytes=len(draft.to_bytes()), compress=compress
        )
        return Delivery(
            self._claim,
            (generation, snapshot.token),
            attempt=next(self._attempts),
            layout=layout,
            nodes=nodes,
            latest=latest,
            client=self._client,
            room=room,
            deltas=deltas,
            substitute=self._substitute,
        )

    async def _held(
        self,
        delivery: Delivery,
        snapshot: Snapshot,
        content: Content,
        base: Base | None,
        *,
        compress: bool,
        before: Manifest | None,
        seal: Callable[[bytes], None],
    ) -> tuple[Manifest, bytes]:
        """Have nodes and slot hold everything but the commit, or the nodes nothing; see `_deliver`."""
        try:
            manifest, data = await self._deliver(
                delivery, snapshot, content, base, compress=compress, before=before
            )
            await asyncio.to_thread(seal, data)
        except BaseException as error:
            if isinstance(error, NodeFullError) and delivery.room.sent_bytes:
                self._reservations.forget()
            await delivery.abort()
            raise
        return manifest, data

    def _deal(
        self, snapshot: Snapshot, choice: Choice, base: Base | None, *, compress: bool
    ) -> tuple[Choice, Layout]:
        """Deal a snapshot to the chosen nodes; return them by shard, and the layout."""
        deal = self._dealer.deal(
            snapshot.content.sizes_at_peers,
            shards=choice.shards,
            parity=choice.parity,
            weights=choice.weights,
            previous=base.manifest.layout if base is not None else None,
            delta_share=self._reservations.delta_share if compress else 1.0,
        )
        if deal.anew:
            log.info("the stripes are dealt anew: the bandwidths of the nodes have changed")
        return choice.arranged(deal.order), deal.layout

    async def _deliver(
        self,
        delivery: Delivery,
        snapshot: Snapshot,
        content: Content,
        base: Base | None,
        *,
        compress: bool,
        before: Manifest | None,
    ) -> tuple[Manifest, bytes]:
        """Have every node hold its shard and promise to commit; return the manifest that they hold, too."""
        await delivery.begin()
        while True:
            while lacking := delivery.lacking():
                jobs = [
                    replace(job, compress=compress)
                    for job in jobs_for_peers(
                        content,
                        base.content if base else None,
                        delivery.whole,
                        budget_bytes=JOB_BYTES,
                        only=lacking,
                    )
                ]
                await send_jobs(
                    self._encoder,
                    jobs,
                    delivery.put,
                    snapshot.slot,
                    base.slot if base else None,
                    current_job=delivery.current,
                )
            manifest = manifest_of(
                self._run,
                delivery.generation,
                snapshot,
                delivery.digests,
                nodes=delivery.nodes,
                layout=content.layout,
                notes=notes_of(
                    snapshot.metrics,
                    snapshot.tree,
                    chunks=content.chunks,
                    digests=delivery.digests,
                    nonfinite=delivery.nonfinite,
                    before=before,
                ),
            )
            data = manifest.to_bytes()
            if await delivery.prepare(data):
                return manifest, data


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


def manifest_of(
    run: str,
    generation: int,
    snapshot: Snapshot,
    digests: dict[str, str],
    *,
    nodes: Sequence[NodeInfo],
    layout: Layout | None,
    notes: Notes | None = None,
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
        nodes=tuple(node.name for node in nodes),
        notes=notes or Notes(),
    )


def _stats(snapshot: Snapshot, choice: Choice, delivery: Delivery, *, compressed: bool) -> SaveStats:
    return SaveStats(
        raw_bytes=snapshot.raw_bytes,
        sent_bytes=delivery.sent_bytes,
        derived_bytes=sum(a.nbytes for a in snapshot.content.arrays if a.source is not None),
        deltas=delivery.deltas,
        chunks=len(delivery.digests),
        nodes=tuple(node.name for node in choice.nodes),
        replaced=dict(delivery.replaced),
        transfers=dict(delivery.transfers),
        degraded=choice.degraded,
        compressed=compressed,
        encode_bytes_per_second=delivery.meter.encode_bytes_per_second,
        link_bytes_per_second=delivery.meter.link_bytes_per_second,
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
