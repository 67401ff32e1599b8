"""A bound on the bytes that are under way at once."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager


class ByteWindow:
    """Lets requests through in the order in which they came, while their bytes together stay below a limit.

    A request that is larger than the limit goes alone. Any thread may call; waiting blocks.

    Parameters
    ----------
    limit_bytes : int
        Bytes under way at once.
    """

    def __init__(self, limit_bytes: int) -> None:
        self.limit_bytes = limit_bytes
        #: Bytes under way now.
        self.used_bytes = 0
        self._waiting: deque[object] = deque()
        self._changed = threading.Condition()

    @contextmanager
    def room(self, nbytes: int) -> Iterator[None]:
        """Wait for room, and hold it for as long as the block lasts."""
        taken = min(nbytes, self.limit_bytes)
        ticket = object()
        with self._changed:
            self._waiting.append(ticket)
            try:
                self._changed.wait_for(
                    lambda: self._waiting[0] is ticket and self.used_bytes + taken <= self.limit_bytes
                )
                self.used_bytes += taken
            finally:
                self._waiting.remove(ticket)
                self._changed.notify_all()
        try:
            yield
        finally:
            with self._changed:
                self.used_bytes -= taken
                self._changed.notify_all()
