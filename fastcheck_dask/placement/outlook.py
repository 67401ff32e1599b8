"""What is known of each node, and which are left out because they were slow. Pure: no clock, no I/O."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

#: How much of a mean the newest value makes up.
WEIGHT = 0.3
#: Bytes by whose transfer a node is judged, on top of its round-trip.
REFERENCE_BYTES = 2**20
#: Costs in one band count as equal: each band is twice as wide as the one before, from this many seconds on.
BAND_SECONDS = 0.25e-3

#: A node is slow in a save if each byte took so many times as long as the median of the others,
SLOW_FACTOR = 2.0
#: is left out after so many saves in a row,
SLOW_SAVES = 3
#: and let back in after so many, twice as many each time, up to the limit.
AWAY_SAVES = 20
AWAY_LIMIT = 320
#: A save of which a node got less says nothing of it.
MEASURED_FROM_BYTES = 2**20


@dataclass(frozen=True)
class Outlook:
    """What is known of one node; None where nothing is."""

    latency_seconds: float | None = None
    seconds_per_byte: float | None = None
    #: Share of its memory that is in use, 0 to 1.
    used_share: float | None = None

    def pinged(self, latency_seconds: float, used_share: float) -> Outlook:
        """Return the outlook after an answer to a ping."""
        return replace(
            self, latency_seconds=_mean(self.latency_seconds, latency_seconds), used_share=used_share
        )

    def transferred(self, nbytes: int, seconds: float) -> Outlook:
        """Return the outlook after a real transfer."""
        if nbytes < MEASURED_FROM_BYTES:
            return self
        return replace(self, seconds_per_byte=_mean(self.seconds_per_byte, seconds / nbytes))

    @property
    def band(self) -> int | None:
        """The band of what a transfer to this node costs; None if nothing is known."""
        if self.latency_seconds is None and self.seconds_per_byte is None:
            return None
        cost = (self.latency_seconds or 0.0) + (self.seconds_per_byte or 0.0) * REFERENCE_BYTES
        return 0 if cost <= BAND_SECONDS else math.ceil(math.log2(cost / BAND_SECONDS))


UNKNOWN = Outlook()


def weights_of(names: Sequence[str], outlooks: Mapping[str, Outlook]) -> tuple[float, ...]:
    """Return the bytes a second that nodes take, going by real transfers.

    Returns
    -------
    tuple of float
        One of each name, all above 0; the median of the others where nothing is known, and 1 where nothing is
        known of any.
    """
    paces = {name: outlooks.get(name, UNKNOWN).seconds_per_byte for name in names}
    rates = {name: 1 / pace for name, pace in paces.items() if pace}
    usual = statistics.median(rates.values()) if rates else 1.0
    return tuple(rates.get(name, usual) for name in names)


def _mean(before: float | None, newest: float) -> float:
    return newest if before is None else before + WEIGHT * (newest - before)


class SlowNodes:
    """Leaves out, for a while, nodes that were the slowest by a clear margin in several saves in a row."""

    def __init__(self) -> None:
        self._in_a_row: dict[str, int] = {}
        #: Saves until a node comes back.
        self._away: dict[str, int] = {}
        #: How long a node will be away the next time.
        self._sentence: dict[str, int] = {}

    @property
    def avoided(self) -> frozenset[str]:
        """The nodes that are left out where there are enough others."""
        return frozenset(self._away)

    def observe(self, transfers: Mapping[str, tuple[int, float]]) -> None:
        """Take note of a save.

        Parameters
        ----------
        transfers : mapping of str to (int, float)
            By node: the bytes that it took, and the seconds.
        """
        self._away = {name: left - 1 for name, left in self._away.items() if left > 1}
        paces = {name: took / n for name, (n, took) in transfers.items() if n >= MEASURED_FROM_BYTES}
        slow = _slowest(paces)
        for name in paces:
            self._in_a_row[name] = self._in_a_row.get(name, 0) + 1 if name == slow else 0
        if slow is not None and self._in_a_row[slow] >= SLOW_SAVES:
            self._in_a_row[slow] = 0
            sentence = self._sentence.get(slow, AWAY_SAVES)
            self._away[slow] = sentence
            self._sentence[slow] = min(2 * sentence, AWAY_LIMIT)


def _slowest(paces: Mapping[str, float]) -> str | None:
    """Return the node that is slower than the others by a clear margin, if there is one."""
    if len(paces) < 3:
        return None
    name = max(paces, key=lambda n: (paces[n], n))
    others = statistics.median(pace for other, pace in paces.items() if other != name)
    return name if paces[name] > SLOW_FACTOR * others else None
