"""A clock that moves when it is told to."""

from __future__ import annotations

import threading


class FakeClock:
    """A `Clock` that stands still until :meth:`advance`. Any thread may call."""

    def __init__(self, at: float = 1000.0) -> None:
        self._at = at
        self._lock = threading.Lock()

    def now(self) -> float:
        """Return the seconds since some fixed moment."""
        with self._lock:
            return self._at

    def advance(self, seconds: float) -> None:
        """Let `seconds` pass."""
        assert seconds >= 0
        with self._lock:
            self._at += seconds
