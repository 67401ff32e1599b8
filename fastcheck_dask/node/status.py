"""What a storage node says of itself."""

from __future__ import annotations

from heapq import nsmallest
from typing import Any

from fastcheck_dask.node.generations import Run
from fastcheck_dask.node.holdings import LEASE_SECONDS, Holdings

#: Damaged keys that are named for one generation: a message has to hold them.
_NAMED_KEYS = 1000


def summary_of(holdings: Holdings) -> dict[str, Any]:
    """Return what `ping` answers; does not need the lock.

    Who holds the lock may be at a commit of tens of thousands of chunks. Each value is of a moment between
    the question and the answer, but not all of the same one.
    """
    # A copy is made in one go, and may be gone through while runs come and go.
    runs = holdings.runs.copy()
    committed = {name: run.committed for name, run in runs.items()}
    return {
        "name": holdings.name,
        "used_bytes": holdings.ledger.used_bytes,
        "limit_bytes": holdings.limit_bytes,
        "runs": {name: None if held is None else list(held.name) for name, held in committed.items()},
        "pending": sum(len(held.pending) for run in runs.values() for held in run.generations()),
    }


def report_of(holdings: Holdings) -> dict[str, Any]:
    """Return what `status` answers, all of one moment; called with the lock held, and counts no keys."""
    now = holdings.clock.now()
    return {
        "name": holdings.name,
        "used_bytes": holdings.ledger.used_bytes,
        "reserved_bytes": holdings.reserved_bytes(),
        "limit_bytes": holdings.limit_bytes,
        "ring": {
            "generations": holdings.ring,
            "used_bytes": holdings.ring_ledger.used_bytes,
            "limit_bytes": holdings.ring_limit_bytes,
        },
        "commits": holdings.commit_count,
        "repaired": holdings.repaired_count,
        "recent": [
            {
                "run": commit.run,
                "generation": commit.generation,
                "received_bytes": commit.received_bytes,
                "seconds_ago": now - commit.at,
            }
            for commit in holdings.commits
        ],
        "runs": {name: _of_run(run, now) for name, run in holdings.runs.items()},
    }


def _of_run(run: Run, now: float) -> dict[str, Any]:
    return {
        **run.holds(),
        "staged": [
            {
                "generation": staged.number,
                "token": staged.token,
                "prepared": staged.prepared,
                "staged_bytes": staged.staged_bytes,
                "reserved_bytes": staged.reserved_bytes,
                "expires_seconds": None if staged.prepared else staged.expires - now,
            }
            for staged in run.staged.values()
        ],
        "bytes": 0 if run.committed is None else run.committed.nbytes,
        "pending": sum(len(held.pending) for held in run.generations()),
        "persisted": run.persisted if run.persisted >= 0 else None,
        "lease": {
            "asked": run.leased_until is not None,
            "ends_seconds": run.lease_ends(LEASE_SECONDS) - now,
        },
        "damaged": [
            {
                "generation": held.number,
                "token": held.token,
                "count": len(held.lost),
                "keys": nsmallest(_NAMED_KEYS, held.lost),
            }
            for held in run.generations()
            if held.lost
        ],
    }
