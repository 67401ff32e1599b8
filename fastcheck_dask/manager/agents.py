"""One agent at a time: started when needed, replaced when it died, ended with the manager."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from typing import Any

from fastcheck_dask.agent.channel import Message
from fastcheck_dask.errors import ClosedError, CoordinationError, FastCheckError
from fastcheck_dask.manager.agent_link import AgentLink
from fastcheck_dask.manager.handle import SaveHandle

log = logging.getLogger(__name__)


class Agents:
    """Gives the line to the present agent. Any thread may call.

    Parameters
    ----------
    start : dict
        What every agent is told first.
    on_failure : callable
        Called with the error of each save that falls short.
    takeover : bool
        Whether to take the run from a live owner.
    """

    def __init__(
        self, start: Message, on_failure: Callable[[FastCheckError], None], *, takeover: bool = False
    ) -> None:
        self._start, self.on_failure = start, on_failure
        #: For the first agent only: one that follows must not take the run back from who took it since.
        self._takeover = takeover
        #: Not a plain lock: a signal handler may close the manager while its own thread starts an agent.
        self._starting = threading.RLock()
        self._link: AgentLink | None = None
        self._closed = threading.Event()
        #: The slot that is being filled or about to be handed over; a new agent leaves it alone.
        self.at_work: int | None = None

    def link(self) -> AgentLink:
        """Return the line to an agent that lives, as far as is known; a dead one is replaced.

        Raises
        ------
        ClosedError
            After `close`.
        FastCheckError
            What kept a new agent from starting.
        """
        with self._starting:
            if self._closed.is_set():
                raise ClosedError("the manager is closed; make a new one")
            if self._link is not None and not self._link.lost:
                return self._link
            self._link = None
            takeover, self._takeover = self._takeover, False
            start = self._start | {"keep": self.at_work, "takeover": takeover}
            link = AgentLink(start, self.on_failure)
            try:
                link.wait_ready()
            except BaseException:
                link.end()
                raise
            if self._closed.is_set():
                link.end()
                raise ClosedError("the manager was closed while an agent was started")
            self._link = link
            return link

    def ask(self, op: str, **arguments: Any) -> Message:
        """Ask the agent; if it dies of something else meanwhile, the next one."""
        link = self.link()
        try:
            return link.ask(op, **arguments)
        except (ClosedError, CoordinationError):
            if not link.lost:
                raise
            return self.link().ask(op, **arguments)

    def gave_up(self, tag: str, reason: str) -> None:
        """Have the other ranks told, if there are any, that this one has no part for a save."""
        link = self._link
        if link is not None and self._start["ranks"] is not None:
            link.gave_up(tag, reason)

    @property
    def in_flight(self) -> list[SaveHandle]:
        """Handles of the saves that are not done."""
        link = self._link
        return [] if link is None else link.in_flight.handles

    def nudge(self) -> None:
        """Have whoever waits for a slot ask whether to stop."""
        link = self._link
        if link is not None:
            link.nudge()

    def tell_busy(self, busy: bool) -> None:
        """Tell the present agent, if any, whether the training communicates; never blocks, nor raises."""
        link = self._link
        if link is not None:
            link.tell_busy(busy)

    def close(self, seconds: float) -> bool:
        """End the agent when it has finished what is in flight.

        Returns
        -------
        bool
            Whether the newest checkpoint is in another tier than this host's memory, as far as is known.
        """
        self._closed.set()
        link = self._link
        if link is None:
            return False
        if not link.close(seconds):
            log.error("the agent did not finish in %.0f s and was ended", seconds)
            return False
        return link.safe_elsewhere
