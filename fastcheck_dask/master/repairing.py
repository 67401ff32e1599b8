"""Redundancy returns by itself: what lost nodes held is rebuilt on others, and nodes that end are emptied."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo
from fastcheck_dask.coordination.leases import read_leases
from fastcheck_dask.coordination.runs import RunDescription, described_runs
from fastcheck_dask.engine.repair import Repaired, RepairOrder
from fastcheck_dask.errors import CommitConflictError, FastCheckError, TierError
from fastcheck_dask.master.duty import Leadership
from fastcheck_dask.master.persisting import persist_from_nodes
from fastcheck_dask.master.repair_plan import RepairPlan, repair_plan
from fastcheck_dask.master.survey import Survey, survey
from fastcheck_dask.tiers.peer import PeerClient

logger = logging.getLogger(__name__)

#: Rounds in a row in which a registered node does not answer, before it counts as lost.
SILENT_ROUNDS = 3
#: Pause before a repair that failed is tried again; doubled each time, up to the second number.
_BACK_OFF_SECONDS = (1.0, 60.0)

#: Does a repair, here or elsewhere.
Repairer = Callable[[RepairOrder], Awaitable[Repaired]]


class RepairDuty:
    """Repairs the newest committed generation of every run, each shard by one order after the other.

    What nodes hold is only added to, and what is added is verified by its digest: two masters that repair
    at once do no harm. Which nodes hold a generation is changed by `Coordinator.relocate`, once the node that
    takes over has every chunk: a deposed master cannot, nor can one whose generation was followed by another.

    A run whose lease has ended is left alone if it is persisted: the nodes may give it up.

    Parameters
    ----------
    coordinator : Coordinator
        With the entries of descriptions and leases.
    client : callable
        Opens a node by name and address.
    repair : callable
        Does an order.
    interval_seconds : float
        Pause between two rounds.
    bytes_per_second : float, optional
        What one repair may bring to a node.
    clock : Clock
        Monotonic.
    """

    name = "repair"

    def __init__(
        self,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
        repair: Repairer,
        *,
        interval_seconds: float = 2.0,
        bytes_per_second: float | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._coordinator, self._client, self._repair = coordinator, client, repair
        self.interval_seconds = interval_seconds
        self._bytes_per_second = bytes_per_second
        self._clock = clock
        self._silent: Counter[str] = Counter()
        #: When another node comes or goes, what failed is tried again at once.
        self._nodes: frozenset[NodeInfo] = frozenset()
        #: By run: when it may be tried again, and the pause after the next failure.
        self._waiting: dict[str, tuple[float, float]] = {}

    async def run(self, leadership: Leadership) -> None:
        """Look at every run once; an error of one does not keep the others."""
        found = await survey(self._coordinator, self._client)
        self._silent = Counter({n: self._silent[n] + 1 for n in found.nodes if n not in found.reports})
        descriptions = await asyncio.to_thread(described_runs, self._coordinator.entries)
        leased = await asyncio.to_thread(read_leases, self._coordinator.entries)
        before, self._nodes = self._nodes, frozenset(found.nodes.values())
        if before != self._nodes:
            self._waiting.clear()
        failures: list[str] = []
        for run in found.runs:
            until, _ = self._waiting.get(run, (0.0, 0.0))
            if not leadership.in_force or (run in self._waiting and self._clock.now() < until):
                continue
            try:
                trouble = await self._look_after(
                    leadership, run, found, description=descriptions.get(run), leased=run in leased
                )
                failures += [trouble] if trouble else []
                self._waiting.pop(run, None)
            except CommitConflictError as error:
                logger.info("run %s has moved on during its repair: %s", run, error)
            except FastCheckError as error:
                self._back_off(run)
                failures.append(str(error))
        if failures:
            raise TierError("; ".join(failures))

    def _back_off(self, run: str) -> None:
        first, longest = _BACK_OFF_SECONDS
        _, pause = self._waiting.get(run, (0.0, first))
        self._waiting[run] = self._clock.now() + pause, min(longest, 2 * pause)

    async def _look_after(
        self,
        leadership: Leadership,
        run: str,
        found: Survey,
        *,
        description: RunDescription | None,
        leased: bool,
    ) -> str:
        """Repair one run; return what cannot be repaired now."""
        record = await asyncio.to_thread(self._coordinator.latest, run)
        if record is None or not record.nodes or (record.persisted and not leased):
            return ""
        shards = found.shards(record)
        if shards is not None and all(shard.condition == "whole" for shard in shards):
            return ""
        # Once more, now that the record was read before: its nodes held all of it when it was committed.
        found = await survey(self._coordinator, self._client)
        plan = self._plan(record, found, description)
        for order in plan.orders:
            if not leadership.in_force:
                return ""
            record = await self._do(leadership, replace(order, record=record))
        if plan.stranded and not record.persisted and description is not None:
            await persist_from_nodes(self._coordinator, self._client, description, record)
        return plan.hopeless

    def _plan(self, record: CommitRecord, found: Survey, description: RunDescription | None) -> RepairPlan:
        shards = found.shards(record)
        if shards is None:
            return RepairPlan()
        return repair_plan(
            record,
            shards,
            found,
            given_up={name for name, rounds in self._silent.items() if rounds >= SILENT_ROUNDS},
            location=description.location if description is not None and record.persisted else None,
            bytes_per_second=self._bytes_per_second,
        )

    async def _do(self, leadership: Leadership, order: RepairOrder) -> CommitRecord:
        """Repair one shard, and return the record as it is then."""
        record, former = order.record, order.record.nodes[order.shard]
        started = self._clock.now()
        done = await self._repair(order)
        if order.moved != record:
            record = await asyncio.to_thread(
                self._coordinator.relocate, record, order.moved, fencing_token=leadership.fencing_token
            )
        logger.warning(
            "generation %d (%s) of run %s: shard %d of %s is whole on %s: %d chunks, %d bytes in %.2f s",
            record.generation,
            record.tag,
            record.run,
            order.shard,
            former,
            order.node,
            done.chunks,
            done.raw_bytes,
            self._clock.now() - started,
        )
        return record
