"""Znodes that go with the session, and the thread that makes them again when it was lost."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Iterator
from typing import Final

from kazoo.exceptions import BadVersionError, NodeExistsError, NoNodeError

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.zookeeper.client import ReplyLostError, Session
from fastcheck_dask.coordination.zookeeper.znodes import signature
from fastcheck_dask.errors import ClosedError, CoordinationError, FastCheckError

logger = logging.getLogger(__name__)

#: How often what could not be set right is tried again while there is a connection.
_RETRY_SECONDS: Final = 0.2


class OccupiedError(CoordinationError):
    """Another author's znode stands in the place."""

    def __init__(self, path: str, session_id: int) -> None:
        FastCheckError.__init__(self, path, session_id)
        self.path, self.session_id = path, session_id

    def __str__(self) -> str:
        return f"{self.path} in ZooKeeper is taken by another process, with session {self.session_id:#x}"


class Ephemeral:
    """One znode of ours: what it should be, and how to make it so.

    Any thread may call; callers and the `Keeper` take turns.
    """

    def __init__(self, session: Session, path: str, token: str) -> None:
        self.session, self.path, self.token = session, path, token
        #: Nothing is left to do: it was removed as wanted, or lost for good.
        self.finished = False
        self._turn = threading.Lock()
        #: The bytes that should be there; None when the znode should be gone.
        self._wanted: bytes | None = None
        #: In which session the znode was last seen as wanted, and as what.
        self._settled: tuple[int, bytes | None] | None = None
        #: The trouble that was reported last, so that a lasting one is reported once.
        self.reported = ""

    @property
    def due(self) -> bool:
        """Whether somebody has to look after it."""
        return not self.finished and self._settled != (self.session.session_id, self._wanted)

    def want(self, data: bytes | None) -> None:
        """Say what the znode should hold, None for nothing at all. Does not block."""
        self._wanted = data

    def settle(self, deadline: Deadline) -> None:
        """Compare and change until the znode is as wanted.

        Raises
        ------
        OccupiedError
            If another author's znode is there, or our own of an older session.
        CoordinationError
            If ZooKeeper does not answer in time.
        """
        while True:
            try:
                with self._taking_turns(deadline):
                    self._settle_once(deadline)
            except ReplyLostError as error:
                self.session.after_lost_reply(f"settling {self.path}", error, deadline=deadline)
            except (NoNodeError, NodeExistsError, BadVersionError):
                self.session.after_lost_reply(
                    f"settling {self.path}", ReplyLostError("changed under us"), deadline=deadline
                )
            else:
                return

    def create(self, data: bytes, *, deadline: Deadline) -> None:
        """Make the znode; subclasses add conditions."""
        self.session.attempt(
            f"creating {self.path}",
            lambda c: c.create_async(self.path, data, ephemeral=True),
            deadline=deadline,
        )

    def _settle_once(self, deadline: Deadline) -> None:
        if self.finished:
            return
        # Read before anything is done: should the session change meanwhile, the older id makes us look again.
        session_id, wanted = self.session.session_id, self._wanted
        found = self.session.read(self.path, deadline=deadline)
        ours = found is not None and signature(found.data) == self.token
        if wanted is None:
            if found is not None and ours and found.session_id == session_id:
                self.session.attempt(
                    f"deleting {self.path}", lambda c: c.delete_async(self.path), deadline=deadline
                )
            self.finished = True
        elif found is None:
            self.create(wanted, deadline=deadline)
        elif ours and found.session_id == session_id:
            if found.data != wanted:
                self.session.attempt(
                    f"writing {self.path}", lambda c: c.set_async(self.path, wanted), deadline=deadline
                )
        else:
            raise OccupiedError(self.path, found.session_id)
        self._settled = session_id, wanted

    @contextlib.contextmanager
    def _taking_turns(self, deadline: Deadline) -> Iterator[None]:
        if not self._turn.acquire(timeout=deadline.left() or 0.0):
            raise CoordinationError(
                f"ZooKeeper at {self.session.hosts} did not answer within {self.session.timeout_seconds:g} "
                f"s; another thread still waits for its answer about {self.path}"
            )
        try:
            yield
        finally:
            self._turn.release()


class Keeper:
    """The thread that settles znodes after the session was lost, and what failed calls left over."""

    def __init__(self) -> None:
        self._entries: list[Ephemeral] = []
        self._lock = threading.Lock()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, session: Session) -> None:
        """Begin to look after what is added."""
        self._thread = threading.Thread(
            target=self._run, args=(session,), name="fastcheck-zookeeper-keeper", daemon=True
        )
        self._thread.start()

    def poke(self) -> None:
        """Say that the connection came or went. Only sets a flag: any thread may call, kazoo's too."""
        self._wake.set()

    def add(self, entry: Ephemeral) -> None:
        """Look after `entry` until it is finished."""
        with self._lock:
            self._entries = [kept for kept in self._entries if not kept.finished]
            self._entries.append(entry)
        self._wake.set()

    def stop(self) -> None:
        """Tell the thread to end. Does not block."""
        self._closing.set()
        self._wake.set()

    def join(self, timeout_seconds: float) -> None:
        """Wait for the thread to end."""
        if self._thread is not None:
            self._thread.join(timeout_seconds)

    def _run(self, session: Session) -> None:
        while not self._closing.is_set():
            self._wake.wait(_RETRY_SECONDS if session.given_up or self._due() else None)
            self._wake.clear()
            session.revive()
            for entry in self._due() if session.connected else []:
                if self._closing.is_set():
                    return
                self._settle(entry)

    def _due(self) -> list[Ephemeral]:
        with self._lock:
            self._entries = [kept for kept in self._entries if not kept.finished]
            return [entry for entry in self._entries if entry.due]

    def _settle(self, entry: Ephemeral) -> None:
        try:
            entry.settle(entry.session.deadline())
        except ClosedError:
            return
        except CoordinationError as error:
            self._report(entry, str(error))
        except Exception as error:
            self._report(entry, repr(error))
        else:
            entry.reported = ""
            logger.info("%s is as it should be", entry.path)

    @staticmethod
    def _report(entry: Ephemeral, trouble: str) -> None:
        if trouble != entry.reported:
            entry.reported = trouble
            logger.warning("%s is not as it should be, trying again: %s", entry.path, trouble)
