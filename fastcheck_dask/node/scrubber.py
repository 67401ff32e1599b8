"""Reads stored chunks again and again while nothing else is to do: memory fails, too."""

from __future__ import annotations

import logging
import threading
from typing import Any

from fastcheck_dask.node.shard_store import ShardStore

#: How much is read in a second.
BYTES_PER_SECOND = 64 * 2**20
#: From the end of one pass to the begin of the next.
PAUSE_SECONDS = 600.0

logger = logging.getLogger(__name__)


class Scrubber:
    """A thread that compares the checksums of all that a store holds, at a bounded rate.

    A damaged chunk counts as lost from then on: it is named in the log and in the store's report, a load
    takes it from parity, and a repair brings it back.

    Parameters
    ----------
    store : ShardStore
        Outlives the scrubber.
    bytes_per_second : float
        How fast it reads.
    pause_seconds : float
        Between two passes, and before the first; may be infinite.
    """

    def __init__(
        self,
        store: ShardStore,
        *,
        bytes_per_second: float = BYTES_PER_SECOND,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._store = store
        self._bytes_per_second = bytes_per_second
        self._pause_seconds = pause_seconds
        self._closing = threading.Event()
        self._passes = 0
        self._checked_bytes = 0
        self._damaged = 0
        self._thread = threading.Thread(target=self._work, name="fastcheck-scrub", daemon=True)
        self._thread.start()

    def report(self) -> dict[str, Any]:
        """Return what was done so far; from any thread."""
        return {
            "scrub": {
                "passes": self._passes,
                "checked_bytes": self._checked_bytes,
                "damaged": self._damaged,
                "bytes_per_second": self._bytes_per_second,
            }
        }

    def close(self) -> None:
        """End after the chunk that is being read, if the store's background work was stopped. Idempotent."""
        self._closing.set()
        self._thread.join()

    def _work(self) -> None:
        while not self._closing.wait(min(self._pause_seconds, threading.TIMEOUT_MAX)):
            try:
                self._pass()
            except Exception:  # the thread outlives whatever a check raises
                logger.exception("scrubbing node %s failed", self._store.name)

    def _pass(self) -> None:
        """Check what there is now, chunk by chunk."""
        for run, name, key in self._store.chunks():
            checked = self._store.check(run, name, key)
            if checked is None or self._closing.wait(checked.nbytes / self._bytes_per_second):
                return
            self._checked_bytes += checked.nbytes
            self._damaged += checked.damaged
        self._passes += 1
