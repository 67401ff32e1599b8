"""The SQLite file of the embedded coordinator: opening, schema, short transactions, errors in our words."""

from __future__ import annotations

import contextlib
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.entries import OutcomeUnknownError
from fastcheck_dask.errors import ConfigError, CoordinationError

#: "FCco": tells our files from other programs' databases.
_APPLICATION_ID: Final = 0x4643636F
SCHEMA_VERSION: Final = 2
_SCHEMA: Final = (
    # beat: when it last gave a sign of life, seconds since boot; seconds: how long it may be silent.
    """CREATE TABLE sessions (
        session TEXT PRIMARY KEY, pid INTEGER NOT NULL, started INTEGER NOT NULL, boot TEXT NOT NULL,
        beat REAL NOT NULL, seconds REAL NOT NULL)""",
    "CREATE TABLE nodes (name TEXT PRIMARY KEY, session TEXT NOT NULL, info BLOB NOT NULL)",
    """CREATE TABLE claims (
        run TEXT PRIMARY KEY, session TEXT NOT NULL, owner TEXT NOT NULL, fence INTEGER NOT NULL)""",
    "CREATE TABLE fences (run TEXT PRIMARY KEY, fence INTEGER NOT NULL)",
    """CREATE TABLE commits (
        run TEXT NOT NULL, generation INTEGER NOT NULL, record BLOB NOT NULL,
        persisted INTEGER NOT NULL DEFAULT 0, PRIMARY KEY (run, generation))""",
    """CREATE TABLE aborts (
        run TEXT NOT NULL, generation INTEGER NOT NULL, abort BLOB NOT NULL,
        PRIMARY KEY (run, generation))""",
    # session: empty for an entry that stays.
    """CREATE TABLE entries (
        path TEXT PRIMARY KEY, parent TEXT NOT NULL, value BLOB NOT NULL, version INTEGER NOT NULL,
        session TEXT NOT NULL)""",
    "CREATE INDEX entries_by_parent ON entries (parent)",
    "CREATE INDEX entries_by_session ON entries (session) WHERE session != ''",
    # Grows with each change of entries. It begins anywhere, so that another file does not look unchanged.
    "CREATE TABLE changes (count INTEGER NOT NULL)",
    "INSERT INTO changes VALUES (abs(random() / 2))",
)
_RETRY_SECONDS: Final = 0.005


