"""Sessions in a SQLite file: who lives, and what goes with those who do not."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import sqlite3
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from fastcheck_dask.clock import boot_seconds
from fastcheck_dask.coordination.processes import ProcessIdentity
from fastcheck_dask.coordination.sqlite_file import SqliteFile
from fastcheck_dask.errors import ClosedError, CoordinationError

logger = logging.getLogger(__name__)

#: Parts of the session's time: how often it beats, and how long after a beat this side still trusts it.
_BEAT_EVERY: Final = 1 / 3
_TRUST_FOR: Final = 2 / 3
#: Open sessions of this process: a program that replaced itself by exec keeps pid and start time.
_OPEN_SESSIONS: set[str] = set()
_EPHEMERAL: Final = "SELECT DISTINCT session FROM entries WHERE session != ''"


@dataclass(frozen=True)
class _Row:
    """A session as the file has it."""

    name: str
    process: ProcessIdentity
    beat: float
    seconds: float

    @property
    def gone(self) -> bool:
        """Whether its process is, for good."""
        ours = self.process.pid == os.getpid()
        return (ours and self.name not in _OPEN_SESSIONS) or not self.process.alive()

    @property
    def silent(self) -> bool:
        """Whether it has not beaten for longer than it may."""
        return boot_seconds() - self.beat > self.seconds


@dataclass(frozen=True)
class _Standing:
    """What this side knows of its own session."""

    name: str
    #: Of the last beat that the file has, seconds since boot; None while nothing there goes with the session.
    beat: float | None = None


class FileSession:
    """The session of this process with a SQLite file.

    It lasts while the process lives and beats, like a session with ZooKeeper: a thread writes a sign of life
    three times within `session_seconds`, but only while something goes with the session. A process that was
    stopped for longer has lost it, and gets one of another name as soon as it runs again: registrations and
    claims that nobody took over meanwhile go over to that one, ephemeral entries do not.

    Any thread may call. A forked child may not.
    """

    def __init__(self, file: SqliteFile, session_seconds: float) -> None:
        self.file, self.session_seconds = file, session_seconds
        self._process = ProcessIdentity.of_this_process()
        self._standing = _Standing(_new_name())
        #: Held around a transaction and what is remembered of it.
        self._turn = threading.Lock()
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None

    @property
    def name(self) -> str:
        """Its present name, as far as this side knows."""
        return self._standing.name

    @property
    def closed(self) -> bool:
        """Whether :meth:`close` was called."""
        return self._closing.is_set()

    @property
    def foreign(self) -> bool:
        """Whether this process is a forked child of the one that made the session."""
        return os.getpid() != self._process.pid

    @property
    def connected(self) -> bool:
        """Whether others surely do not see the session as ended yet. Does not block."""
        beat = self._standing.beat
        if self.closed or self.foreign:
            return False
        return beat is None or boot_seconds() - beat < _TRUST_FOR * self.session_seconds

    def check_usable(self) -> None:
        """Raise `ClosedError` after :meth:`close` and in forked children."""
        if self.foreign:
            raise ClosedError(
                f"the coordinator of {self.file.path} belongs to process {self._process.pid}, which forked "
                "this one; connect anew"
            )
        if self.closed:
            raise ClosedError(f"the coordinator of {self.file.path} was closed")

    @contextlib.contextmanager
    def transaction(self) -> Iterator[tuple[sqlite3.Connection, str]]:
        """Run the block in one transaction; what it writes under the name that it gets goes with the session.

        Raises
        ------
        CoordinationError
            As `SqliteFile.transaction` does.
        """
        # A forked child may have inherited the lock as somebody held it.
        self.check_usable()
        with self._taking_turns():
            self.check_usable()
            with self.file.transaction(write=True) as connection:
                now = self._stand(connection)
                expire(connection)
                yield connection, now.name
            self._adopt(now)

    def close(self) -> None:
        """Remove all that goes with the session. Idempotent; does nothing in a forked child."""
        if self.closed or self.foreign:
            return
        self._closing.set()
        # First of all: even if the rows cannot be removed, they are dead for this process.
        _OPEN_SESSIONS.discard(self.name)
        if self._thread is not None:
            self._thread.join(self.file.timeout_seconds)
        with self._taking_turns():
            _OPEN_SESSIONS.discard(self.name)
            if self._standing.beat is not None:
                with self.file.transaction(write=True) as connection:
                    _remove(connection, self.name)

    @contextlib.contextmanager
    def _taking_turns(self) -> Iterator[None]:
        if not self._turn.acquire(timeout=self.file.timeout_seconds):
            raise CoordinationError(
                f"coordinator file {self.file.path}: other threads of this process wrote for "
                f"{self.file.timeout_seconds:g} s"
            )
        try:
            yield
        finally:
            self._turn.release()

    def _stand(self, connection: sqlite3.Connection) -> _Standing:
        """Give a sign of life, under a new name if the session was lost."""
        before, name = self._standing, self._standing.name
        (row,) = _rows(connection, "WHERE session = ?", name) or (None,)
        if (row is None and before.beat is not None) or (row is not None and row.silent):
            name = _new_name()
            for table in ("nodes", "claims"):
                connection.execute(
                    f"UPDATE {table} SET session = ? WHERE session = ?",  # noqa: S608
                    (name, before.name),
                )
            _remove(connection, before.name)
        now = boot_seconds()
        process = self._process
        connection.execute(
            "INSERT OR REPLACE INTO sessions (session, pid, started, boot, beat, seconds) "
            "VALUES (?,?,?,?,?,?)",
            (name, process.pid, process.started, process.boot, now, self.session_seconds),
        )
        return _Standing(name, now)

    def _adopt(self, now: _Standing) -> None:
        """Remember what was written; only now, since it may have been undone."""
        before, self._standing = self._standing, now
        if now.name != before.name:
            _OPEN_SESSIONS.discard(before.name)
            logger.warning(
                "%s: this process gave no sign of life for more than %g s and lost its session; what was "
                "ephemeral is gone",
                self.file.path,
                self.session_seconds,
            )
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="fastcheck-session", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        trouble = ""
        while not self._closing.wait(_BEAT_EVERY * self.session_seconds):
            try:
                self._beat()
                trouble = ""
            except CoordinationError as error:
                if str(error) != trouble:
                    trouble = str(error)
                    logger.warning("no sign of life could be given: %s", trouble)

    def _beat(self) -> None:
        with self._taking_turns():
            if self.closed or self._standing.beat is None:
                return
            with self.file.transaction(write=True) as connection:
                now = self._stand(connection)
                if not _holds_anything(connection, now.name):
                    # Nothing goes with the session: it need not beat, and cannot be lost.
                    _remove(connection, now.name)
                    now = _Standing(now.name)
            self._adopt(now)


def live_sessions(connection: sqlite3.Connection) -> dict[str, int]:
    """Return the process ids of the live sessions, by name."""
    return {row.name: row.process.pid for row in _rows(connection) if not row.silent and not row.gone}


def expire(connection: sqlite3.Connection) -> None:
    """Remove what went with sessions that are over; in a transaction that may write.

    Registrations and claims of a process that may run again stay: they do not count, and whoever wants their
    place overwrites them.
    """
    for row in _rows(connection):
        if row.gone:
            _remove(connection, row.name)
        elif row.silent:
            _remove_entries(connection, row.name)
    known = {row.name for row in _rows(connection)}
    for (session,) in connection.execute(_EPHEMERAL).fetchall():
        if session not in known:
            _remove_entries(connection, session)


def expirable(connection: sqlite3.Connection) -> bool:
    """Say whether there are ephemeral entries of sessions that are over."""
    live = live_sessions(connection)
    return any(session not in live for (session,) in connection.execute(_EPHEMERAL))


def _rows(connection: sqlite3.Connection, where: str = "", *values: str) -> list[_Row]:
    found = connection.execute(
        f"SELECT session, pid, started, boot, beat, seconds FROM sessions {where}",  # noqa: S608
        values,
    )
    return [
        _Row(session, ProcessIdentity(pid, started, boot), beat, seconds)
        for session, pid, started, boot, beat, seconds in found.fetchall()
    ]


def _remove(connection: sqlite3.Connection, session: str) -> None:
    _remove_entries(connection, session)
    for table in ("nodes", "claims", "sessions"):
        connection.execute(f"DELETE FROM {table} WHERE session = ?", (session,))  # noqa: S608


def _remove_entries(connection: sqlite3.Connection, session: str) -> None:
    if connection.execute("DELETE FROM entries WHERE session = ?", (session,)).rowcount:
        connection.execute("UPDATE changes SET count = count + 1")


def _holds_anything(connection: sqlite3.Connection, session: str) -> bool:
    return any(
        connection.execute(f"SELECT 1 FROM {table} WHERE session = ? LIMIT 1", (session,)).fetchone()  # noqa: S608
        for table in ("nodes", "claims", "entries")
    )


def _new_name() -> str:
    name = secrets.token_hex(16)
    _OPEN_SESSIONS.add(name)
    return name
