"""One ZooKeeper client whose calls end in time, say what went wrong, and are refused to forked children."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.exceptions import (
    AuthFailedError,
    BadVersionError,
    ConnectionClosedError,
    ConnectionLoss,
    KazooException,
    NoAuthError,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
    OperationTimeoutError,
    RolledBackError,
    RuntimeInconsistency,
    SessionClosedRequireSaslError,
    SessionExpiredError,
    SessionMovedError,
)
from kazoo.handlers.threading import KazooTimeoutError
from kazoo.protocol.states import KazooState

from fastcheck_dask.clock import Deadline, boot_seconds
from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import Health
from fastcheck_dask.coordination.zookeeper.connection import Connection
from fastcheck_dask.coordination.zookeeper.transport import Journal, make_client
from fastcheck_dask.coordination.zookeeper.trouble import explain, refused, speaks_tls
from fastcheck_dask.errors import ClosedError, CoordinationError

logger = logging.getLogger(__name__)

_REPLY_LOST: Final = (
    ConnectionLoss,
    ConnectionClosedError,
    SessionExpiredError,
    SessionMovedError,
    OperationTimeoutError,
)
#: What callers of `attempt` judge themselves.
_ANSWERS: Final = (
    NoNodeError,
    NodeExistsError,
    BadVersionError,
    NotEmptyError,
    NoChildrenForEphemeralsError,
)
_REFUSED: Final = (AuthFailedError, NoAuthError, SessionClosedRequireSaslError)
_RETRY_SECONDS: Final = 0.02
_REVIVE_SECONDS: Final = 0.5

#: Starts an asynchronous kazoo call and returns its result object.
Call = Callable[[KazooClient], Any]


class ReplyLostError(Exception):
    """The connection broke before the answer came; a write may have taken effect or not."""


class AnswerMissingError(CoordinationError):
    """No answer came in time to what was sent; a write may yet take effect."""


@dataclass(frozen=True)
class Znode:
    """What was read of a znode."""

    data: bytes
    version: int
    #: Id of the session with which it goes; 0 for a persistent one.
    session_id: int
    #: When it was made, milliseconds since 1970.
    created_ms: int


class Session:
    """A session with ZooKeeper that is replaced by a new one when it expires.

    Any thread may call, except kazoo's own (a listener that calls the client blocks it for ever).

    Parameters
    ----------
    hosts : str
        ``host:port,host:port``.
    timeout_seconds : float
        How long a call waits for its answer, and the first connection.
    session_seconds : float
        After how long without a sign of life the server ends the session.
    on_change : callable
        Called from kazoo's thread when the connection comes or goes; may only set flags.
    access : Access
        Credentials, and whether the connection is TLS.

    Raises
    ------
    ConfigError
        If a file for TLS cannot be used.
    CoordinationError
        If there is no connection within the time-out; the message says why, as far as can be told.
    """

    def __init__(
        self,
        hosts: str,
        *,
        timeout_seconds: float,
        session_seconds: float,
        on_change: Callable[[], None],
        access: Access,
    ) -> None:
        self.hosts, self.access = hosts, access
        self.timeout_seconds, self.session_seconds = timeout_seconds, session_seconds
        #: The server has answered something that was sent after this moment, seconds since boot.
        self.heard_at = float("-inf")
        self._pid = os.getpid()
        self._on_change = on_change
        self._closing = threading.Event()
        self._connection = Connection(session_seconds)
        self._journal = Journal()
        #: Kazoo is started and stopped by one thread at a time.
        self._starting = threading.Lock()
        self._client = make_client(hosts, access, session_seconds=session_seconds, journal=self._journal)
        self._client.add_listener(self._listen)
        self._client.start_async()
        if not self._connection.settled.wait(timeout_seconds) or self._connection.dead:
            why = self._why(probe=True)
            self.close(patience_seconds=0.5)
            raise self._unreachable("connecting", why)

    @property
    def session_id(self) -> int:
        """Id of the present session; another one after the session expired."""
        found = self._client.client_id
        return int(found[0]) if found and found[0] else 0

    @property
    def connected(self) -> bool:
        """Whether there is a connection, as far as this side knows."""
        return self._connection.connected

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that made the session."""
        return os.getpid() != self._pid

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing.is_set()

    def deadline(self) -> Deadline:
        """Return by when a call that begins now has to be over."""
        return Deadline.after(self.timeout_seconds)

    def pause(self, seconds: float) -> None:
        """Wait; returns at once when the session is closed."""
        self._closing.wait(seconds)

    def check_usable(self) -> None:
        """Raise `ClosedError` after :meth:`close` and in forked children."""
        if self.foreign:
            raise ClosedError(
                f"the session with ZooKeeper at {self.hosts} belongs to process {self._pid}, which forked "
                "this one; connect anew"
            )
        if self.closed:
            raise ClosedError(f"the session with ZooKeeper at {self.hosts} was closed")

    def attempt(self, what: str, call: Call, *, deadline: Deadline) -> Any:
        """Make one call and return its answer.

        Raises
        ------
        ReplyLostError
            If the connection broke meanwhile.
        CoordinationError
            If there was no answer before the deadline, or ZooKeeper refused; `NoNodeError`,
            `NodeExistsError` and `BadVersionError` come as they are.
        """
        self.check_usable()
        settled = self._connection.settled.wait(deadline.left())
        self.check_usable()
        if not settled or self._connection.dead:
            raise self._unreachable(what, f"there is no connection: {self._why()}")
        sent_at = boot_seconds()
        try:
            answer = call(self._client).get(timeout=deadline.left())
        except _REPLY_LOST as error:
            raise ReplyLostError(what) from error
        except KazooTimeoutError as error:
            raise AnswerMissingError(self._unreachable(what, "the answer is missing").message) from error
        except _ANSWERS:
            raise
        except KazooException as error:
            raise self._refusal(what, error) from error
        self.heard_at = max(self.heard_at, sent_at)
        return answer

    def wait_connected(self, seconds: float | None) -> bool:
        """Wait for a connection, or until there is no use in waiting for one; False: there is use, still."""
        return self._connection.settled.wait(seconds)

    def repeat(self, what: str, call: Call, *, deadline: Deadline) -> Any:
        """Make a call that may be made twice, until it is answered; else as :meth:`attempt`."""
        while True:
            try:
                return self.attempt(what, call, deadline=deadline)
            except ReplyLostError as error:
                self.after_lost_reply(what, error, deadline=deadline)

    def after_lost_reply(self, what: str, error: ReplyLostError, *, deadline: Deadline) -> None:
        """Wait a little before the next try; raise `CoordinationError` when there is no time for one."""
        if deadline.passed:
            raise self._unreachable(what, "the connection broke") from error
        logger.debug("%s: the connection to ZooKeeper at %s broke; trying again", what, self.hosts)
        self.pause(_RETRY_SECONDS)

    def read(self, path: str, *, deadline: Deadline) -> Znode | None:
        """Return a znode, None if there is none."""
        try:
            return znode(self.repeat(f"reading {path}", lambda c: c.get_async(path), deadline=deadline))
        except NoNodeError:
            return None

    def read_many(self, paths: Iterable[str], *, deadline: Deadline) -> list[Znode | None]:
        """Return many znodes in the order asked, None for those that are missing; one round trip for all."""
        asked = list(paths)

        def start(client: KazooClient) -> AllAnswers:
            return AllAnswers([client.get_async(path) for path in asked])

        found = self.repeat(f"reading {len(asked)} znodes", start, deadline=deadline)
        return [None if one is None else znode(one) for one in found]

    def fresh(
        self, what: str, reads: Callable[[KazooClient], list[Any]], *, fence: str, deadline: Deadline
    ) -> list[Any]:
        """Make reads that see every change which was acknowledged to anybody before this call.

        Parameters
        ----------
        what : str
            For messages.
        reads : callable
            Starts them.
        fence : str
            A znode that is there for good.
        deadline : Deadline
            By when they have to be answered.

        Returns
        -------
        list
            The answers; None where there is no such znode.

        Notes
        -----
        ``sync`` is not enough: a leader that was deposed and has not noticed answers it without asking
        anybody. A transaction is acknowledged by a quorum, so none that was acknowledged before is missing
        after it; and a server answers one session in order. Both travel at once, in one round trip.
        """

        def start(client: KazooClient) -> AllAnswers:
            transaction = client.transaction()
            transaction.check(fence, -1)
            return AllAnswers([transaction.commit_async(), *reads(client)])

        checked, *found = self.repeat(what, start, deadline=deadline)
        if isinstance(checked[0], NoNodeError):
            raise CoordinationError(f"ZooKeeper at {self.hosts} has no {fence}: was it emptied?")
        if isinstance(checked[0], Exception):
            raise self._refusal(what, checked[0])
        return list(found)

    def children(self, path: str, *, deadline: Deadline) -> list[str] | None:
        """Return the names under a znode, sorted; None if there is no such znode."""
        try:
            return sorted(
                self.repeat(f"listing {path}", lambda c: c.get_children_async(path), deadline=deadline)
            )
        except NoNodeError:
            return None

    def sync(self, path: str, *, deadline: Deadline) -> None:
        """Wait until the server that answers us knows what was written before this call."""
        self.repeat(f"synchronising {path}", lambda c: c.sync_async(path), deadline=deadline)

    def ensure(self, path: str, *, deadline: Deadline) -> None:
        """Create a persistent znode and those above it where they are missing."""
        self.repeat(f"creating {path}", lambda c: c.ensure_path_async(path), deadline=deadline)

    def transact(
        self, what: str, build: Callable[[Any], None], *, deadline: Deadline
    ) -> list[Any] | tuple[int, KazooException]:
        """Run a transaction once.

        Returns
        -------
        list or tuple of (int, KazooException)
            The results; or which operation made the server refuse all of them, and why.

        Raises
        ------
        ReplyLostError, CoordinationError
            As in :meth:`attempt`.
        """

        def start(client: KazooClient) -> Any:
            transaction = client.transaction()
            build(transaction)
            return transaction.commit_async()

        results: list[Any] = self.attempt(what, start, deadline=deadline)
        for index, result in enumerate(results):
            if isinstance(result, Exception) and not isinstance(
                result, RolledBackError | RuntimeInconsistency
            ):
                if isinstance(result, _ANSWERS):
                    return index, result
                raise self._refusal(what, result)
        return results

    def acl(self, path: str, *, deadline: Deadline) -> list[Any]:
        """Return who may do what with a znode."""
        found: list[Any] = self.repeat(
            f"reading the access list of {path}", lambda c: c.get_acls_async(path), deadline=deadline
        )[0]
        return found

    def set_acl(self, path: str, acl: list[Any], *, deadline: Deadline) -> None:
        """Say who may do what with a znode; nothing happens if it is gone."""
        with contextlib.suppress(NoNodeError):
            self.repeat(f"protecting {path}", lambda c: c.set_acls_async(path, acl), deadline=deadline)

    def health(self) -> Health:
        """Say how the connection is; does not block."""
        return self._connection.health(hosts=self.hosts, session_id=f"{self.session_id:#x}", why=self._why())

    @property
    def given_up(self) -> bool:
        """Whether kazoo was not let in and tries no more; it needs to be revived."""
        return self._connection.dead and not self.closed

    def revive(self) -> None:
        """Start kazoo again where it gave up. For a thread of ours, never kazoo's; paces itself.

        It takes a connection that broke in the middle of authentication for a refusal, too.
        """
        if not self.given_up:
            return
        self.pause(_REVIVE_SECONDS)
        with self._starting:
            if self.closed:
                return
            # Before: the next connection may come at once.
            self._connection.begin_again()
            try:
                self._client.start_async()
            except Exception:
                self._connection.give_up()
                logger.warning("the client of ZooKeeper at %s does not start", self.hosts, exc_info=True)

    def close(self, *, patience_seconds: float | None = None) -> None:
        """End the session. Idempotent; does nothing in a forked child. Blocks for at most the time-out."""
        if self.closed or self.foreign:
            return
        self._closing.set()
        # kazoo waits for the server's goodbye, for as long as it takes; we do not.
        closer = threading.Thread(target=self._stop_client, name="fastcheck-zookeeper-close", daemon=True)
        closer.start()
        closer.join(self.timeout_seconds if patience_seconds is None else patience_seconds)
        if closer.is_alive():
            logger.warning("ZooKeeper at %s does not answer; our session there ends by itself", self.hosts)
        # Wakes those who wait for a connection; they look at `closed` next.
        self._connection.close()

    def _stop_client(self) -> None:
        try:
            with self._starting:
                self._client.stop()
                self._client.close()
        except Exception:
            logger.warning("closing the session with ZooKeeper at %s failed", self.hosts, exc_info=True)

    def _listen(self, state: KazooState) -> None:
        if state == KazooState.CONNECTED:
            self._journal.trouble = ""
        self._connection.heard(state, self._client.client_state)
        self._on_change()

    def _why(self, *, probe: bool = False) -> str:
        """Say why there is no connection; `probe` asks the servers, which blocks."""
        probe = probe and self.access.tls is None
        return explain(self._journal.trouble, self.access, speaks_tls=probe and speaks_tls(self.hosts))

    def _refusal(self, what: str, error: Exception) -> CoordinationError:
        if isinstance(error, _REFUSED):
            return CoordinationError(f"ZooKeeper at {self.hosts} refused {what}: {refused(self.access)}")
        return CoordinationError(
            f"ZooKeeper at {self.hosts} refused {what}: {type(error).__name__} {error}".rstrip()
        )

    def _unreachable(self, what: str, why: str) -> CoordinationError:
        return CoordinationError(
            f"ZooKeeper at {self.hosts} did not answer within {self.timeout_seconds:g} s ({what}); {why}"
        )


class AllAnswers:
    """Many results as one; None stands for a znode that is not there."""

    def __init__(self, results: list[Any]) -> None:
        self._results = results

    def get(self, timeout: float) -> list[Any]:
        """Return the answers in the order asked."""
        deadline = Deadline.after(timeout)
        found: list[Any] = []
        for result in self._results:
            try:
                found.append(result.get(timeout=deadline.left()))
            except NoNodeError:
                found.append(None)
        return found


def znode(answer: Any) -> Znode:
    """Return the znode in kazoo's answer to a read."""
    data, stat = answer
    return Znode(data or b"", stat.version, stat.ephemeralOwner, stat.ctime)
