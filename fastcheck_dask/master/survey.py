"""How the storage nodes are, and which shards of a checkpoint are there. Pure but for `survey`."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.tiers.peer import PeerClient

logger = logging.getLogger(__name__)

#: *whole*; *damaged*: some chunks are lost; *leaving*: there, on a node that is about to end; *silent*: on a
#: node that is registered and does not answer; *gone*: the node is not there, or it has lost its memory.
Condition = Literal["whole", "damaged", "leaving", "silent", "gone"]


@dataclass(frozen=True)
class ShardState:
    """One shard of a generation, as its node tells of it."""

    shard: int
    node: str
    condition: Condition
    #: Chunks that the node lacks, and some of them by name.
    damaged: int = 0
    damaged_keys: tuple[str, ...] = ()


@dataclass(frozen=True)
class Survey:
    """What the nodes said of themselves at about one moment."""

    #: All that are registered, by name.
    nodes: Mapping[str, NodeInfo]
    #: Of those that answered: what the operation `status` returned.
    reports: Mapping[str, Mapping[str, Any]]

    @property
    def runs(self) -> tuple[str, ...]:
        """The runs of which any node holds anything, sorted."""
        return tuple(sorted({run for report in self.reports.values() for run in report["runs"]}))

    def shards(self, record: CommitRecord) -> tuple[ShardState, ...] | None:
        """Say how the shards of a generation are; None if a node has a newer generation meanwhile.

        Parameters
        ----------
        record : CommitRecord
            The newest committed generation, read before the nodes were asked, or shortly after.
        """
        found = []
        for shard, (name, address) in enumerate(zip(record.nodes, record.addresses, strict=True)):
            node, report = self.nodes.get(name), self.reports.get(name)
            if node is None or (report is None and node.address != address):
                found.append(ShardState(shard, name, "gone"))
            elif report is None:
                found.append(ShardState(shard, name, "silent"))
            else:
                run = report["runs"].get(record.run)
                if run is not None and (run["committed"] or [0])[0] > record.generation:
                    return None
                found.append(_state(shard, record, node, run, address))
        return tuple(found)

    def free_bytes(self, name: str) -> int:
        """Return what a node has neither used nor promised; 0 if it did not answer."""
        report = self.reports.get(name)
        if report is None:
            return 0
        return int(report["limit_bytes"] - report["used_bytes"] - report["reserved_bytes"])

    def shard_bytes(self, record: CommitRecord) -> int:
        """Return what the largest shard of a generation takes on its node, as far as is known."""
        runs = (self.reports[name]["runs"].get(record.run) for name in record.nodes if name in self.reports)
        return max((int(run["bytes"]) for run in runs if run is not None), default=0)


def _state(
    shard: int, record: CommitRecord, node: NodeInfo, run: Mapping[str, Any] | None, address: str
) -> ShardState:
    # Under another address it is another process: even if it holds the shard, the record leads elsewhere.
    if run is None or node.address != address or not _holds(run, record):
        return ShardState(shard, node.name, "gone")
    for lost in run["damaged"]:
        if (lost["generation"], lost["token"]) == (record.generation, record.token):
            return ShardState(shard, node.name, "damaged", lost["count"], tuple(lost["keys"]))
    return ShardState(shard, node.name, "whole" if node.state == "available" else "leaving")


def _holds(run: Mapping[str, Any], record: CommitRecord) -> bool:
    name = [record.generation, record.token]
    prepared = ([s["generation"], s["token"]] for s in run["staged"] if s["prepared"])
    return name == run["committed"] or name in run["pins"] or name in run["ring"] or name in prepared


async def survey(coordinator: Coordinator, client: Callable[[str, str], PeerClient]) -> Survey:
    """Ask every registered node how it is, all at once.

    Parameters
    ----------
    coordinator : Coordinator
        Knows the nodes.
    client : callable
        Opens a node by name and address.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """
    nodes = await asyncio.to_thread(coordinator.nodes)
    reports = await asyncio.gather(*(_report(node, client) for node in nodes))
    return Survey(
        {node.name: node for node in nodes},
        {node.name: report for node, report in zip(nodes, reports, strict=True) if report is not None},
    )


async def _report(node: NodeInfo, client: Callable[[str, str], PeerClient]) -> dict[str, Any] | None:
    opened = client(node.name, node.address)
    try:
        return await opened.status()
    except FastCheckError as error:
        logger.debug("node %s does not say how it is: %s", node.name, error)
        return None
    finally:
        await opened.close()
