"""Where repairs run: as Dask tasks on the worker of the node that takes over, or in this process."""

from __future__ import annotations

import asyncio
import itertools
import logging
from dataclasses import asdict
from typing import Any, Final, cast

from distributed import Client, Future, secede

from fastcheck_dask.config import settings
from fastcheck_dask.engine.repair import Repaired, RepairOrder, repair_shard
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.tiers.peer import clients_for

#: By which the dashboard groups the tasks.
TASK_PREFIX: Final = "fastcheck-repair"
#: How long a scheduler may take to be there, and how often it is asked whether the worker still is.
_CONNECT_SECONDS: Final = 3.0
_LOOK_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)
_numbers = itertools.count()


async def repair_here(order: RepairOrder) -> Repaired:
    """Do an order in this process."""
    return await repair_shard(order, clients_for(settings()))


def repair_task(order: dict[str, Any]) -> dict[str, Any]:
    """Do an order as a Dask task; the values are those of `RepairOrder.to_plain` and `Repaired`."""
    # Merges are tasks of the same worker, which has a single thread: they need not wait.
    secede()  # type: ignore[no-untyped-call]
    return asdict(asyncio.run(repair_here(RepairOrder.from_plain(order))))


class DaskRepairer:
    """Does orders on the workers of the nodes that take over; here, if there is no such worker.

    Parameters
    ----------
    scheduler : str
        Address of the scheduler, which may be absent.
    """

    def __init__(self, scheduler: str) -> None:
        self._scheduler = scheduler

    async def __call__(self, order: RepairOrder) -> Repaired:
        """Do an order. Errors as with :func:`repair_shard`."""
        try:
            found = await self._on_worker(order)
        except FastCheckError:
            raise
        except Exception as error:  # whatever Dask raises, the repair is done
            logger.info(
                "the repair on %s is done by the master: %s: %s", order.node, type(error).__name__, error
            )
            found = None
        return await repair_here(order) if found is None else found

    async def _on_worker(self, order: RepairOrder) -> Repaired | None:
        """Have the node's own worker do it; None if it has none, or lost it."""
        connecting = Client(  # type: ignore[no-untyped-call]
            self._scheduler, asynchronous=True, timeout=_CONNECT_SECONDS, set_as_default=False
        )
        async with connecting as client:
            if not await _has_worker(client, order.node):
                return None
            future = client.submit(
                repair_task,
                order.to_plain(),
                key=f"{TASK_PREFIX}-{next(_numbers)}-{order.node}-{order.record.run}-{order.record.generation}",
                workers=[order.node],
                allow_other_workers=False,
                pure=False,
                retries=0,
            )
            return await _result(client, future, order.node)


async def _result(client: Client, future: Future[dict[str, Any]], node: str) -> Repaired | None:
    """Wait for a task; None when the worker is gone that it has to run on: it would wait for another."""
    result: asyncio.Future[dict[str, Any]] = asyncio.ensure_future(cast(Any, future.result()))
    try:
        while not result.done():
            await asyncio.wait({result}, timeout=_LOOK_SECONDS)
            if not result.done() and not await _has_worker(client, node):
                return None
        return Repaired(**result.result())
    finally:
        result.cancel()


async def _has_worker(client: Client, node: str) -> bool:
    assert client.scheduler is not None
    known = await client.scheduler.identity()
    return any(worker["name"] == node for worker in known["workers"].values())
