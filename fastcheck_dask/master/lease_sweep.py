"""End the leases that nobody renews, so that the nodes may use the memory for others."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import Coordinator, NodeInfo
from fastcheck_dask.coordination.entries import Delete, Entry, EntryConflictError
from fastcheck_dask.coordination.leases import LeaseWatch, lease_path, read_leases
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.master.duty import Leadership

logger = logging.getLogger(__name__)

#: Tells one node that the lease of a run has ended.
Tell = Callable[[NodeInfo, str], Awaitable[None]]


class LeaseSweepDuty:
    """Ends leases. A run whose newest checkpoint is not persisted keeps its lease, however old.

    Ending one only allows the nodes to give the memory of the run to others; they keep what they can.

    Parameters
    ----------
    coordinator : Coordinator
        With the entries of the leases.
    tell : callable
        Tells one node; idempotent.
    interval_seconds : float
        Pause between two rounds.
    clock : Clock
        Monotonic.
    """

    name = "lease sweep"

    def __init__(
        self,
        coordinator: Coordinator,
        tell: Tell,
        *,
        interval_seconds: float = 5.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._coordinator, self._tell = coordinator, tell
        self.interval_seconds = interval_seconds
        self._watch = LeaseWatch(clock)

    async def run(self, leadership: Leadership) -> None:
        """End what has ended; a run that cannot be ended now is looked at again in the next round."""
        ended = await asyncio.to_thread(self._watch.ended, lambda: read_leases(self._coordinator.entries))
        for run, entry in ended.items():
            if not leadership.in_force:
                return
            if await asyncio.to_thread(self._may_end, run):
                await self._end(leadership, run, entry)

    def _may_end(self, run: str) -> bool:
        if self._coordinator.owner(run) is not None:
            return False
        latest = self._coordinator.latest(run)
        return latest is None or latest.persisted

    async def _end(self, leadership: Leadership, run: str, entry: Entry) -> None:
        # The nodes first: should this master die in between, the next one finds the lease and tells again.
        nodes = await asyncio.to_thread(self._coordinator.nodes)
        told = await asyncio.gather(*(self._tell(node, run) for node in nodes), return_exceptions=True)
        for node, result in zip(nodes, told, strict=True):
            if isinstance(result, FastCheckError):
                # Its own lease on the run ends, too.
                logger.debug("node %s was not told that the lease of %s ended: %s", node.name, run, result)
            elif isinstance(result, BaseException):
                raise result
        try:
            await asyncio.to_thread(leadership.apply, Delete(lease_path(run), entry.version))
        except EntryConflictError:
            logger.info("the lease of run %s was renewed at its end", run)
        else:
            logger.info("the lease of run %s ended", run)
