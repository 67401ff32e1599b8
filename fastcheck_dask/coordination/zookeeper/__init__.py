"""A coordinator for clusters: ZooKeeper."""

from fastcheck_dask.coordination.zookeeper.coordinator import ZooKeeperCoordinator

__all__ = ["ZooKeeperCoordinator"]
