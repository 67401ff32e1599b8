"""What the master knows of the storage nodes, for placement: used where it is had soon, and done without."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock, Deadline
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.states import NodeState, StateReader
from fastcheck_dask.errors import CoordinationError

#: How long a save waits for the states.
WAIT_SECONDS: Final = 0.5
#: After it waited in vain it does not ask again for so long.
BACK_OFF_SECONDS: Final = 10.0

logger = logging.getLogger(__name__)


class NodeStates:
    """Reads the states before each placement. Belongs to one event loop.

    Parameters
    ----------
    reader : StateReader
        Used from a thread of this object alone.
    """

    def __init__(self, reader: StateReader, *, clock: Clock = SYSTEM_CLOCK) -> None:
        self._reader, self._clock = reader, clock
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="fastcheck-states")
        self._asked: Future[dict[str, NodeState]] | None = None
        self._not_before = clock.now()

    async def of(self, alive: Sequence[NodeInfo]) -> tuple[NodeInfo, ...]:
        """Return the registered nodes with their present states; as registered where nobody tells in time.

        A node that ends says so in two places, one after the other: whichever says it first is believed.
        """
        states = await self._read()
        return tuple(
            replace(node, state=states[node.name].state)
            if node.name in states and node.state == "available"
            else node
            for node in alive
        )

    async def _read(self) -> dict[str, NodeState]:
        if self._clock.now() < self._not_before or not (self._asked is None or self._asked.done()):
            return {}
        deadline = Deadline.after(WAIT_SECONDS, self._clock)
        self._asked = self._thread.submit(lambda: self._reader.read(deadline=deadline))
        asking = asyncio.wrap_future(self._asked)
        # What comes after the wait is nobody's error.
        asking.add_done_callback(lambda answer: answer.cancelled() or answer.exception())
        try:
            return await asyncio.wait_for(asyncio.shield(asking), WAIT_SECONDS)
        except (CoordinationError, TimeoutError) as error:
            self._not_before = self._clock.now() + BACK_OFF_SECONDS
            logger.info("placed without the states of the nodes: %s", str(error) or "no answer in time")
            return {}

    def close(self) -> None:
        """End the thread; a question in flight is not waited for. Idempotent."""
        self._thread.shutdown(wait=False, cancel_futures=True)
