"""A storage node in numbers: for the dashboard of the scheduler, for Prometheus, and for whoever asks."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Any, Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.metrics.families import Family
from fastcheck_dask.node.scrubber import Scrubber
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.version import __version__

#: A report of all runs is not made more often than this.
MAX_AGE_SECONDS: Final = 2.0
#: Runs that the scheduler is told of, at each heartbeat.
_RUN_LIMIT: Final = 64

Report = dict[str, Any]


class Vitals:
    """Asks a node how it is. Any thread may call.

    Parameters
    ----------
    store : ShardStore
        What it holds.
    scrubber : Scrubber
        What it found.
    leads : callable
        Says whether the node is the master.
    clock : Clock
        Monotonic.
    """

    def __init__(
        self, store: ShardStore, scrubber: Scrubber, leads: Callable[[], bool], clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self._store, self._scrubber, self._leads, self._clock = store, scrubber, leads, clock
        self._lock = threading.Lock()
        self._last: tuple[float, Report] | None = None

    def more(self) -> Report:
        """Return what the operation `status` says besides what the store does."""
        now = {"master": self._leads(), "unix": time.time(), "version": __version__}
        return {**self._scrubber.report(), **now}

    def report(self) -> Report:
        """Return what `status` answers, at most `MAX_AGE_SECONDS` old."""
        with self._lock:
            now = self._clock.now()
            if self._last is None or now - self._last[0] > MAX_AGE_SECONDS:
                self._last = now, {**self._store.report(), **self.more()}
            return self._last[1]

    def brief(self) -> Report:
        """Return what the scheduler is told at each heartbeat."""
        return brief_of(self.report(), time.time())

    def families(self) -> list[Family]:
        """Return what Prometheus reads."""
        return families_of(self.report())


def damaged_in(run: Report) -> int:
    """Return how many chunks of a run are damaged, of all generations that are held."""
    return sum(lost["count"] for lost in run["damaged"])


def brief_of(report: Report, now: float) -> Report:
    """Return a report without keys and tokens; `now` are seconds since 1970. Pure."""
    return {
        **{name: report[name] for name in ("name", "used_bytes", "reserved_bytes", "limit_bytes", "master")},
        "pending": sum(run["pending"] for run in report["runs"].values()),
        "damaged": sum(damaged_in(run) for run in report["runs"].values()),
        "runs": {
            name: {
                "generation": None if run["committed"] is None else run["committed"][0],
                "bytes": run["bytes"],
                "damaged": damaged_in(run),
                "persisted": run["persisted"],
            }
            for name, run in list(report["runs"].items())[:_RUN_LIMIT]
        },
        "saves": [
            {
                "run": commit["run"],
                "generation": commit["generation"],
                "unix": now - commit["seconds_ago"],
                "bytes": commit["received_bytes"],
            }
            for commit in report["recent"]
        ],
    }


def families_of(report: Report) -> list[Family]:
    """Return a report as Prometheus has it. Pure."""
    node, runs = report["name"], report["runs"]
    totals: list[tuple[str, Any, str, float]] = [
        ("used_bytes", "gauge", "Bytes of all that is stored.", report["used_bytes"]),
        ("reserved_bytes", "gauge", "Bytes promised to saves and not come yet.", report["reserved_bytes"]),
        ("limit_bytes", "gauge", "Bytes that checkpoints may take.", report["limit_bytes"]),
        ("ring_bytes", "gauge", "Bytes of older generations, of those used.", report["ring"]["used_bytes"]),
        (
            "merges_waiting",
            "gauge",
            "Chunks with deltas that wait to be merged.",
            sum(run["pending"] for run in runs.values()),
        ),
        ("commits", "counter", "Commits since the node started.", report["commits"]),
        ("scrubbed_bytes", "counter", "Bytes that scrubbing has read.", report["scrub"]["checked_bytes"]),
        ("scrub_passes", "counter", "Times that scrubbing has read everything.", report["scrub"]["passes"]),
        (
            "scrub_damaged_chunks",
            "counter",
            "Damaged chunks that scrubbing has found.",
            report["scrub"]["damaged"],
        ),
        ("repaired_chunks", "counter", "Chunks that a repair brought back.", report["repaired"]),
        ("master", "gauge", "1 if the node is the master.", float(report["master"])),
    ]
    families = []
    for name, kind, text, value in totals:
        families.append(Family(f"fastcheck_node_{name}", kind, text, ("node",)))
        families[-1].add(value, node)
    return families + _of_runs(node, runs)


def _of_runs(node: str, runs: Report) -> list[Family]:
    labels = ("node", "run")
    generation = Family("fastcheck_node_generation", "gauge", "Newest committed generation of a run.", labels)
    taken = Family("fastcheck_node_run_bytes", "gauge", "Bytes of that generation.", labels)
    damaged = Family("fastcheck_node_damaged_chunks", "gauge", "Chunks of a run that are damaged.", labels)
    for name, run in sorted(runs.items()):
        if run["committed"] is not None:
            generation.add(run["committed"][0], node, name)
            taken.add(run["bytes"], node, name)
        damaged.add(damaged_in(run), node, name)
    return [generation, taken, damaged]
