"""Shares an event loop among its connections: so many bytes cross in one turn of it, whoever sends most."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Final
from weakref import WeakKeyDictionary

#: What may cross in one turn of the loop; one piece of a message more if it began below that.
TURN_BYTES: Final = 2**20

_of_loops: WeakKeyDictionary[asyncio.AbstractEventLoop, LoopShare] = WeakKeyDictionary()


class LoopShare:
    """Lets pieces of messages pass in the order in which they come. Belongs to one event loop.

    What is small, such as a ping and its answer, does not ask, and waits no longer than a turn takes however
    many large messages are on their way.

    Parameters
    ----------
    budget_bytes : int
        Of one turn.
    """

    def __init__(self, budget_bytes: int = TURN_BYTES) -> None:
        self._budget = self._left = budget_bytes
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self._renewing = False

    @classmethod
    def of_running_loop(cls) -> LoopShare:
        """Return the one that all connections of the running event loop have."""
        return _of_loops.setdefault(asyncio.get_running_loop(), cls())

    async def take(self, nbytes: int) -> None:
        """Wait until a piece of so many bytes may pass; cancelling leaves its place to the next one."""
        loop = asyncio.get_running_loop()
        if not self._renewing:
            self._renewing = True
            loop.call_soon(self._renew)
        if self._left > 0 and not self._waiting:
            self._left -= nbytes
            return
        turn = loop.create_future()
        self._waiting.append((nbytes, turn))
        await turn

    def _renew(self) -> None:
        """Begin a turn: let those pass that have waited longest."""
        self._left = self._budget
        # As long as somebody waits or has just been let through, there is a next turn.
        self._renewing = bool(self._waiting)
        if self._renewing:
            asyncio.get_running_loop().call_soon(self._renew)
        while self._waiting and self._left > 0:
            nbytes, turn = self._waiting.popleft()
            if not turn.done():
                self._left -= nbytes
                turn.set_result(None)
