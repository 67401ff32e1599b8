"""Who is alive, who owns a run, what was committed: the Protocol, ZooKeeper, and SQLite for one machine."""

from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import (
    Abort,
    CommitRecord,
    Coordinator,
    Decision,
    Health,
    NodeInfo,
    Registration,
    RunClaim,
)
from fastcheck_dask.coordination.connect import connect

__all__ = [
    "Abort",
    "Access",
    "CommitRecord",
    "Coordinator",
    "Decision",
    "Health",
    "NodeInfo",
    "Registration",
    "RunClaim",
    "connect",
]
