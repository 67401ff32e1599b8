"""Entries in a SQLite file: a row each, one transaction for all changes."""

from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading
from collections.abc import Iterator
from typing import Final

from fastcheck_dask.clock import Deadline, boot_seconds
from fastcheck_dask.coordination.changes import (
    check_changes,
    check_path,
    judge_change,
    judge_parent,
    parents,
)
from fastcheck_dask.coordination.entries import Change, Create, Delete, Entry, Write
from fastcheck_dask.coordination.sqlite_sessions import FileSession, expirable, expire, live_sessions
from fastcheck_dask.errors import ClosedError, CoordinationError

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.05
#: A watch looks into a file that did not change no more often: a process that died changes nothing.
_LOOK_SECONDS: Final = 0.25


class SqliteEntries:
    """The entries in a file, as one session sees and changes them; see `Entries`."""

    def __init__(self, session: FileSession) -> None:
        self._session = session

    @property
    def session(self) -> str:
        """Name of the present session."""
        return self._session.name

    @property
    def connected(self) -> bool:
        """Whether others surely do not see the session as ended yet."""
        return self._session.connected

    def get(self, path: str, *, fresh: bool = True) -> Entry | None:  # noqa: ARG002
        """Return an entry; always fresh."""
        return self.get_many(path)[0]

    def get_many(self, *paths: str) -> list[Entry | None]:
        """Return many entries; these are of one moment."""
        self._session.check_usable()
        asked = [check_path(path) for path in paths]
        with self._session.file.transaction(write=False) as connection:
            live = live_sessions(connection)
            found = [_read(connection, path) for path in asked]
        return [entry if entry and _counts(entry.session, live) else None for entry in found]

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names under a path; see `Entries`."""
        self._session.check_usable()
        check_path(path)
        with self._session.file.transaction(write=False) as connection:
            live = live_sessions(connection)
            rows = connection.execute(
                "SELECT path, session FROM entries WHERE parent = ? ORDER BY path", (path,)
            ).fetchall()
        return tuple(found.rpartition("/")[2] for found, session in rows if _counts(session, live))

    def apply(self, *changes: Change) -> None:
        """Make all changes or none; see `Entries`."""
        self._session.check_usable()
        check_changes(changes)
        if not changes:
            return
        ephemeral = any(isinstance(change, Create) and change.ephemeral for change in changes)
        with self._session.transaction() if ephemeral else self._plain_transaction() as (connection, name):
            for change in changes:
                _make(connection, change, session=name)
            connection.execute("UPDATE changes SET count = count + 1")

    def watch(self, path: str) -> SqliteWatch:
        """Watch a path; a change of any entry is told."""
        self._session.check_usable()
        check_path(path)
        return SqliteWatch(self._session)

    @contextlib.contextmanager
    def _plain_transaction(self) -> Iterator[tuple[sqlite3.Connection, str]]:
        with self._session.file.transaction(write=True) as connection:
            expire(connection)
            yield connection, ""


class SqliteWatch:
    """A watch on all entries of a file: it looks while somebody waits, and costs nothing else."""

    def __init__(self, session: FileSession) -> None:
        self._session = session
        self._closing = threading.Event()
        #: Of the file, before it was looked into; and when that is due again, whatever the file is like.
        self._state: tuple[object, ...] = ()
        self._due = 0.0
        #: The number of changes and the session's name; None when what is there now is not known to follow.
        self._seen: tuple[int, str] | None = self._look()

    def wait(self, seconds: float | None) -> bool:
        """Wait for the next change; see `Watch`."""
        deadline = Deadline.after(seconds)
        while not self._closing.is_set():
            if self._session.closed or self._told():
                return True
            left = deadline.left()
            if left == 0.0:
                return False
            self._closing.wait(_POLL_SECONDS if left is None else min(_POLL_SECONDS, left))
        return False

    def close(self) -> None:
        """Stop watching; see `Watch`."""
        self._closing.set()

    def _told(self) -> bool:
        try:
            if self._is_as_it_was():
                return False
            found = self._look()
        except CoordinationError as error:
            logger.debug("changes of entries cannot be watched now: %s", error)
            # What happens meanwhile may be in another file.
            self._seen = None
            return False
        except ClosedError:
            # Closed at this moment; to a forked child it says the same, and there it is an error.
            if self._session.foreign:
                raise
            return True
        told, self._seen = found != self._seen, found
        return told

    def _is_as_it_was(self) -> bool:
        """Say whether there is no need to look: the file is as it was, and that was a moment ago."""
        self._session.check_usable()
        return (
            self._seen is not None
            and self._seen[1] == self._session.name
            and boot_seconds() < self._due
            and self._session.file.state() == self._state
        )

    def _look(self) -> tuple[int, str]:
        self._session.check_usable()
        file = self._session.file
        # Before: what changes while this looks is looked at once more.
        self._state, self._due = file.state(), boot_seconds() + _LOOK_SECONDS
        with file.transaction(write=False) as connection:
            over = expirable(connection)
            count = _count(connection)
        if over:
            with file.transaction(write=True) as connection:
                expire(connection)
                count = _count(connection)
        return count, self._session.name


def _count(connection: sqlite3.Connection) -> int:
    return int(connection.execute("SELECT count FROM changes").fetchone()[0])


def _read(connection: sqlite3.Connection, path: str) -> Entry | None:
    row = connection.execute("SELECT value, version, session FROM entries WHERE path = ?", (path,)).fetchone()
    return None if row is None else Entry(*row)


def _counts(session: str, live: dict[str, int]) -> bool:
    return not session or session in live


def _make(connection: sqlite3.Connection, change: Change, *, session: str) -> None:
    path = change.path
    occupied = connection.execute("SELECT 1 FROM entries WHERE parent = ? LIMIT 1", (path,)).fetchone()
    judge_change(change, found=_read(connection, path), occupied=occupied is not None)
    if isinstance(change, Create):
        for above in parents(path):
            parent = _read(connection, above)
            if parent is None:
                _insert(connection, above, value=b"", session="")
            else:
                judge_parent(path, parent)
        _insert(connection, path, value=change.value, session=session if change.ephemeral else "")
    elif isinstance(change, Write):
        connection.execute(
            "UPDATE entries SET value = ?, version = version + 1 WHERE path = ?", (change.value, path)
        )
    elif isinstance(change, Delete):
        connection.execute("DELETE FROM entries WHERE path = ?", (path,))


def _insert(connection: sqlite3.Connection, path: str, *, value: bytes, session: str) -> None:
    connection.execute(
        "INSERT INTO entries (path, parent, value, version, session) VALUES (?,?,?,0,?)",
        (path, path.rpartition("/")[0], value, session),
    )
