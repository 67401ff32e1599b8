"""Counts who communicates, and tells when the first begins and the last has ended."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable


class BusyCount:
    """Any thread may call, also again while it is inside, and in a signal handler.

    Parameters
    ----------
    tell : callable
        Called with True when the first has entered and with False when the last has left, in this order; must
        neither block nor raise. Not called in a forked child.
    """

    def __init__(self, tell: Callable[[bool], None]) -> None:
        self._tell = tell
        self._pid = os.getpid()
        #: Not a plain lock: a signal handler may come in between.
        self._lock = threading.RLock()
        self._inside = 0

    def enter(self) -> None:
        """Note that one more communicates."""
        self._change(1)

    def leave(self) -> None:
        """Note that one has ended."""
        self._change(-1)

    def _change(self, by: int) -> None:
        if os.getpid() != self._pid:
            return
        with self._lock:
            before = self._inside
            self._inside += by
            if (before == 0) != (self._inside == 0):
                self._tell(self._inside > 0)
