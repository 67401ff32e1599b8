"""Who is alive, who owns a run, what was committed: the Protocol, ZooKeeper, and SQLite for one machine."""

from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import (
    CommitRecord,
    Coordinator,
    Health,
    NodeInfo,
    Registration,
    RunClaim,
)
from fastcheck_dask.coordination.connect import connect

__all__ = [
    "Access",
    "CommitRecord",
    "Coordinator",
    "Health",
    "NodeInfo",
    "Registration",
    "RunClaim",
    "connect",
]
