"""When a source is late, going by the pace of the others; and several sources asked in turn."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable, Sequence
from itertools import chain
from typing import TypeVar

from fastcheck_dask.errors import FastCheckError

T = TypeVar("T")

#: A batch that takes this many times as long as the others' median says is late,
LATE_FACTOR = 3.0
#: and this much longer, in seconds: what threads and a busy machine make of a short time.
JITTER_SECONDS = 0.25
#: How long a source is waited for when there is another one, and nothing was read by which to measure it.
UNMEASURED_SECONDS = 2.0


class Pace:
    """How fast each shard is read, one batch after the other. No clock, no I/O."""

    def __init__(self) -> None:
        #: Bytes and beginning of the batch that is on its way, by shard.
        self._asked: dict[int, tuple[int, float]] = {}
        #: Seconds for each byte of the batches that came, by shard.
        self._took: dict[int, list[float]] = {}

    def asked(self, shard: int, nbytes: int, now: float) -> None:
        """Note that a batch of so many raw bytes was asked for."""
        self._asked[shard] = (nbytes, now)

    def came(self, shard: int, now: float) -> None:
        """Note that the batch is there."""
        nbytes, began = self._asked.pop(shard)
        self._took.setdefault(shard, []).append((now - began) / max(nbytes, 1))

    def ended(self, shard: int) -> None:
        """Note that nothing more is read from a shard, however that came."""
        self._asked.pop(shard, None)

    def late_at(self, shard: int) -> float | None:
        """Return the moment from which the batch of a shard is late.

        Returns
        -------
        float or None
            None while there is nothing to measure it by, or if the shard owes nothing.
        """
        if shard not in self._asked:
            return None
        others = [took for other, times in self._took.items() if other != shard for took in times]
        nbytes, began = self._asked[shard]
        seconds = _patience(others or self._took.get(shard), nbytes)
        return None if seconds is None else began + seconds

    def patience(self, nbytes: int) -> float:
        """Return how many seconds so many bytes of another shard may take, by the pace of those read here."""
        seconds = _patience(list(chain.from_iterable(self._took.values())), nbytes)
        return UNMEASURED_SECONDS if seconds is None else seconds

    def late(self, now: float) -> tuple[list[int], float | None]:
        """Return the shards that are late, and the seconds until the next one would be."""
        moments = {shard: at for shard in self._asked if (at := self.late_at(shard)) is not None}
        coming = [at - now for at in moments.values() if at > now]
        return sorted(shard for shard, at in moments.items() if at <= now), min(coming, default=None)


def _patience(measured: list[float] | None, nbytes: int) -> float | None:
    """Return what a batch may take by the seconds for each byte of others; None if there are none."""
    return LATE_FACTOR * statistics.median(measured) * nbytes + JITTER_SECONDS if measured else None


async def first_answer(
    calls: Sequence[Callable[[], Awaitable[T]]], *, patience_seconds: float
) -> tuple[T | None, list[FastCheckError]]:
    """Ask one source after the other, the next one when those before failed or are slow; the first one wins.

    Parameters
    ----------
    calls : sequence of callable
        In the order of preference. Those that are not needed any more are cancelled.
    patience_seconds : float
        How long the newest one is waited for before the next one is asked, too.

    Returns
    -------
    (answer or None, list of FastCheckError)
        None if every source failed; the errors of those that did.
    """
    left = list(calls)
    errors: list[FastCheckError] = []
    running: set[asyncio.Future[T]] = set()
    try:
        while left or running:
            if left:
                running.add(asyncio.ensure_future(left.pop(0)()))
            done, running = await asyncio.wait(
                running,
                timeout=patience_seconds if left else None,
                return_when=asyncio.FIRST_COMPLETED,
            )
            for error in [error for task in done if (error := task.exception()) is not None]:
                if not isinstance(error, FastCheckError):
                    raise error
                errors.append(error)
            for task in done:
                if task.exception() is None:
                    return task.result(), errors
    finally:
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
    return None, errors
