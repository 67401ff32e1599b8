"""Real ZooKeeper servers for tests: one, or three that elect a leader; each can be killed or paused."""

from __future__ import annotations

from fastcheck_dask.coordination.zookeeper.distribution import ZooKeeperMissingError
from fastcheck_dask.coordination.zookeeper.ensemble import ZooKeeperEnsemble
from fastcheck_dask.coordination.zookeeper.server import ServerOptions, ZooKeeperServer

__all__ = ["ServerOptions", "ZooKeeperEnsemble", "ZooKeeperMissingError", "ZooKeeperServer"]
