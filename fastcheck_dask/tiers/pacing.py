"""Holds back what an agent sends: a limit of bytes a second, and a pause while the training communicates."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock

log = logging.getLogger(__name__)

#: Bytes that are sent between two looks at the limit and the pause.
PIECE_BYTES = 2**20
#: What may be sent at once after a while of silence, as seconds of the limit.
BURST_SECONDS = 0.05
#: A message waits at most this long for the training, all pauses together: nodes end transfers that stand.
PATIENCE_SECONDS = 5.0
#: A training that is busy for longer without a break has forgotten to say that it is over.
FORGOTTEN_SECONDS = 60.0


class TokenBucket:
    """A limit of bytes a second. Pure but for the clock; for one thread.

    Parameters
    ----------
    bytes_per_second : float
        The rate in the long run.
    burst_bytes : float
        What may be sent at once after a while of silence.
    clock : Clock, optional
        Tells the seconds.

    Notes
    -----
    Who takes more than there is leaves a debt, and the next one waits until it is paid: a piece may be larger
    than the burst, and whoever comes first is served first. In any t seconds at most
    ``burst_bytes + t * bytes_per_second`` bytes and one piece are let through.
    """

    def __init__(self, bytes_per_second: float, burst_bytes: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._rate, self._burst, self._clock = bytes_per_second, burst_bytes, clock
        self._level = burst_bytes
        self._at = clock.now()

    def take(self, nbytes: int) -> float:
        """Take bytes; return the seconds to wait before they are sent."""
        now = self._clock.now()
        self._level = min(self._burst, self._level + (now - self._at) * self._rate)
        self._at = now
        wait = max(0.0, -self._level / self._rate)
        self._level -= nbytes
        return wait


class Pacer:
    """What all senders of an agent share. Belongs to one event loop.

    Parameters
    ----------
    bytes_per_second : float or None
        Limit of all sending together; None for none.
    clock : Clock, optional
        Tells the seconds.
    """

    def __init__(self, bytes_per_second: float | None = None, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._bucket = (
            None
            if bytes_per_second is None
            else TokenBucket(bytes_per_second, bytes_per_second * BURST_SECONDS, clock)
        )
        #: How often the training began to communicate.
        self.busy_times = 0
        self._free = asyncio.Event()
        self._free.set()
        self._forgetting: asyncio.TimerHandle | None = None

    @property
    def is_busy(self) -> bool:
        """Whether the training communicates, as far as is known."""
        return not self._free.is_set()

    def set_busy(self, busy: bool) -> None:
        """Note that the training begins to communicate, or has ended."""
        if self._forgetting is not None:
            self._forgetting.cancel()
            self._forgetting = None
        if busy:
            self.busy_times += 1
            self._free.clear()
            self._forgetting = asyncio.get_running_loop().call_later(FORGOTTEN_SECONDS, self._forget)
        else:
            self._free.set()

    def _forget(self) -> None:
        log.warning(
            "the network was busy for %.0f s without a break: network_busy() was probably not left; "
            "it counts as over",
            FORGOTTEN_SECONDS,
        )
        self._free.set()

    def count(self, nbytes: int) -> None:
        """Note bytes that are sent without waiting."""
        if self._bucket is not None:
            self._bucket.take(nbytes)

    def turn(self) -> Turn:
        """Return what one message waits with."""
        return Turn(self)

    async def wait_until_free(self, seconds: float) -> float:
        """Wait until the training does not communicate, at most so long; return the seconds that it took."""
        if self._free.is_set() or seconds <= 0:
            return 0.0
        began = self._clock.now()
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._free.wait(), seconds)
        return self._clock.now() - began

    async def wait_for_tokens(self, nbytes: int) -> None:
        """Wait until so many bytes are within the limit."""
        if self._bucket is not None and (seconds := self._bucket.take(nbytes)) > 0:
            await asyncio.sleep(seconds)


class Turn:
    """The waiting of one message; its patience with the training is bounded."""

    def __init__(self, pacer: Pacer) -> None:
        self._pacer = pacer
        self.patience_seconds = PATIENCE_SECONDS

    async def wait(self, nbytes: int) -> None:
        """Wait before a piece of so many bytes is sent."""
        self.patience_seconds -= await self._pacer.wait_until_free(self.patience_seconds)
        await self._pacer.wait_for_tokens(nbytes)
