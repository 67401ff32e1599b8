"""An object tier that is slower than the disk below it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from typing import Any

from fastcheck_dask.tiers.store import ObjectStore, Parts, Payload, flat_views, write_at_once


class Throttle:
    """Lets so many bytes pass in a second, for all threads together.

    Parameters
    ----------
    bytes_per_second : float
        The rate.
    clock, sleep : callable
        The monotonic clock in seconds, and what waits for some.
    """

    def __init__(
        self,
        bytes_per_second: float,
        *,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate, self._clock, self._sleep = bytes_per_second, clock, sleep
        self._lock = threading.Lock()
        self._free_at = 0.0
        #: Bytes that have passed.
        self.passed = 0

    def take(self, nbytes: int) -> None:
        """Wait until so many bytes have passed after those before."""
        with self._lock:
            self.passed += nbytes
            now = self._clock()
            self._free_at = max(self._free_at, now) + nbytes / self._rate
            wait = self._free_at - now
        self._sleep(wait)


class SlowStore:
    """An `ObjectStore` over another one, whose reads and writes pass through a throttle."""

    def __init__(self, store: ObjectStore, throttle: Throttle) -> None:
        self._store, self._throttle = store, throttle
        self.location = store.location

    def write(self, path: str, data: Payload | Parts) -> None:
        """See `ObjectStore`."""
        self._throttle.take(sum(view.nbytes for view in flat_views(data)))
        self._store.write(path, data)

    def write_all(self, files: Iterable[tuple[str, Payload | Parts]]) -> None:
        """See `ObjectStore`."""
        write_at_once(self.write, files)

    def read(self, path: str) -> bytes:
        """See `ObjectStore`."""
        data = self._store.read(path)
        self._throttle.take(len(data))
        return data

    def read_into(self, path: str, parts: Parts) -> bytes | None:
        """See `ObjectStore`."""
        data = self._store.read_into(path, parts)
        self._throttle.take(sum(v.nbytes for v in flat_views(parts)) if data is None else len(data))
        return data

    def __getattr__(self, name: str) -> Any:
        """Leave to the other store what moves little."""
        return getattr(self._store, name)
