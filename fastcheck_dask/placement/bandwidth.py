"""How fast the links to the storage nodes are, by real transfers, and how many data shards use them up."""

from __future__ import annotations

import asyncio
import contextlib
import math
import statistics
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.tiers.peer import PeerClient

#: No more data shards than this: each takes one more node that may fail.
SHARDS_CAP = 5
#: As many are used where nothing was measured.
DEFAULT_SHARDS = 3
#: By how much a measured ratio may exceed a whole number and still count as it,
TOLERANCE = 0.15
#: and how much further it may be from the number in use: another one has every chunk sent whole again.
STICKY = 0.25
#: Bytes of one message: of the first, and at most; doubled while one takes less than so long.
PIECE_BYTES = 128 * 2**10
LARGEST_PIECE_BYTES = 4 * 2**20
PIECE_SECONDS = 0.02
#: Each rate is taken over so long, after a while in which buffers and token buckets fill.
WARM_UP_SECONDS = 0.2
MEASURED_SECONDS = 0.5
#: The same where it shall cost little, and the bytes that a node gets at most, alone and with the others.
QUICK_WARM_UP_SECONDS = 0.1
QUICK_SECONDS = 0.25
QUICK_BYTES = 32 * 2**20
#: Messages on their way to one node at once.
_LANES = 2


@dataclass(frozen=True)
class Bandwidths:
    """One-way rates in bytes a second."""

    #: Of each node alone; empty and 0 for what comes from them where that was not measured.
    to_node: Mapping[str, float]
    from_node: Mapping[str, float]
    #: Of all nodes at once.
    out: float
    into: float

    @property
    def one(self) -> float:
        """What one node takes: the median."""
        return statistics.median(self.to_node.values())

    @property
    def shards(self) -> int:
        """The number of data shards whose nodes together take what the training host can send."""
        return max(1, min(SHARDS_CAP, math.ceil(self.out / self.one - TOLERANCE)))

    def shards_after(self, current: int | None) -> int:
        """Return the number of data shards where some are in use: those, unless clearly too many or few."""
        excess = self.out / self.one - TOLERANCE
        if current and current - 1 - STICKY < excess <= current + STICKY and current <= SHARDS_CAP:
            return current
        return self.shards


async def measure(
    nodes: Sequence[NodeInfo], client: Callable[[str, str], PeerClient], *, clock: Clock = SYSTEM_CLOCK
) -> Bandwidths:
    """Measure the links to and from some nodes, one after the other and all at once.

    Parameters
    ----------
    nodes : sequence of NodeInfo
        At least one. The ratio of the rates is at most their number.
    client : callable
        Makes a client of a node's name and address.
    clock : Clock, optional
        Tells the seconds.

    Raises
    ------
    NodeUnavailableError
        If a node does not answer.

    Notes
    -----
    Takes 0.7 s for each node in each direction, and once for all.
    """
    rate = partial(_rate, clock=clock)
    async with _opened(nodes, client) as clients:
        to_node, out = await _each_and_all(_send, clients, rate)
        from_node, into = await _each_and_all(_fetch, clients, rate)
    return Bandwidths(to_node, from_node, out, into)


async def measure_out(
    nodes: Sequence[NodeInfo], client: Callable[[str, str], PeerClient], *, clock: Clock = SYSTEM_CLOCK
) -> Bandwidths:
    """Measure what goes to some nodes, one after the other and all at once, so that it costs little.

    Parameters and errors are those of :func:`measure`.

    Notes
    -----
    Takes at most 0.35 s for each node and once for all, and sends at most 32 MiB to each, twice.
    """
    rate = partial(
        _rate,
        clock=clock,
        warm_up_seconds=QUICK_WARM_UP_SECONDS,
        seconds=QUICK_SECONDS,
        limit_bytes=QUICK_BYTES,
    )
    async with _opened(nodes, client) as clients:
        to_node, out = await _each_and_all(_send, clients, rate)
    return Bandwidths(to_node, {}, out, 0.0)


