"""Bring a shard of a committed generation back to a node: rebuilt from the others, chunk by chunk."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import asdict, dataclass, replace
from typing import Any

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.engine.plan import MESSAGE_CHUNKS
from fastcheck_dask.engine.rebuild import rebuilt
from fastcheck_dask.errors import FastCheckError, TierError, UnrecoverableError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

log = logging.getLogger(__name__)

#: Encoded bytes that one message brings to the node, unless a single chunk has more.
_MESSAGE_BYTES = 8 * 2**20


@dataclass(frozen=True)
class RepairOrder:
    """Which shard is brought to which node."""

    #: The newest committed generation of its run.
    record: CommitRecord
    shard: int
    #: Who holds the shard afterwards: another node than the record says, or the same one.
    node: str
    address: str
    #: Shards that are not asked for anything: their nodes are gone, or this one is repaired in place.
    gone: tuple[int, ...] = ()
    #: Of the object tier, if it has the generation.
    location: str | None = None
    #: What the shard is likely to take on the node.
    reserve_bytes: int = 0
    #: What it may bring to the node in a second; None: no limit.
    bytes_per_second: float | None = None

    @property
    def moved(self) -> CommitRecord:
        """The record as it is once the node has the shard."""
        nodes, addresses = list(self.record.nodes), list(self.record.addresses)
        nodes[self.shard], addresses[self.shard] = self.node, self.address
        return self.record.held_by(tuple(nodes), tuple(addresses))

    def to_plain(self) -> dict[str, Any]:
        """Return plain values, for a task on another machine."""
        return {**asdict(self), "record": self.record.to_bytes()}

    @classmethod
    def from_plain(cls, values: dict[str, Any]) -> RepairOrder:
        """Undo :meth:`to_plain`."""
        return replace(cls(**values), record=CommitRecord.from_bytes(values["record"]))


@dataclass(frozen=True)
class Repaired:
    """What a repair moved."""

    chunks: int
    raw_bytes: int
    sent_bytes: int


async def repair_shard(order: RepairOrder, client: Callable[[str, str], PeerClient]) -> Repaired:
    """Bring to a node what it lacks of a shard; every chunk is verified on the way and by the node.

    Nothing is decided here: the record of the commit still names the former node. Whoever does the same
    besides, or again, adds what is missing; a newer generation on the node ends it.

    Parameters
    ----------
    order : RepairOrder
        What to do.
    client : callable
        Opens a node by name and address.

    Raises
    ------
    UnrecoverableError
        If a chunk, or the manifest, cannot be had from any source.
    StaleBaseError, ShardUnavailableError
        If the node has a newer generation.
    NodeUnavailableError, NodeFullError
        If the node cannot take it.
    """
    record = order.record
    causes: list[str] = []
    found = await manifest_from_nodes(_asked(order), client, causes=causes)
    if found is None:
        what = f"the manifest of generation {record.generation} of run {record.run}"
        raise UnrecoverableError(what, tuple(causes))
    manifest, data = found
    stored = await asyncio.to_thread(_stored, order, manifest)
    node = client(order.node, order.address)
    identity = (record.run, record.generation, record.token)
    try:
        absent = await node.adopt(
            *identity, shard=order.shard, manifest=data, reserve_bytes=order.reserve_bytes
        )
        load = _Load(node, manifest, Pacer(order.bytes_per_second))
        async with aclosing(
            rebuilt(manifest, absent, record=record, client=client, stored=stored, without=order.gone)
        ) as chunks:
            async for descriptor, payload in chunks:
                await load.add(descriptor, payload)
        await load.send()
        if left := await node.adopt(*identity, shard=order.shard, manifest=data, reserve_bytes=0):
            raise TierError(
                f"node {order.node} lacks {len(left)} chunks of shard {order.shard} of generation "
                f"{record.generation} of {record.run} after its repair, among them {left[0]}; try again"
            )
    finally:
        await node.close()
    return load.repaired


def _stored(order: RepairOrder, manifest: Manifest) -> StoredCheckpoint | None:
    """Return the generation as the object tier has it; None if it does not, or cannot say so."""
    if order.location is None:
        return None
    try:
        folder = CheckpointFolder(open_store(order.location))
        marker = folder.marker(directory_name(manifest.generation, manifest.tag))
    except FastCheckError as error:
        log.warning("a repair of run %s goes without the object tier: %s", manifest.run, error)
        return None
    if marker is None or marker.token != manifest.token:
        return None
    return StoredCheckpoint(folder, marker, manifest)


def _asked(order: RepairOrder) -> CommitRecord:
    """Return the record without the nodes that are gone."""
    left = [shard for shard in range(len(order.record.nodes)) if shard not in order.gone]
    return order.record.held_by(
        tuple(order.record.nodes[shard] for shard in left),
        tuple(order.record.addresses[shard] for shard in left),
    )


class _Load:
    """Chunks on their way to a node, some in each message."""

    def __init__(self, node: PeerClient, manifest: Manifest, pacer: Pacer) -> None:
        self._pacer = pacer
        self._node, self._identity = node, (manifest.run, manifest.generation, manifest.token)
        self._waiting: list[tuple[Descriptor, Bits]] = []
        self.repaired = Repaired(0, 0, 0)

    async def add(self, descriptor: Descriptor, payload: Bits) -> None:
        """Take one more, when its turn comes; send what waits when it is enough for a message."""
        await self._pacer.wait_for_tokens(payload.nbytes)
        self._waiting.append((descriptor, payload))
        nbytes = sum(waiting.nbytes for _, waiting in self._waiting)
        if nbytes >= _MESSAGE_BYTES or len(self._waiting) == MESSAGE_CHUNKS:
            await self.send()

    async def send(self) -> None:
        """Send what waits."""
        chunks, self._waiting = self._waiting, []
        if not chunks:
            return
        await self._node.repair(
            *self._identity, chunks=[chunk for chunk, _ in chunks], frames=[payload for _, payload in chunks]
        )
        self.repaired = Repaired(
            self.repaired.chunks + len(chunks),
            self.repaired.raw_bytes + sum(chunk.raw_nbytes for chunk, _ in chunks),
            self.repaired.sent_bytes + sum(payload.nbytes for _, payload in chunks),
        )
