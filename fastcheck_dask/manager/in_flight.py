"""The saves that are on their way with one agent, and what it says of them."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable

from fastcheck_dask.agent.channel import Message
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import ConfigError, FastCheckError, TooFewNodesError, from_wire
from fastcheck_dask.manager.handle import SaveHandle

log = logging.getLogger(__name__)


class InFlight:
    """Handles by the number that the agent knows their save by. Any thread may call.

    Parameters
    ----------
    on_failure : callable
        Called with the error of each save that falls short.
    """

    def __init__(self, on_failure: Callable[[FastCheckError], None]) -> None:
        self._on_failure = on_failure
        self._lock = threading.Lock()
        self._seqs = itertools.count()
        self._handles: dict[int, SaveHandle] = {}

    @property
    def handles(self) -> list[SaveHandle]:
        """Handles of the saves that are not done, oldest first."""
        with self._lock:
            return list(self._handles.values())

    def add(self, handle: SaveHandle) -> int:
        """Note that a save is about to be handed over; return its number, larger than any before."""
        with self._lock:
            seq = next(self._seqs)
            self._handles[seq] = handle
            return seq

    def fail(self, seq: int, error: FastCheckError) -> None:
        """Say on the handle that the save does not reach what it has not reached."""
        with self._lock:
            handle = self._handles.pop(seq, None)
        if handle is not None:
            self._on_failure(error)
            handle._fall_short("peers", "object", error=error)

    def fail_all(self, error_of: Callable[[SaveHandle], FastCheckError]) -> None:
        """Fail what is left."""
        with self._lock:
            left = dict(self._handles)
        for seq, handle in left.items():
            self.fail(seq, error_of(handle))

    def take(self, message: Message) -> None:
        """Take what the agent says of a save."""
        seq: int = message["seq"]
        with self._lock:
            handle = self._handles.get(seq)
        if handle is None:
            # Of a trainer before this one, or done already: at the end the agent persists what was put off.
            return
        event = message["event"]
        if event == "committed":
            _committed(handle, message)
        elif event in ("failed", "persist_failed"):
            self.fail(seq, from_wire(message["error"]))
        elif event == "persist_delayed":
            _delayed(handle, message["stats"])
        elif event == "persisted":
            handle._reach("object", message.get("stats"))
        elif event == "not_persisted":
            error = ConfigError(
                f"save {handle.tag!r} is not written to the object tier: persist_every={message['every']}"
            )
            handle._fall_short("object", error=error, waived=True)
        if handle.done():
            with self._lock:
                self._handles.pop(seq, None)


def _delayed(handle: SaveHandle, stats: Message) -> None:
    handle.stats.update(stats)
    # The agent's log has every attempt.
    if stats["persist_attempts"] == 1:
        log.warning(
            "save %r is not in the object tier yet, and is tried again: %s",
            handle.tag,
            stats["persist_error"],
        )


def _committed(handle: SaveHandle, message: Message) -> None:
    record = CommitRecord.from_bytes(message["record"])
    handle._committed(record, message["stats"])
    if not record.nodes:
        unplaced = message.get("unplaced")
        none = TooFewNodesError(1, 0, str(message["stats"]["degraded"]))
        handle._fall_short("peers", error=none if unplaced is None else from_wire(unplaced))
