"""What kazoo tells of the connection, kept as flags: its thread must not wait, nor call ZooKeeper."""

from __future__ import annotations

import threading
from typing import Literal

from kazoo.protocol.states import KazooState, KeeperState

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import Health

_DEAD = (KeeperState.AUTH_FAILED, KeeperState.CLOSED)


class Connection:
    """Connected or not, and since when. Kazoo's thread tells, any thread asks; nobody blocks.

    Parameters
    ----------
    session_seconds : float
        After this long without contact the server has ended the session. Kazoo says so only when it is
        connected again, which may be hours later.
    clock : Clock
        Monotonic.
    """

    def __init__(self, session_seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._session_seconds, self._clock = session_seconds, clock
        #: Set while there is no use in waiting: connected, given up, or closed.
        self.settled = threading.Event()
        #: Kazoo gave up: it was not let in. It has to be started again.
        self.dead = False
        #: One tuple, so that readers see both of the same moment.
        self._now: tuple[Literal["connected", "suspended", "closed"], float] = ("suspended", clock.now())

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as is known."""
        return self._now[0] == "connected"

    def heard(self, state: KazooState, client_state: KeeperState) -> None:
        """Take note of what kazoo says; from its own thread."""
        if self._now[0] == "closed":
            return
        if state == KazooState.CONNECTED:
            self.dead = False
            self._now = "connected", self._clock.now()
            self.settled.set()
            return
        if client_state in _DEAD:
            self.give_up()
        else:
            self.begin_again()
        if self.connected:
            self._now = "suspended", self._clock.now()

    def begin_again(self) -> None:
        """Note that kazoo is started again: there is use in waiting."""
        self.dead = False
        self.settled.clear()

    def give_up(self) -> None:
        """Note that kazoo tries no more, and wake who waits."""
        self.dead = True
        self.settled.set()

    def close(self) -> None:
        """Note that the session was ended by us, and wake who waits."""
        self._now = "closed", self._clock.now()
        self.settled.set()

    def health(self, *, hosts: str, session_id: str, why: str) -> Health:
        """Return the present state; `why` is for one without a connection."""
        state, since = self._now
        if state != "suspended":
            return Health(state, since, hosts, session_id)
        lost = since + self._session_seconds
        if self._clock.now() >= lost:
            return Health("lost", lost, hosts, session_id, why)
        return Health("suspended", since, hosts, session_id, why)
