"""Which nodes a save goes to: what the agent knows of them, and of the links."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from fastcheck_dask.agent.link_watch import LinkWatch
from fastcheck_dask.agent.node_states import NodeStates
from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo
from fastcheck_dask.errors import (
    CoordinationError,
    FastCheckError,
    NodeRefusedError,
    TierFullError,
    TooFewNodesError,
)
from fastcheck_dask.placement.bandwidth import DEFAULT_SHARDS
from fastcheck_dask.placement.outlook import SlowNodes, weights_of
from fastcheck_dask.placement.policy import Choice, choose, replacement
from fastcheck_dask.placement.probe import Prober
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.peer import clients_for

log = logging.getLogger(__name__)

#: A node that failed is not chosen again for this long, in seconds, unless there is no other.
_SUSPECT_SECONDS = 30.0


class Placing:
    """Chooses the nodes of the saves of one agent. Belongs to its event loop.

    Parameters
    ----------
    settings : Settings
        Of the agent.
    coordinator : Coordinator
        Knows the registered nodes.
    wanted_shards : int or None
        Data shards if they were given explicitly.
    states : NodeStates, optional
        Tells the present states of nodes; without it they are those of the registry.
    pacer : Pacer, optional
        Holds back what is sent to measure the links.
    """

    def __init__(
        self,
        settings: Settings,
        coordinator: Coordinator,
        *,
        wanted_shards: int | None,
        states: NodeStates | None = None,
        pacer: Pacer | None = None,
    ) -> None:
        self._settings = settings
        self._coordinator = coordinator
        self._wanted = wanted_shards
        self._states = states
        self._slow = SlowNodes()
        # The connections of probes are their own: a ping shall not queue behind a chunk.
        self._prober = Prober(clients_for(settings))
        self._probing: asyncio.Task[None] | None = None
        self._links = LinkWatch(settings, pacer or Pacer())
        self._looking: asyncio.Task[None] | None = None
        self._suspects: dict[str, float] = {}
        #: Nodes that failed during the save that is being placed.
        self._failed: set[str] = set()

    def start(self) -> None:
        """Begin to ask nodes how they are, whenever there are saves."""
        self._probing = asyncio.create_task(self._prober.run())
        self._looking = asyncio.create_task(self._look_early())

    async def _look_early(self) -> None:
        """Measure the links while the training is being set up, if there are nodes already."""
        try:
            await self._max_shards(await self._alive(), None)
        except CoordinationError as error:
            log.debug("the links are not measured yet: %s", error)

    def observe(self, transfers: Mapping[str, tuple[int, float]]) -> None:
        """Take note of what a save sent to each node, in bytes and seconds."""
        self._slow.observe(transfers)
        self._prober.transferred(transfers)

    async def choose(
        self, latest: CommitRecord | None, excluded: set[str], cause: FastCheckError | None
    ) -> Choice:
        """Choose the nodes of a save.

        Parameters
        ----------
        latest : CommitRecord or None
            The newest committed generation: placement is sticky.
        excluded : set of str
            Nodes that failed during this save.
        cause : FastCheckError or None
            Why it is tried again.

        Raises
        ------
        TooFewNodesError, TierFullError, NodeRefusedError
            If an explicit number of shards cannot be had.
        CoordinationError
            If the coordinator cannot be asked.
        """
        if cause is None:
            self._failed.clear()
        alive = await self._alive()
        self._prober.wake(alive)
        suspects = self._suspected()
        arguments: dict[str, Any] = {
            "wanted": self._wanted,
            "max_shards": await self._max_shards(alive, latest),
            "parity": self._settings.parity,
            "previous": latest.nodes if latest else (),
            "previous_shards": latest.shards if latest else None,
            "avoided": self._slow.avoided,
            "outlooks": self._prober.outlooks,
        }
        with contextlib.suppress(TooFewNodesError):
            choice = choose(alive, excluded=suspects | excluded, **arguments)
            if choice.shards > 0:
                return self._weighted(choice)
        if self._wanted is None:
            # With fewer shards it can do without those that it tried.
            excluded = excluded | self._failed
        try:
            choice = choose(alive, excluded=excluded, **arguments)
        except TooFewNodesError as error:
            # Nodes that are alive and full, or do not let us in, are not "too few": say what is in the way.
            raise (cause if isinstance(cause, TierFullError | NodeRefusedError) else error) from cause
        if cause is not None and choice.shards == 0:
            degraded = f"{cause}: only the object tier protects this checkpoint"
            return Choice(0, 0, (), degraded, cause=cause)
        return self._weighted(choice)

    def _weighted(self, choice: Choice) -> Choice:
        """Return the choice with shards in proportion to what its nodes take, if they are to be so."""
        if self._settings.stripes != "weighted":
            return choice
        names = [node.name for node in choice.nodes]
        return replace(choice, weights=weights_of(names, self._prober.outlooks))

    async def _alive(self) -> Sequence[NodeInfo]:
        """Return the registered nodes, with their newest states."""
        alive = await asyncio.to_thread(self._coordinator.nodes)
        return alive if self._states is None else await self._states.of(alive)

    async def _max_shards(self, alive: Sequence[NodeInfo], latest: CommitRecord | None) -> int:
        """Return the most data shards of automatic choice: by the links, if they are measured."""
        if self._wanted is None or self._settings.stripes == "weighted":
            await self._look(alive)
        limit = self._settings.max_shards
        if self._links.found is None:
            return limit or DEFAULT_SHARDS
        shards = self._links.found.shards_after(latest.shards if latest else None)
        return shards if limit is None else min(shards, limit)

    async def _look(self, alive: Sequence[NodeInfo]) -> None:
        if await self._links.look(alive) and self._links.found is not None:
            self._prober.measured(self._links.found.to_node)

    async def substitute(
        self, others: Sequence[NodeInfo], taken: Collection[str], failed: NodeInfo, error: FastCheckError
    ) -> NodeInfo | None:
        """Choose a node for a shard whose node failed in the middle of a save."""
        self.suspect(failed.name)
        try:
            alive = await self._alive()
        except CoordinationError as away:
            log.warning("no node can be found in place of %s (%s): %s", failed.name, error, away)
            return None
        suspected = self._suspected() | set(taken)
        choose_from = partial(replacement, alive, others=others, outlooks=self._prober.outlooks)
        return choose_from(excluded=suspected | self._slow.avoided) or choose_from(excluded=taken)

    def suspect(self, name: str) -> None:
        """Note that a node failed."""
        self._failed.add(name)
        self._suspects[name] = time.monotonic() + _SUSPECT_SECONDS

    def _suspected(self) -> set[str]:
        now = time.monotonic()
        return {name for name, until in self._suspects.items() if until > now}

    async def close(self) -> None:
        """Ask no more. Idempotent."""
        if self._states is not None:
            self._states.close()
        tasks = [task for task in (self._probing, self._looking) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