#: Transfers so many bytes.
_Transfer = Callable[[int], Coroutine[Any, Any, None]]


@contextlib.asynccontextmanager
async def _opened(
    nodes: Sequence[NodeInfo], client: Callable[[str, str], PeerClient]
) -> AsyncIterator[dict[str, PeerClient]]:
    clients = {node.name: client(node.name, node.address) for node in nodes}
    try:
        yield clients
    finally:
        await asyncio.gather(*(c.close() for c in clients.values()))


async def _each_and_all(
    transfer: Callable[[PeerClient], _Transfer],
    clients: Mapping[str, PeerClient],
    rate: Callable[[list[_Transfer]], Awaitable[float]],
) -> tuple[dict[str, float], float]:
    """Return the rate of each node alone, and that of all at once."""
    each = {name: await rate([transfer(c)]) for name, c in clients.items()}
    return each, await rate([transfer(c) for c in clients.values()])


def _send(client: PeerClient) -> _Transfer:
    data = memoryview(bytes(LARGEST_PIECE_BYTES))

    async def send(nbytes: int) -> None:
        await client.probe(data[:nbytes], give_bytes=0)

    return send


def _fetch(client: PeerClient) -> _Transfer:
    async def fetch(nbytes: int) -> None:
        await client.probe(b"", give_bytes=nbytes)

    return fetch


async def _rate(
    transfers: Sequence[_Transfer],
    *,
    clock: Clock,
    warm_up_seconds: float | None = None,
    seconds: float | None = None,
    limit_bytes: float = math.inf,
) -> float:
    """Return the bytes a second of all transfers together, each repeated until it moved its limit."""
    warm_up = WARM_UP_SECONDS if warm_up_seconds is None else warm_up_seconds
    first = clock.now()
    end = first + warm_up + (MEASURED_SECONDS if seconds is None else seconds)
    moves: list[_Move] = []
    left = dict.fromkeys(transfers, limit_bytes)

    async def lane(transfer: _Transfer) -> None:
        nbytes, now = PIECE_BYTES, clock.now()
        while now < end and left[transfer] > 0:
            began = now
            left[transfer] -= nbytes
            await transfer(nbytes)
            now = clock.now()
            moves.append(_Move(began, now, nbytes))
            # Not so short that it is messages that are measured: each costs a node a millisecond or so.
            if now - began < PIECE_SECONDS:
                nbytes = min(2 * nbytes, LARGEST_PIECE_BYTES)

    lanes = [asyncio.ensure_future(lane(t)) for t in transfers for _ in range(_LANES)]
    try:
        await asyncio.gather(*lanes)
    finally:
        for one in lanes:
            one.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    return _steady(moves, first, (first + warm_up, end), warm_up_bytes=len(transfers) * limit_bytes / 4)


class _Move(NamedTuple):
    """A message that has arrived."""

    began: float
    ended: float
    nbytes: int

    def within(self, start: float, end: float) -> float:
        """Return how many of its bytes crossed in a window of time, if they all crossed alike."""
        inside = min(self.ended, end) - max(self.began, start)
        return self.nbytes * max(inside, 0.0) / max(self.ended - self.began, 1e-9)


def _steady(
    moves: Sequence[_Move], first: float, window: tuple[float, float], *, warm_up_bytes: float
) -> float:
    """Return the bytes a second inside a window of time, which begins earlier after so many bytes."""
    start, end = window
    moved = 0
    for move in sorted(moves, key=lambda move: move.ended):
        moved += move.nbytes
        if moved >= warm_up_bytes:
            start = min(start, move.ended)
            # There may be nothing to send any more before the time is over.
            end = min(end, max(move.ended for move in moves))
            break
    if any(start < move.ended <= end for move in moves):
        return sum(move.within(start, end) for move in moves) / (end - start)
    # Slower than a piece in the whole time, or all at once.
    return sum(move.nbytes for move in moves) / max(max(move.ended for move in moves) - first, 1e-9)
