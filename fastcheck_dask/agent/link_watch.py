"""The bandwidths of the links to the nodes: measured at the start and when nodes come, not in the way."""

from __future__ import annotations

import asyncio
import ipaddress
import logging
from collections.abc import Sequence

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.placement.bandwidth import SHARDS_CAP, Bandwidths, measure_out
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.peer import clients_for
from fastcheck_dask.tiers.wire import location_of

log = logging.getLogger(__name__)

#: From one measurement to the next, however often nodes come.
PAUSE_SECONDS = 60.0
#: How long it waits for a moment in which the training does not communicate.
_FREE_SECONDS = 5.0


class LinkWatch:
    """Measures the links of one agent, and keeps what was found. Belongs to its event loop.

    Links are measured before the first save and again when a node is there that was not measured, at most
    once in `PAUSE_SECONDS`. What is sent for it waits while the network is busy; a measurement during which
    the training began to communicate says nothing and is dropped. With ``measure_links="auto"`` nothing is
    measured while a node is on this machine: what is not limited by a link says nothing of links.

    Parameters
    ----------
    settings : Settings
        Of the agent.
    pacer : Pacer
        Says when the network is busy, and limits what is sent.
    clock : Clock, optional
        Tells the seconds.
    """

    def __init__(self, settings: Settings, pacer: Pacer, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._settings, self._pacer, self._clock = settings, pacer, clock
        self._client = clients_for(settings, pacer)
        self._next = 0.0
        self._measured: frozenset[str] = frozenset()
        self._measuring = asyncio.Lock()
        #: What was found last; None: nothing yet.
        self.found: Bandwidths | None = None

    async def look(self, nodes: Sequence[NodeInfo]) -> bool:
        """Measure if it is time to; return whether something new was found. Never raises `FastCheckError`."""
        async with self._measuring:
            asked = [node for node in nodes if node.state == "available"][: SHARDS_CAP + 1]
            if not self._wanted(asked):
                return False
            await self._pacer.wait_until_free(_FREE_SECONDS)
            if self._pacer.is_busy:
                return False
            return await self._measure(asked)

    async def _measure(self, asked: Sequence[NodeInfo]) -> bool:
        self._next = self._clock.now() + PAUSE_SECONDS
        busy_times = self._pacer.busy_times
        try:
            found = await measure_out(asked, self._client, clock=self._clock)
        except FastCheckError as error:
            log.warning("the links cannot be measured: %s", error)
            return False
        if self._pacer.busy_times != busy_times:
            log.info("the links were measured while the training communicated, which says nothing")
            return False
        self.found, self._measured = found, frozenset(node.name for node in asked)
        log.info(
            "%.0f MB/s go out to %d nodes at once, and %.0f MB/s to one of them (median)",
            found.out / 1e6,
            len(asked),
            found.one / 1e6,
        )
        return True

    def _wanted(self, asked: Sequence[NodeInfo]) -> bool:
        if not asked or self._settings.measure_links is False or self._clock.now() < self._next:
            return False
        if self._measured >= {node.name for node in asked}:
            return False
        return self._settings.measure_links is True or not any(is_here(node) for node in asked)


def is_here(node: NodeInfo) -> bool:
    """Say whether a node is on this machine, by its address."""
    host = location_of(node.address).rpartition(":")[0].strip("[]")
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
