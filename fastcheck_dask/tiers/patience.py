"""How long a message to a storage node may take: all of it, and each piece of it. No clock, no I/O."""

from __future__ import annotations


class Patience:
    """Tells by when the next piece of a message has to have crossed.

    A node that stops in the middle of a large message is noticed after the grace, not when the time of the
    whole message is over.

    Parameters
    ----------
    nbytes : int
        Of the message.
    floor_bytes_per_second : float
        A message, or a piece, that is slower than this has failed,
    grace_seconds : float
        with this much on top of either.
    now : float
        Seconds of a monotonic clock: when the message begins.
    """

    def __init__(
        self, nbytes: int, *, floor_bytes_per_second: float, grace_seconds: float, now: float
    ) -> None:
        self._nbytes, self._floor, self._grace = nbytes, floor_bytes_per_second, grace_seconds
        self._end = now + nbytes / floor_bytes_per_second + grace_seconds
        self._given = 0
        self._piece_bytes = 0

    def next_piece(self, nbytes: int, now: float) -> float:
        """Begin a piece, after the one before has crossed; return by when it has to be over."""
        self._given += self._piece_bytes
        self._piece_bytes = nbytes
        return min(self._end, now + nbytes / self._floor + self._grace)

    def held_back(self, seconds: float) -> None:
        """Note that it was this side that did not go on for so long."""
        self._end += seconds

    def told(self) -> str:
        """Say how far it came."""
        return f"no more than {self._given:,} of {self._nbytes:,} bytes crossed in time"
