"""Asks a sample of the storage nodes each second how they are; runs in the agent."""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.placement.outlook import UNKNOWN, Outlook
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: How often, and how many nodes each time.
PROBE_SECONDS = 1.0
SAMPLE = 8
#: Without a save for so long nothing is asked until the next one.
IDLE_SECONDS = 60.0


class Prober:
    """Keeps the outlook of the nodes. Belongs to one event loop; `run` is a task of its own.

    Parameters
    ----------
    client : callable
        Makes a client of a node's name and address: each node has a connection of its own for this.
    clock : Clock, optional
        Tells the seconds.
    """

    def __init__(self, client: Callable[[str, str], PeerClient], *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._client = client
        self._clock = clock
        self._nodes: Sequence[NodeInfo] = ()
        self._clients: dict[str, PeerClient] = {}
        self._outlooks: dict[str, Outlook] = {}
        self._awake = asyncio.Event()
        self._until = 0.0

    @property
    def outlooks(self) -> Mapping[str, Outlook]:
        """What is known, by the names of the nodes."""
        return self._outlooks

    def wake(self, nodes: Sequence[NodeInfo]) -> None:
        """Note that a save chose among these nodes: they are asked for a while from now on."""
        self._nodes = nodes
        self._until = self._clock.now() + IDLE_SECONDS
        self._awake.set()

    def measured(self, rates: Mapping[str, float]) -> None:
        """Take note of what nodes take alone, in bytes a second, where no save has said so yet."""
        for name, rate in rates.items():
            outlook = self._outlooks.get(name, UNKNOWN)
            if outlook.seconds_per_byte is None and rate > 0:
                self._outlooks[name] = replace(outlook, seconds_per_byte=1 / rate)

    def transferred(self, transfers: Mapping[str, tuple[int, float]]) -> None:
        """Take note of what a save sent to each node, in bytes and seconds."""
        for name, (nbytes, seconds) in transfers.items():
            self._outlooks[name] = self._outlooks.get(name, UNKNOWN).transferred(nbytes, seconds)

    async def run(self) -> None:
        """Ask until cancelled."""
        try:
            while True:
                await self._awake.wait()
                await self.ask_some()
                await asyncio.sleep(PROBE_SECONDS)
                if self._clock.now() >= self._until:
                    self._awake.clear()
                    await self._close()
        finally:
            await self._close()

    async def ask_some(self) -> None:
        """Ask a sample of the nodes once, all at the same time."""
        alive = {node.name: node for node in self._nodes}
        for name in self._clients.keys() - alive.keys():
            await self._clients.pop(name).close()
        self._outlooks = {name: o for name, o in self._outlooks.items() if name in alive}
        sample = random.sample(list(alive.values()), min(SAMPLE, len(alive)))
        await asyncio.gather(*(self._ask(node) for node in sample))

    async def _ask(self, node: NodeInfo) -> None:
        client = self._clients.get(node.name)
        if client is None or client.address != node.address:
            client = self._clients[node.name] = self._client(node.name, node.address)
        try:
            # The first one may have to connect.
            await client.ping()
            began = self._clock.now()
            found = await client.ping()
            took = self._clock.now() - began
        except FastCheckError as error:
            log.debug("node %s did not answer a ping: %s", node.name, error)
            return
        used, limit = found.get("used_bytes"), found.get("limit_bytes")
        share = used / limit if isinstance(used, int) and isinstance(limit, int) and limit > 0 else 0.0
        self._outlooks[node.name] = self._outlooks.get(node.name, UNKNOWN).pinged(took, share)

    async def _close(self) -> None:
        clients, self._clients = list(self._clients.values()), {}
        await asyncio.gather(*(client.close() for client in clients), return_exceptions=True)
