"""Tells the coordinator, for who looks at the cluster, that an agent cannot persist, and why."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.delays import forget_delay, note_delay
from fastcheck_dask.coordination.entries import Entries
from fastcheck_dask.engine.save import Saved
from fastcheck_dask.errors import FastCheckError

log = logging.getLogger(__name__)


class Delays:
    """What is told of one run. While the coordinator is away nothing is, and nothing waits for that.

    Parameters
    ----------
    coordinator : Coordinator
    run : str
    """

    def __init__(self, coordinator: Coordinator, run: str) -> None:
        self._coordinator, self._run = coordinator, run
        #: Whether a delay may be told now; an agent before this one may have told one.
        self._told = True

    async def failed(self, saved: Saved, error: Exception) -> None:
        """Tell that a generation could not be persisted."""
        record, self._told = saved.record, True
        await self._tell(
            partial(
                note_delay,
                generation=record.generation,
                tag=record.tag,
                reason=str(error),
                now_unix=time.time(),
            )
        )

    async def over(self) -> None:
        """Tell that the object tier has what it is to have, if anything else was told."""
        if self._told:
            self._told = not await self._tell(forget_delay)

    async def _tell(self, tell: Callable[[Entries, str], None]) -> bool:
        if self._coordinator.health().state != "connected":
            return False
        try:
            await asyncio.to_thread(tell, self._coordinator.entries, self._run)
        except FastCheckError as error:
            log.debug("the coordinator does not know why nothing is persisted: %s", error)
            return False
        return True
