"""Bring the encoded chunks of one save to its nodes; a node that fails on the way is replaced.

What a node has acknowledged is noted with its seat. When a shard gets another node, or has to begin anew on
the same one, the note goes with the old seat, and what the new one lacks is sent again. Other shards go on.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from fastcheck_codecs import is_delta

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo, RunClaim
from fastcheck_dask.engine.compression import Meter
from fastcheck_dask.engine.plan import Job
from fastcheck_dask.engine.reservation import Room
from fastcheck_dask.engine.sending import EncodedChunk, together
from fastcheck_dask.errors import (
    ClosedError,
    FastCheckError,
    NodeFullError,
    NodeUnavailableError,
    ShardCorruptError,
    StaleBaseError,
)
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.layout.stripes import Layout
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: Gives another node for a shard whose node failed, or None. Gets the nodes of the other shards, the names
#: that must not be chosen, the node that failed, and its error.
Substitute = Callable[
    [Sequence[NodeInfo], Collection[str], NodeInfo, FastCheckError], Awaitable[NodeInfo | None]
]


@dataclass(eq=False)
class _Seat:
    """A node that takes a shard, until it fails."""

    node: NodeInfo
    client: PeerClient
    #: Keys that the node has no base for: they go whole.
    whole: Collection[str]
    #: Whether the shard was begun a second time on this node.
    renewed: bool = False
    #: Keys that the node has acknowledged, and those of them that came as deltas.
    held: set[str] = field(default_factory=set)
    deltas: set[str] = field(default_factory=set)


class Delivery:
    """One save on its way to its nodes. Belongs to one event loop.

    Parameters
    ----------
    claim : RunClaim
        Of the run.
    name : (int, str)
        Generation and token of the save.
    attempt : int
        Grows with each delivery under this claim: late messages of an earlier one change nothing.
    layout : Layout
        Which chunk belongs to which shard.
    nodes : sequence of NodeInfo
        By shard, the parity nodes last.
    latest : CommitRecord or None
        The newest committed generation: what deltas are made against.
    client : callable
        Makes a client of a node's name and address.
    room : Room
        How much each node is asked to set aside; counts what it was sent.
    deltas : bool
        Whether chunks go as deltas to nodes that hold their base.
    substitute : callable, optional
        Finds a node for a shard whose node failed. Without it, or if it finds none, that node's error ends
        the save.
    """

    def __init__(
        self,
        claim: RunClaim,
        name: tuple[int, str],
        *,
        attempt: int = 0,
        layout: Layout,
        nodes: Sequence[NodeInfo],
        latest: CommitRecord | None,
        client: Callable[[str, str], PeerClient],
        room: Room,
        deltas: bool,
        substitute: Substitute | None = None,
    ) -> None:
        self.room, self._as_deltas = room, deltas
        self._run, self._order = claim.run, claim.order
        self.generation, self._token = name
        self._attempt = attempt
        self._layout = layout
        self._latest = latest
        self._client = client
        self._substitute = substitute
        self._chosen = list(nodes)
        self._seats: dict[int, _Seat] = {}
        #: One for each node that was ever asked; a node has at most one shard of a save.
        self._clients: dict[str, PeerClient] = {}
        self._replacing = [asyncio.Lock() for _ in nodes]
        self._choosing = asyncio.Lock()
        self.digests: dict[str, str] = {}
        #: Keys of the chunks that hold a NaN or an infinity.
        self.nonfinite: set[str] = set()
        self.meter = Meter()
        self.sent_bytes = 0
        #: Of each node that took anything.
        self._meters: dict[str, Meter] = {}
        #: Names of the nodes that failed, each with the reason.
        self.replaced: dict[str, str] = {}

    # ---- what there is

    @property
    def nodes(self) -> tuple[NodeInfo, ...]:
        """The nodes by shard as they are now."""
        return tuple(self._chosen)

    @property
    def whole(self) -> set[str]:
        """The keys that have to go whole as it is now."""
        return {key for seat in self._seats.values() for key in seat.whole}

    @property
    def transfers(self) -> dict[str, tuple[int, float]]:
        """Bytes that each node took, and the seconds in which it had something to take."""
        return {name: (meter.sent_bytes, meter.link_seconds) for name, meter in self._meters.items()}

    @property
    def deltas(self) -> int:
        """How many of the chunks that the nodes hold came as deltas."""
        return sum(len(seat.deltas) for seat in self._seats.values())

    def lacking(self) -> set[str]:
        """Return the keys that their node has not acknowledged."""
        seats = self._seats.items()
        return {key for shard, seat in seats for key in self._layout.keys_of(shard) if key not in seat.held}

    def current(self, job: Job) -> Job:
        """Return a job that was planned earlier as it is to be encoded now: no deltas that nobody takes."""
        if all(task.base is None or task.key not in self._seats[task.shard].whole for task in job.tasks):
            return job
        tasks = (replace(t, base=None) if t.key in self._seats[t.shard].whole else t for t in job.tasks)
        return replace(job, tasks=tuple(tasks))

    # ---- the phases

    async def begin(self) -> None:
        """Announce the save to every node."""
        await together(self._begin_shard(shard, node) for shard, node in enumerate(self._chosen))

    async def put(self, chunks: list[EncodedChunk]) -> None:
        """Send the chunks of one job, to all nodes at once; what a new node cannot take is `lacking` then."""
        by_shard: dict[int, list[EncodedChunk]] = {}
        for chunk in chunks:
            by_shard.setdefault(chunk.shard, []).append(chunk)
            self.digests[chunk.key] = chunk.digest
            if chunk.nonfinite:
                self.nonfinite.add(chunk.key)
            self.meter.encoded(chunk.raw_nbytes, chunk.encode_seconds)
        with self.meter.sending(sum(chunk.payload.nbytes for chunk in chunks)):
            await together(self._put_shard(shard, group) for shard, group in by_shard.items())

    async def _put_shard(self, shard: int, chunks: list[EncodedChunk]) -> None:
        while True:
            seat = self._seats[shard]
            taken = [c for c in chunks if c.key not in seat.whole or not is_delta(c.payload)]
            if not taken:
                return
            nbytes = sum(chunk.payload.nbytes for chunk in taken)
            try:
                with self._meters.setdefault(seat.node.name, Meter()).sending(nbytes):
                    await _once_more_if_damaged(
                        partial(
                            seat.client.put,
                            self._run,
                            self._token,
                            chunks=[chunk.descriptor for chunk in taken],
                            frames=[chunk.payload for chunk in taken],
                        )
                    )
            except (NodeUnavailableError, NodeFullError, StaleBaseError, ClosedError) as error:
                await self._fail_over(shard, seat, error)
                continue
            seat.held.update(chunk.key for chunk in taken)
            seat.deltas.update(chunk.key for chunk in taken if is_delta(chunk.payload))
            self.sent_bytes += nbytes
            self.room.sent(shard, nbytes)
            return

    async def prepare(self, manifest: bytes) -> bool:
        """Have every node promise that it can commit; it keeps its shard and the manifest until told.

        Returns
        -------
        bool
            False if a node failed and was replaced: what is lacking has to be sent, and then this is asked
            again, with a manifest that names the new node.
        """
        digest = digest_of_manifest(manifest)
        seats = list(self._seats.items())
        # Each is waited for: one that answered late could otherwise put this manifest over the next one.
        results = await asyncio.gather(
            *(
                _once_more_if_damaged(
                    partial(
                        seat.client.prepare,
                        self._run,
                        self._token,
                        digest=digest,
                        manifest=manifest,
                        attempt=self._attempt,
                    )
                )
                for _, seat in seats
            ),
            return_exceptions=True,
        )
        complete = True
        for (shard, seat), result in zip(seats, results, strict=True):
            if isinstance(result, NodeUnavailableError | NodeFullError | StaleBaseError):
                complete = False
                await self._fail_over(shard, seat, result)
            elif isinstance(result, BaseException):
                raise result
        return complete

    async def abort(self) -> None:
        """Drop what is staged, where the node can still be reached."""
        clients = self._clients.values()
        await asyncio.gather(
            *(client.abort(run=self._run, token=self._token, attempt=self._attempt) for client in clients),
            return_exceptions=True,
        )

    async def announce(self) -> None:
        """Tell the nodes of the commit."""
        seats = self._seats.values()
        results = await asyncio.gather(
            *(s.client.commit(run=self._run, generation=self.generation, token=self._token) for s in seats),
            return_exceptions=True,
        )
        for seat, result in zip(seats, results, strict=True):
            if isinstance(result, Exception):
                log.warning(
                    "generation %d: node %s was not told of the commit: %s",
                    self.generation,
                    seat.node.name,
                    result,
                )

    async def close(self) -> None:
        """Close the connections."""
        await asyncio.gather(*(c.close() for c in self._clients.values()), return_exceptions=True)

    # ---- seats

    async def _begin_shard(self, shard: int, node: NodeInfo) -> None:
        """Give a shard to a node, or to another one if that fails."""
        while True:
            self._chosen[shard] = node
            try:
                self._seats[shard] = await self._begin_at(shard, node)
            except (NodeUnavailableError, NodeFullError) as error:
                node = await self._another(shard, node, error)
            else:
                return

    async def _begin_at(self, shard: int, node: NodeInfo) -> _Seat:
        client = self._clients.setdefault(node.name, self._client(node.name, node.address))
        if self._latest is not None and node.name in self._latest.nodes:
            try:
                # Naming what is committed also protects it, where the node has not heard of the commit.
                base = (self._latest.generation, self._latest.token)
                return _Seat(node, client, frozenset(await self._ask_begin(client, shard, base)))
            except StaleBaseError as error:
                log.warning("generation %d, shard %d goes whole: %s", self.generation, shard, error)
        await self._ask_begin(client, shard, None)
        return _Seat(node, client, frozenset(self._layout.keys_of(shard)))

    async def _ask_begin(self, client: PeerClient, shard: int, base: tuple[int, str] | None) -> Sequence[str]:
        """Begin with what the shard is likely to take; with less if the node has less, and it may do."""
        self.room.begin(shard, deltas=self._as_deltas and base is not None)
        begin = partial(
            client.begin,
            self._run,
            self.generation,
            self._token,
            shard=shard,
            base=base,
            keys=list(self._layout.keys_of(shard)),
            order=self._order,
            attempt=self._attempt,
        )
        wish = self.room.wish(shard)
        try:
            return await begin(reserve_bytes=wish.wanted_bytes)
        except NodeFullError as error:
            if error.free_bytes < wish.least_bytes or wish.least_bytes == wish.wanted_bytes:
                raise
            return await begin(reserve_bytes=min(error.free_bytes, wish.wanted_bytes))

    async def _fail_over(self, shard: int, seat: _Seat, error: FastCheckError) -> None:
        """Give a shard another seat, unless that has been done while this was waiting for its turn."""
        async with self._replacing[shard]:
            if self._seats[shard] is not seat:
                return
            if isinstance(error, StaleBaseError) and not seat.renewed:
                # The node lives, and holds other bits than the slot: it can take the shard whole.
                log.warning("generation %d, shard %d goes whole: %s", self.generation, shard, error)
                await self._renew(shard, seat)
            elif isinstance(error, NodeUnavailableError | NodeFullError):
                await self._begin_shard(shard, await self._another(shard, seat.node, error))
            else:
                raise error

    async def _renew(self, shard: int, seat: _Seat) -> None:
        try:
            await self._ask_begin(seat.client, shard, None)
        except (NodeUnavailableError, NodeFullError) as error:
            await self._begin_shard(shard, await self._another(shard, seat.node, error))
        else:
            whole = frozenset(self._layout.keys_of(shard))
            self._seats[shard] = _Seat(seat.node, seat.client, whole, renewed=True)

    async def _another(self, shard: int, failed: NodeInfo, error: FastCheckError) -> NodeInfo:
        """Return another node for a shard; raise `error` if there is none."""
        self.replaced[failed.name] = str(error)
        async with self._choosing:
            others = [node for number, node in enumerate(self._chosen) if number != shard]
            taken = {node.name for node in others} | self.replaced.keys()
            node = await self._substitute(others, taken, failed, error) if self._substitute else None
            if node is None:
                raise error
            # Before another shard chooses: it must not get the same one.
            self._chosen[shard] = node
        client = self._clients[failed.name]
        if isinstance(error, NodeFullError):
            # It lives: what it has taken is room that others need.
            with contextlib.suppress(FastCheckError):
                await client.abort(self._run, self._token, attempt=self._attempt)
        # Whoever else waits for this node gets an error now.
        await client.close()
        log.warning(
            "generation %d, shard %d goes to node %s instead of %s: %s",
            self.generation,
            shard,
            node.name,
            failed.name,
            error,
        )
        return node


async def _once_more_if_damaged(call: Callable[[], Awaitable[Any]]) -> None:
    """Send a message; once more if it was damaged on the way, since then the node took nothing of it."""
    try:
        await call()
    except ShardCorruptError as error:
        log.warning("a message is sent again: %s", error)
        await call()
