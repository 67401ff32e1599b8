"""How many bytes a save asks the nodes to set aside, before it sends any. No I/O."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from fastcheck_codecs import max_encoded_nbytes

from fastcheck_dask.engine.plan import Content
from fastcheck_dask.layout.stripes import parity_nbytes

#: The share of its raw bytes that a save takes is larger than that of the one before by less than this.
_MARGIN = 1.25
#: What a save may take until one of its kind was measured is likely to be too much: it begins all the same
#: where this share of it is free. What a delta takes cannot be known at all.
_LEAST = {False: 0.25, True: 0.0}


class Wish(NamedTuple):
    """What is asked of one node."""

    wanted_bytes: int
    #: With how much the save begins where `wanted_bytes` are not free.
    least_bytes: int


@dataclass
class Room:
    """What one save asks for, and what it then sends. Shard by shard, the parity shards last."""

    #: Raw sizes of the chunks of each shard.
    sizes: Sequence[Sequence[int]]
    manifest_bytes: int
    #: Encoded bytes for each raw one, by whether chunks go as deltas, as far as that is known.
    shares: dict[bool, float]
    compress: bool
    #: Shards whose chunks go as deltas where that is smaller.
    deltas: set[int] = field(default_factory=set)
    sent_bytes: dict[int, int] = field(default_factory=dict)

    def begin(self, shard: int, *, deltas: bool) -> None:
        """Note that a shard is begun, for the first time or anew, and how its chunks go."""
        self.sent_bytes.pop(shard, None)
        (self.deltas.add if deltas else self.deltas.discard)(shard)

    def wish(self, shard: int) -> Wish:
        """Say what to ask the node of a shard for."""
        sizes, delta = self.sizes[shard], shard in self.deltas
        most = sum(map(max_encoded_nbytes, sizes))
        # What goes as a delta is smaller than it would be whole.
        share = self.shares.get(delta, self.shares.get(False)) if self.compress else None
        wanted = most if share is None else min(most, math.ceil(sum(sizes) * share * _MARGIN))
        known = delta in self.shares or not self.compress
        least = wanted if known else math.ceil(wanted * _LEAST[delta])
        return Wish(wanted + self.manifest_bytes, least + self.manifest_bytes)

    def sent(self, shard: int, nbytes: int) -> None:
        """Count what was sent."""
        self.sent_bytes[shard] = self.sent_bytes.get(shard, 0) + nbytes


def shard_sizes(content: Content) -> list[list[int]]:
    """Return the raw sizes of the chunks of each shard; the content has a layout."""
    layout = content.layout
    assert layout is not None
    sizes = content.sizes_at_peers
    found = [[sizes[key] for key in layout.keys_of(shard)] for shard in range(layout.shards)]
    of_parity = [parity_nbytes(stripe, sizes) for stripe in layout.stripes]
    return found + [of_parity] * layout.parity


class Reservations:
    """Estimates what a save of a run takes on each node from what the one before took.

    A first save may take as much as its raw bytes and a little more, and asks for that. Later ones ask for
    the largest share of the raw bytes that a node was sent, with a margin, by the last save of the kind:
    deltas, or everything whole. A node that gets more than it set aside looks for room again.
    """

    def __init__(self) -> None:
        self._shares: dict[bool, float] = {}

    @property
    def delta_share(self) -> float | None:
        """What deltas take as a share of what the same chunks take whole; None if one is not known."""
        if False not in self._shares or True not in self._shares:
            return None
        return min(1.0, self._shares[True] / self._shares[False]) if self._shares[False] else 1.0

    def room(self, sizes: Sequence[Sequence[int]], *, manifest_bytes: int, compress: bool) -> Room:
        """Return what a save with chunks of these raw sizes, by shard, may ask for."""
        return Room(sizes, manifest_bytes, dict(self._shares), compress)

    def learn(self, room: Room) -> None:
        """Note what a save took in the end."""
        if not room.compress:
            return
        for delta in (False, True):
            raw_bytes = {shard: sum(sizes) for shard, sizes in enumerate(room.sizes)}
            shares = [
                room.sent_bytes.get(shard, 0) / nbytes
                for shard, nbytes in raw_bytes.items()
                if nbytes and (shard in room.deltas) is delta
            ]
            if shares:
                self._shares[delta] = max(shares)

    def forget(self) -> None:
        """Note that a save took more than was estimated."""
        self._shares.clear()
