"""What the saves of one manager came to, counted for monitoring."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.metrics.families import Family

#: Which of the stats says how long a level took.
_SECONDS = {"local": "stall_seconds", "peers": "save_seconds", "object": "persist_seconds"}


class SaveMetrics:
    """Counts what handles are told. Any thread may call; nothing blocks for long.

    Parameters
    ----------
    run : str
        Label of every number.
    unix_time : callable
        Seconds since 1970.
    """

    def __init__(self, run: str, unix_time: Callable[[], float] = time.time) -> None:
        self._run, self._unix_time = run, unix_time
        self._lock = threading.Lock()
        self._reached: Counter[str] = Counter()
        self._failed: Counter[tuple[str, str]] = Counter()
        self._bytes: Counter[str] = Counter()
        self._seconds: dict[str, float] = dict.fromkeys(_SECONDS, 0.0)
        self._timed: Counter[str] = Counter()
        self._degraded = 0
        self._last: dict[str, Any] | None = None

    def reached(self, level: str, stats: dict[str, Any]) -> None:
        """Count a save that reached a level; `stats` are all that is known of it by then."""
        with self._lock:
            self._reached[level] += 1
            seconds = stats.get(_SECONDS[level])
            if seconds is not None:
                self._seconds[level] += seconds
                self._timed[level] += 1
            if level == "object":
                # Without storage nodes the object tier gets what is sent.
                self._bytes["persisted"] += stats.get("persisted_bytes", stats.get("sent_bytes", 0))

    def committed(self, generation: int, stats: dict[str, Any]) -> None:
        """Count a save that was committed."""
        with self._lock:
            self._bytes["raw"] += stats["raw_bytes"]
            self._bytes["sent"] += stats["sent_bytes"]
            self._degraded += bool(stats["degraded"])
            ratio = stats["sent_bytes"] / stats["raw_bytes"] if stats["raw_bytes"] else 1.0
            self._last = {"generation": generation, "ratio": ratio, "unix": self._unix_time()}

    def fell_short(self, level: str, error: FastCheckError) -> None:
        """Count a save that cannot reach a level, and why; ``SaveBusyError`` at ``local``: it was skipped."""
        with self._lock:
            self._failed[level, type(error).__name__] += 1

    def families(self) -> list[Family]:
        """Return the numbers as they are now."""
        with self._lock:
            return [*self._counted(), *self._of_the_last()]

    def _family(self, name: str, kind: Any, text: str, *labels: str) -> Family:
        return Family(f"fastcheck_{name}", kind, text, ("run", *labels))

    def _counted(self) -> list[Family]:
        run = self._run
        saves = self._family("saves", "counter", "Saves that reached a level.", "level")
        seconds = self._family("save_seconds", "summary", "Time that saves took up to a level.", "level")
        for level in _SECONDS:
            saves.add(self._reached[level], run, level)
            seconds.add(self._seconds[level], run, level, count=self._timed[level])
        stall = self._family("save_stall_seconds", "summary", "Time that training waited for saves.")
        stall.add(self._seconds["local"], run, count=self._timed["local"])
        failures = self._family(
            "save_failures", "counter", "Saves that fell short of a level, by error.", "level", "kind"
        )
        for (level, kind), count in sorted(self._failed.items()):
            failures.add(count, run, level, kind)
        single = [
            ("save_raw_bytes", "Bytes of the states that were committed.", self._bytes["raw"]),
            ("save_sent_bytes", "Encoded bytes that were sent for them.", self._bytes["sent"]),
            ("save_persisted_bytes", "Bytes written to the object tier.", self._bytes["persisted"]),
            ("saves_degraded", "Saves committed with less redundancy than wanted.", self._degraded),
        ]
        counters = []
        for name, text, value in single:
            counters.append(self._family(name, "counter", text))
            counters[-1].add(value, run)
        return [saves, seconds, stall, failures, *counters]

    def _of_the_last(self) -> list[Family]:
        if self._last is None:
            return []
        gauges = [
            ("generation", "Newest generation that was committed.", "generation"),
            ("save_ratio", "Sent bytes of the last committed save, over its raw bytes.", "ratio"),
            ("last_commit_timestamp_seconds", "When the last save was committed, since 1970.", "unix"),
        ]
        found = []
        for name, text, key in gauges:
            found.append(self._family(name, "gauge", text))
            found[-1].add(self._last[key], self._run)
        return found
