"""The handle of a save: a future with levels."""

from __future__ import annotations

import os
import threading
from typing import Any, Literal

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import ClosedError, ConfigError, FastCheckError, TierTimeoutError
from fastcheck_dask.manager.save_metrics import SaveMetrics

Level = Literal["local", "peers", "object"]
LEVELS: tuple[Level, ...] = ("local", "peers", "object")


class SaveHandle:
    """What `FastCheckManager.save_async` returns.

    A save reaches up to three levels: ``"local"`` (the snapshot is complete in shared memory, and the agent
    finishes it even if the trainer dies), ``"peers"`` (committed: the storage nodes hold it) and ``"object"``
    (complete in the object tier). Any thread may ask or wait.

    Attributes
    ----------
    tag : str
    generation : int or None
        None until committed.
    stats : dict
        What the save moved, filled when known: ``raw_bytes``, ``derived_bytes`` (of those, not sent because
        they are the cast of others), ``sent_bytes``, ``chunks``, ``deltas``, ``nodes``, ``flags`` (why
        it is not taken for healthy), ``stall_seconds``, ``save_seconds``, ``persisted_bytes``,
        ``persist_seconds``, ``persist_attempts`` and ``persist_error`` (while it could not be persisted, and
        is tried again).
    skipped : bool
        Whether nothing was saved, because earlier saves were in flight and `on_busy` is ``"skip"``.
    """

    def __init__(self, tag: str, levels: tuple[Level, ...], metrics: SaveMetrics | None = None) -> None:
        self.tag = tag
        self.generation: int | None = None
        self.stats: dict[str, Any] = {}
        self.skipped = False
        self._levels = levels
        self._metrics = metrics
        self._reached: set[Level] = set()
        self._errors: dict[Level, FastCheckError] = {}
        #: Levels that are not reached because the settings say so: no failure.
        self._waived: set[Level] = set()
        self._changed = threading.Condition()
        self._pid = os.getpid()

    def wait(self, level: Level | None = None, timeout: float | None = None) -> SaveHandle:
        """Wait until the save has reached a level.

        Parameters
        ----------
        level : {"local", "peers", "object"}, optional
            ``"peers"`` unless given, or ``"object"`` where there are no peers.
        timeout : float, optional
            Seconds; without it the wait ends when the level is reached or cannot be any more.

        Returns
        -------
        SaveHandle
            This one.

        Raises
        ------
        FastCheckError
            Why the level cannot be reached.
        ClosedError
            In a forked child, which would never hear of it.
        TierTimeoutError
            If `timeout` is over; the save goes on.
        """
        level = self._level(level)
        self._check_process()
        deadline = Deadline.after(timeout)
        with self._changed:
            while level not in self._reached:
                if level in self._errors:
                    raise self._errors[level]
                if deadline.passed or not self._changed.wait(deadline.left()):
                    raise TierTimeoutError(
                        f"save {self.tag!r} has not reached {level!r} in {timeout} s{self._delay(level)}"
                    )
        return self

    def _delay(self, level: Level) -> str:
        """Say what keeps a save from a level, as far as that is known."""
        why = self.stats.get("persist_error") if level == "object" else None
        return (
            f"; attempt {self.stats['persist_attempts']} failed, and it is tried again: {why}" if why else ""
        )

    def _level(self, level: Level | None) -> Level:
        if level is None:
            return "peers" if "peers" in self._levels else "object"
        if level not in LEVELS:
            raise ConfigError(f"a level is one of {', '.join(LEVELS)}; got {level!r}")
        if level not in self._levels:
            raise ConfigError(
                f"this manager has no level {level!r}: it was made without storage nodes "
                "(scheduler=..., coordinator=...); wait for 'local' or 'object'"
            )
        return level

    def done(self) -> bool:
        """Say whether every level was reached or cannot be reached any more."""
        with self._changed:
            return all(level in self._reached or level in self._errors for level in self._levels)

    def exception(self, timeout: float | None = None) -> FastCheckError | None:
        """Wait until the save is done; return why it fell short of a level, None if it did not."""
        self._check_process()
        deadline = Deadline.after(timeout)
        with self._changed:
            while not self.done():
                if deadline.passed or not self._changed.wait(deadline.left()):
                    raise TierTimeoutError(f"save {self.tag!r} is not done in {timeout} s")
            failures = [self._errors[v] for v in self._levels if v in self._errors and v not in self._waived]
        return failures[0] if failures else None

    @property
    def level(self) -> Level | None:
        """The highest level reached so far; None if the snapshot was not taken."""
        with self._changed:
            return next((v for v in reversed(LEVELS) if v in self._reached), None)

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise ClosedError(
                f"save {self.tag!r} belongs to process {self._pid}, of which this one was forked; wait there"
            )

    def __repr__(self) -> str:
        return f"<SaveHandle {self.tag!r} generation={self.generation} level={self.level}>"

    def _reach(self, level: Level, stats: dict[str, Any] | None = None) -> None:
        with self._changed:
            self.stats.update(stats or {})
            new = level not in self._reached
            self._reached.add(level)
            self._changed.notify_all()
        if self._metrics is not None and new:
            self._metrics.reached(level, self.stats)

    def _committed(self, record: CommitRecord, stats: dict[str, Any]) -> None:
        self.generation = record.generation
        self.stats.update(stats)
        if self._metrics is not None:
            self._metrics.committed(record.generation, stats)
        if record.nodes:
            self._reach("peers")

    def _fall_short(self, *levels: Level, error: FastCheckError, waived: bool = False) -> None:
        with self._changed:
            for level in levels:
                if level in self._levels and level not in self._reached and level not in self._errors:
                    self._errors[level] = error
                    if waived:
                        self._waived.add(level)
                    elif self._metrics is not None:
                        self._metrics.fell_short(level, error)
            self._changed.notify_all()
