"""How many bytes each data shard has, and which shards take the next chunks: evenly, or by their weights."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from fastcheck_dask.errors import LayoutError


class Loads:
    """Counts bytes while chunks are dealt. No I/O, no clock.

    Parameters
    ----------
    shards : int
        Number of data shards.
    weights : sequence of float, optional
        Bytes a second that the node of each shard takes; only their ratios count. Without them every shard
        shall get the same.

    Raises
    ------
    LayoutError
        If the weights are not one finite number above 0 for each shard.
    """

    def __init__(self, shards: int, weights: Sequence[float] | None = None) -> None:
        self._bytes = [0] * shards
        self._weights: list[float] | None = None
        if weights is not None:
            if len(weights) != shards or not all(0 < w < math.inf for w in weights):
                raise LayoutError(
                    f"{shards} weights above 0 are wanted, one for each data shard, got {list(weights)}"
                )
            self._weights = [weight / max(weights) for weight in weights]

    def add(self, shard: int, nbytes: int) -> None:
        """Count a chunk that a shard has."""
        self._bytes[shard] += nbytes

    def order(self, among: Iterable[int] | None = None) -> list[int]:
        """Return shards, the one that is done with what it has before all others first."""
        shards = range(len(self._bytes)) if among is None else among
        return sorted(shards, key=lambda shard: (self._time(shard, 0), shard))

    def takers(self, nbytes: int, parity_bytes: int, *, among: Iterable[int] | None = None) -> list[int]:
        """Return the shards that may take a chunk, the one that has most time for it first.

        Parameters
        ----------
        nbytes : int
            Of the chunk.
        parity_bytes : int
            What the parity shard has with it. It has to take as much as the fastest data shard in any case:
            until it is done the others may work as well.
        among : iterable of int, optional
            The shards in question; all of them unless given.

        Returns
        -------
        list of int
            With weights only those that are done with it no later than a shard of the greatest weight is with
            `parity_bytes`; maybe none.
        """
        order = self.order(among)
        if self._weights is None:
            return order
        return [shard for shard in order if self._time(shard, nbytes) <= parity_bytes]

    def _time(self, shard: int, more_bytes: int) -> float:
        """Return how long a shard takes, in bytes of one of the greatest weight."""
        total = self._bytes[shard] + more_bytes
        return total if self._weights is None else total / self._weights[shard]