class SqliteFile:
    """One database file, opened anew for each transaction.

    A connection that lives on would be inherited by forked children, and would go on writing into a file
    that was deleted. Any thread may call.

    Parameters
    ----------
    path : Path
        Absolute. It and its directory are created if missing.
    timeout_seconds : float
        How long a transaction waits for those of others.

    Raises
    ------
    ConfigError
        If the file cannot be made or written, is not a database of ours, or is of a newer version.
    """

    def __init__(self, path: Path, timeout_seconds: float) -> None:
        self.path, self.timeout_seconds = path, timeout_seconds
        self._pause = threading.Event()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"coordinator file {path}: cannot make its directory: {error}") from error
        try:
            with self._connection("rwc", "BEGIN IMMEDIATE") as connection:
                self._create_or_check(connection)
            self._use_write_ahead_log()
        except sqlite3.Error as error:
            if _is_busy(error):
                raise self._busy(error) from error
            raise ConfigError(f"coordinator file {path} cannot be used: {error}") from error

    @contextlib.contextmanager
    def transaction(self, *, write: bool) -> Iterator[sqlite3.Connection]:
        """Run the block in one transaction: committed at its end, undone by any error.

        Raises
        ------
        CoordinationError
            If the file is gone, damaged, not ours, or still locked by others after the time-out; an
            `OutcomeUnknownError` if the last step failed.
        """
        try:
            with self._connection("rw", "BEGIN IMMEDIATE" if write else "BEGIN") as connection:
                if _identity(connection) != (_APPLICATION_ID, SCHEMA_VERSION):
                    raise CoordinationError(f"coordinator file {self.path} was replaced by something else")
                yield connection
        except sqlite3.Error as error:
            if _is_busy(error):
                raise self._busy(error) from error
            raise CoordinationError(
                f"coordinator file {self.path}: {error}; it has to be there, ours to write, with room on "
                "its disk (one that was lost is made anew when the training is started anew)"
            ) from error

    def state(self) -> tuple[object, ...]:
        """Return what changes with every change of the file, unless two fall into one tick of the clock.

        It costs two calls of the system, a transaction hundreds: it opens the file, and may be the last to
        close it.
        """
        log = self.path.with_name(f"{self.path.name}-wal")
        return _state_of(self.path), _state_of(log)

    @contextlib.contextmanager
    def _connection(self, mode: str, begin: str) -> Iterator[sqlite3.Connection]:
        connection = self._begun(mode, begin)
        try:
            yield connection
            try:
                connection.execute("COMMIT")
            except sqlite3.Error as error:
                raise OutcomeUnknownError(
                    f"coordinator file {self.path}: {error} while changes were written; they took effect or "
                    "not: read to learn"
                ) from error
        finally:
            connection.close()

    def _begun(self, mode: str, begin: str) -> sqlite3.Connection:
        deadline = Deadline.after(self.timeout_seconds)
        while True:
            connection = sqlite3.connect(
                f"{self.path.as_uri()}?mode={mode}",
                uri=True,
                isolation_level=None,
                timeout=self.timeout_seconds,
            )
            try:
                connection.execute("PRAGMA synchronous=FULL")
                connection.execute(begin)
                # A plain BEGIN locks nothing yet; this read does, so the block itself is not refused as busy.
                connection.execute("PRAGMA user_version").fetchone()
            except sqlite3.Error as error:
                connection.close()
                # SQLite's own wait does not cover the moment in which another process closes the log.
                if not _is_busy(error) or deadline.passed:
                    raise
                self._pause.wait(_RETRY_SECONDS)
            else:
                return connection

    def _create_or_check(self, connection: sqlite3.Connection) -> None:
        identity = _identity(connection)
        tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
        if identity == (0, 0) and not tables:
            for statement in _SCHEMA:
                connection.execute(statement)
            connection.execute(f"PRAGMA application_id={_APPLICATION_ID}")
            connection.execute(f"PRAGMA user_version={SCHEMA_VERSION}")
        elif identity[0] != _APPLICATION_ID:
            raise ConfigError(f"coordinator file {self.path} is another program's database; name a new file")
        elif identity[1] != SCHEMA_VERSION:
            raise ConfigError(
                f"coordinator file {self.path} has schema version {identity[1]}, this FastCheck reads "
                f"{SCHEMA_VERSION}; use the version that wrote it or name a new file"
            )

    def _use_write_ahead_log(self) -> None:
        deadline = Deadline.after(self.timeout_seconds)
        with contextlib.closing(sqlite3.connect(self.path, timeout=self.timeout_seconds)) as connection:
            while True:
                try:
                    connection.execute("PRAGMA journal_mode=WAL").fetchone()
                except sqlite3.OperationalError as error:
                    if not _is_busy(error) or deadline.passed:
                        raise
                    self._pause.wait(_RETRY_SECONDS)
                else:
                    return

    def _busy(self, error: sqlite3.Error) -> CoordinationError:
        return CoordinationError(
            f"coordinator file {self.path} was still locked by another process after "
            f"{self.timeout_seconds:g} s: {error}; one that was stopped in the middle of a "
            "change keeps it locked until it goes on or is ended"
        )


def _state_of(path: Path) -> tuple[int, int, int] | None:
    """Return what tells a file from what it was before; None if there is none, or nothing in it."""
    try:
        found = path.stat()
    except OSError:
        return None
    # Readers make a log, too, an empty one, and remove it again.
    return (found.st_ino, found.st_size, found.st_mtime_ns) if found.st_size else None


def _identity(connection: sqlite3.Connection) -> tuple[int, int]:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    return application, connection.execute("PRAGMA user_version").fetchone()[0]


def _is_busy(error: sqlite3.Error) -> bool:
    # The low byte is the primary code; the others tell kinds of busy apart.
    return getattr(error, "sqlite_errorcode", 0) & 0xFF in (sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED)
