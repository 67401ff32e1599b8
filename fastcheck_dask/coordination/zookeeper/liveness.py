"""How long the server surely keeps our session: what can be known of it without asking."""

from __future__ import annotations

import logging
import threading
from typing import Final

from fastcheck_dask.clock import Deadline, boot_seconds
from fastcheck_dask.coordination.zookeeper.client import ReplyLostError, Session
from fastcheck_dask.errors import ClosedError, CoordinationError

logger = logging.getLogger(__name__)

#: Parts of the session's time: when to ask for a sign of life, how often to look, and when to stop trusting.
_ASK_AFTER: Final = 1 / 3
_LOOK_EVERY: Final = 1 / 6
_TRUST_FOR: Final = 2 / 3


class Liveness:
    """Says whether the session surely lives.

    The server ends a session no sooner than its time-out after it heard from us, and it heard from us after
    we sent what it has answered. So the session lives until then, whatever happened to this process
    meanwhile: one that was stopped knows at once that it cannot know. A third of the time is left for clocks
    that differ, and for who asks to act. The answers are those to all calls; a thread asks where there are
    none. (A server whose ``maxSessionTimeout`` is shorter than our time-out is not known here; kazoo's own
    pings follow it.)
    """

    def __init__(self, session: Session, path: str) -> None:
        self._session, self._path = session, path
        self._closing = threading.Event()
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def certain(self) -> bool:
        """Whether there is a connection, and the session surely lives. Does not block."""
        session = self._session
        if session.closed or session.foreign:
            return False
        self.watch_over()
        return session.connected and self._silence() < _TRUST_FOR * session.session_seconds

    def watch_over(self) -> None:
        """Begin to ask for signs of life; who never wants to know costs the server nothing."""
        with self._lock:
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._run, name="fastcheck-zookeeper-liveness", daemon=True
                )
                self._thread.start()

    def look(self) -> None:
        """Ask for a sign of life if none came for some time."""
        session = self._session
        patience = _ASK_AFTER * session.session_seconds
        if not session.connected or self._silence() < patience:
            return
        try:
            session.attempt(
                "asking for a sign of life",
                lambda client: client.exists_async(self._path),
                deadline=Deadline.after(patience),
            )
        except (CoordinationError, ClosedError, ReplyLostError) as error:
            logger.debug("no sign of life: %s", error)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(self._session.timeout_seconds)

    def _silence(self) -> float:
        return boot_seconds() - self._session.heard_at

    def _run(self) -> None:
        while not self._closing.is_set() and not self._session.closed:
            self.look()
            self._closing.wait(_LOOK_EVERY * self._session.session_seconds)
