"""What keeps a storage node from ending: checkpoints that would lose a shard with it."""

from __future__ import annotations

import asyncio
import logging

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.node.shard_store import ShardStore

#: How often the node looks whether it is still needed.
LOOK_SECONDS = 0.2

logger = logging.getLogger(__name__)


def needs(name: str, latest: CommitRecord | None, nodes: tuple[NodeInfo, ...]) -> bool:
    """Say whether a node has to wait until the master has moved its shard of a run.

    Parameters
    ----------
    name : str
        Of the node that wants to end.
    latest : CommitRecord or None
        The newest committed generation of the run.
    nodes : tuple of NodeInfo
        The registered nodes. If none of them can take the shard, it is enough that the object tier has the
        generation.
    """
    if latest is None or name not in latest.nodes:
        return False
    spare = any(node.state == "available" and node.name not in latest.nodes for node in nodes)
    return spare or not latest.persisted


def waiting_for(store: ShardStore, coordinator: Coordinator) -> list[str]:
    """Return the runs that still need the node: a save is on its way to it, or it holds a shard.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """
    nodes = coordinator.nodes()
    found = []
    for run in sorted(store.status()["runs"]):
        # What is staged first: once it is committed, it is in the record that is read then.
        staged = store.holds(run)["staged"]
        latest = coordinator.latest(run)
        newest = 0 if latest is None else latest.generation
        if any(number > newest for number, *_ in staged) or needs(store.name, latest, nodes):
            found.append(run)
    return found


async def drained(store: ShardStore, coordinator: Coordinator, *, seconds: float) -> bool:
    """Wait until no run needs the node any more, or the time is over; say whether none does.

    New saves have to be kept away before; the master moves what there is. Without any time nobody is asked.
    """
    if seconds <= 0:
        return False
    deadline = Deadline.after(seconds)
    left: list[str] = []
    while True:
        try:
            left = await asyncio.to_thread(waiting_for, store, coordinator)
            if not left:
                return True
        except CoordinationError as error:
            logger.debug("node %s cannot ask whether it is needed: %s", store.name, error)
        if deadline.passed:
            logger.warning(
                "node %s ends after %.0f s though checkpoints need it: %s",
                store.name,
                seconds,
                ", ".join(left) or "the coordinator does not answer",
            )
            return False
        await asyncio.sleep(LOOK_SECONDS)
