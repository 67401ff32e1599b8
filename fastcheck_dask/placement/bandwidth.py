"""How fast the links to the storage nodes are, by real transfers, and how many data shards use them up."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.tiers.peer import PeerClient

#: No more data shards than this: each takes one more node that may fail.
SHARDS_CAP = 5
#: By how much a measured ratio may exceed a whole number and still count as it.
TOLERANCE = 0.15
#: Bytes of one message: of the first, and at most; doubled while one takes less than so long.
PIECE_BYTES = 128 * 2**10
LARGEST_PIECE_BYTES = 4 * 2**20
PIECE_SECONDS = 0.005
#: Each rate is taken over so long, after a while in which buffers and token buckets fill.
WARM_UP_SECONDS = 0.2
MEASURED_SECONDS = 0.5
#: Messages on their way to one node at once.
_LANES = 2


@dataclass(frozen=True)
class Bandwidths:
    """One-way rates in bytes a second."""

    #: Of each node alone.
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
    clients = {node.name: client(node.name, node.address) for node in nodes}
    try:
        to_node = {name: await _rate([_send(c)], clock) for name, c in clients.items()}
        out = await _rate([_send(c) for c in clients.values()], clock)
        from_node = {name: await _rate([_fetch(c)], clock) for name, c in clients.items()}
        into = await _rate([_fetch(c) for c in clients.values()], clock)
    finally:
        await asyncio.gather(*(c.close() for c in clients.values()))
    return Bandwidths(to_node, from_node, out, into)


#: Transfers so many bytes.
_Transfer = Callable[[int], Coroutine[Any, Any, None]]


def _send(client: PeerClient) -> _Transfer:
    data = memoryview(bytes(LARGEST_PIECE_BYTES))

    async def send(nbytes: int) -> None:
        await client.probe(data[:nbytes], give_bytes=0)

    return send


def _fetch(client: PeerClient) -> _Transfer:
    async def fetch(nbytes: int) -> None:
        await client.probe(b"", give_bytes=nbytes)

    return fetch


async def _rate(transfers: Sequence[_Transfer], clock: Clock) -> float:
    """Return the bytes a second of all transfers together, each repeated."""
    first = clock.now()
    start, end = first + WARM_UP_SECONDS, first + WARM_UP_SECONDS + MEASURED_SECONDS
    ended: list[tuple[float, int]] = []

    async def lane(transfer: _Transfer) -> None:
        nbytes, now = PIECE_BYTES, clock.now()
        while now < end:
            began = now
            await transfer(nbytes)
            now = clock.now()
            ended.append((now, nbytes))
            # Short: where the window cuts matters little. Not so short that it is messages that are measured.
            if now - began < PIECE_SECONDS:
                nbytes = min(2 * nbytes, LARGEST_PIECE_BYTES)

    lanes = [asyncio.ensure_future(lane(t)) for t in transfers for _ in range(_LANES)]
    try:
        await asyncio.gather(*lanes)
    finally:
        for one in lanes:
            one.cancel()
        await asyncio.gather(*lanes, return_exceptions=True)
    inside = sum(nbytes for at, nbytes in ended if start < at <= end)
    if inside:
        return inside / (end - start)
    # Slower than a piece in the whole time.
    return sum(nbytes for _, nbytes in ended) / max(clock.now() - first, 1e-9)
