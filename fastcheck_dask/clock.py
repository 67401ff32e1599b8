"""Time that tests can hold still, and one deadline that travels down a call."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Protocol

#: Elsewhere than on Linux the monotonic clock, which stands still while the machine is suspended.
_SINCE_BOOT = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return seconds since some fixed moment; never goes back."""
        ...


class SystemClock:
    """The clock of the machine."""

    def now(self) -> float:
        """Return `time.monotonic()`."""
        return time.monotonic()


SYSTEM_CLOCK = SystemClock()


def boot_seconds() -> float:
    """Return the seconds since the machine booted, those of a suspend too; the same for all its processes."""
    return time.clock_gettime(_SINCE_BOOT)


@dataclass(frozen=True)
class Deadline:
    """A moment by which a call must be over; None means never."""

    at: float | None
    clock: Clock = SYSTEM_CLOCK

    @classmethod
    def after(cls, seconds: float | None, clock: Clock = SYSTEM_CLOCK) -> Deadline:
        """Return the deadline `seconds` from now."""
        return cls(None if seconds is None else clock.now() + seconds, clock)

    def left(self) -> float | None:
        """Return the seconds that are left, at least 0; None without a deadline."""
        return None if self.at is None else max(0.0, self.at - self.clock.now())

    @property
    def passed(self) -> bool:
        """Whether the moment has passed."""
        return self.at is not None and self.clock.now() >= self.at
