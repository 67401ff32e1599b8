"""When deltas are merged: by a Dask task if the scheduler is alive, by a thread of ours if not."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.node.shard_store import ShardStore

#: How long a Dask task has to begin before the local thread merges.
FALLBACK_SECONDS = 0.2

#: Gets a run and a generation; starts something that calls `MergeQueue.drain`. Must not block.
Trigger = Callable[[str, int], None]

logger = logging.getLogger(__name__)


class MergeQueue:
    """Sees to it that waiting deltas are merged in the background. Any thread may call any method.

    The store keeps what is waiting, and in which order; this only decides who calls `drain`, and a drain too
    many does nothing.
    """

    def __init__(
        self, store: ShardStore, *, fallback_seconds: float = FALLBACK_SECONDS, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store = store
        self._fallback_seconds = fallback_seconds
        self._clock = clock
        self._changed = threading.Condition()
        #: Runs for which nobody has begun to merge, and when the local thread will.
        self._waiting: dict[str, float] = {}
        self._triggers: list[Trigger] = []
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="fastcheck-merge", daemon=True)
        store.on_pending = self.notify
        self._thread.start()

    def add_trigger(self, trigger: Trigger) -> None:
        """Ask `trigger` first from now on."""
        with self._changed:
            self._triggers.append(trigger)

    def remove_trigger(self, trigger: Trigger) -> None:
        """Undo :meth:`add_trigger`. Idempotent."""
        with self._changed:
            if trigger in self._triggers:
                self._triggers.remove(trigger)

    def notify(self, run: str, generation: int) -> None:
        """Say that deltas of a run wait. Does not block."""
        with self._changed:
            if self._closed:
                return
            self._waiting.setdefault(run, self._clock.now() + self._fallback_seconds)
            triggers = list(self._triggers)
            self._changed.notify_all()
        for trigger in triggers:
            try:
                trigger(run, generation)
            except Exception:  # whatever Dask raises, the local thread merges
                logger.debug("no Dask task for the merge of %s", run, exc_info=True)

    def drain(self, run: str) -> None:
        """Merge what waits of a run; blocks until that is done. Yields to loads between two chunks."""
        with self._changed:
            if self._closed:
                return
            self._waiting.pop(run, None)
        self._store.drain(run, background=True)

    def close(self) -> None:
        """Stop the thread after the chunk it is at. Idempotent."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        self._store.stop_background()
        self._thread.join()

    def _work(self) -> None:
        while (run := self._next_overdue()) is not None:
            try:
                self.drain(run)
            except Exception:  # the thread outlives whatever a merge raises; the deltas stay, reads try again
                logger.exception("merging the deltas of %s failed", run)

    def _next_overdue(self) -> str | None:
        """Wait for a run that no Dask task took; None when closed."""
        with self._changed:
            while not self._closed:
                now = self._clock.now()
                run = min(self._waiting, key=self._waiting.__getitem__, default=None)
                if run is not None and self._waiting[run] <= now:
                    return run
                self._changed.wait(None if run is None else self._waiting[run] - now)
            return None
