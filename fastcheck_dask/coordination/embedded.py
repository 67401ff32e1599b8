"""A coordinator for one machine: a SQLite file, and the kernel's word on who is alive."""

from __future__ import annotations

import logging
import os
import sqlite3
import threading
import time
from pathlib import Path
from typing import Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Deadline
from fastcheck_dask.coordination.base import (
    Abort,
    CommitRecord,
    Decision,
    Health,
    HealthState,
    NodeInfo,
    Registration,
    RunClaim,
)
from fastcheck_dask.coordination.candidacy import EPOCH
from fastcheck_dask.coordination.commits import (
    bounded,
    check_abort,
    check_commit,
    conflicting_mark,
    fenced,
    in_use,
    judge,
    judge_relocation,
    read_record,
    read_stored,
)
from fastcheck_dask.coordination.sqlite_entries import SqliteEntries
from fastcheck_dask.coordination.sqlite_file import SCHEMA_VERSION, SqliteFile
from fastcheck_dask.coordination.sqlite_sessions import FileSession, live_sessions
from fastcheck_dask.errors import ClosedError, ConfigError, CoordinationError, SessionLostError
from fastcheck_dask.ids import check_name

logger = logging.getLogger(__name__)

_POLL_SECONDS: Final = 0.02


class EmbeddedCoordinator:
    """Coordination through a SQLite file, for processes of one machine.

    Registrations, claims and ephemeral entries count only while the process that wrote them lives and gives
    signs of life (see `FileSession`): one that was killed is noticed at the next question, one that stands
    still after `session_seconds`. When it runs again its registrations and claims come back, unless somebody
    took their place; else commits under the claim raise `FencedError`. Any thread may call; a call blocks for
    at most `timeout_seconds` (and `wait_seconds` in :meth:`claim`). A forked child may not use it.

    Parameters
    ----------
    path : str or Path
        The file, created with its directory if missing. On a local disk.
    timeout_seconds : float
        How long a call waits for other processes' transactions.
    session_seconds : float
        After how long without a sign of life others forget what is ephemeral.

    Raises
    ------
    ConfigError
        If the file cannot be used, or was written by another version.

    Notes
    -----
    Processes in other containers look dead, because their pids mean nothing here. What they commit is
    fenced all the same: whoever claims a run takes it from the one before. A process that is stopped in the
    middle of a transaction locks the file for all others until it runs again or is killed.
    """

    def __init__(
        self, path: str | Path, *, timeout_seconds: float = 10.0, session_seconds: float = 10.0
    ) -> None:
        self._file = SqliteFile(Path(path).expanduser().absolute(), timeout_seconds)
        self._session = FileSession(self._file, session_seconds)
        self._entries = SqliteEntries(self._session)
        self._pause = threading.Event()
        self._health = Health("connected", SYSTEM_CLOCK.now(), str(self.path), self._session.name)

    @property
    def path(self) -> Path:
        """The file."""
        return self._file.path

    @property
    def entries(self) -> SqliteEntries:
        """Small shared entries, in the same session."""
        return self._entries

    def register(self, info: NodeInfo) -> Registration:
        """Announce a storage node; see `Coordinator`."""
        self._session.check_usable()
        data = _node_bytes(info)
        with self._session.transaction() as (connection, session):
            row = connection.execute("SELECT session FROM nodes WHERE name = ?", (info.name,)).fetchone()
            pid = live_sessions(connection).get(row[0]) if row else None
            if pid is not None:
                raise CoordinationError(
                    f"a storage node named {info.name!r} is registered by process {pid}, which is alive; "
                    "give this one another name"
                )
            connection.execute(
                "INSERT OR REPLACE INTO nodes (name, session, info) VALUES (?,?,?)",
                (info.name, session, data),
            )
        return _EmbeddedRegistration(self, info)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the live storage nodes, sorted by name."""
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            live = live_sessions(connection)
            rows = connection.execute("SELECT session, info FROM nodes ORDER BY name").fetchall()
        return tuple(NodeInfo.from_bytes(info) for session, info in rows if session in live)

    def claim(self, run: str, owner: str, *, wait_seconds: float = 0.0, takeover: bool = False) -> RunClaim:
        """Own a run; see `Coordinator`."""
        check_name(run, "run")
        deadline = Deadline.after(wait_seconds)
        while True:
            self._session.check_usable()
            taken = self._try_claim(run, owner, takeover=takeover)
            if isinstance(taken, int):
                return EmbeddedClaim(self, run, taken)
            if deadline.passed:
                raise in_use(run, taken)
            self._pause.wait(min(_POLL_SECONDS, deadline.left() or 0.0))

    def owner(self, run: str) -> str | None:
        """Return who owns a run now; see `Coordinator`."""
        self._session.check_usable()
        check_name(run, "run")
        with self._file.transaction(write=False) as connection:
            live = live_sessions(connection)
            row = connection.execute("SELECT session, owner FROM claims WHERE run = ?", (run,)).fetchone()
        return str(row[1]) if row is not None and row[0] in live else None

    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs; see `Coordinator`."""
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            rows = connection.execute("SELECT run FROM fences ORDER BY run").fetchall()
        return tuple(str(run) for (run,) in rows)

    def commit(self, record: CommitRecord, claim: RunClaim) -> CommitRecord:
        """Publish a generation; see `Coordinator`."""
        self._session.check_usable()
        if not isinstance(claim, EmbeddedClaim):
            raise ConfigError(f"the claim was not made by an embedded coordinator: {type(claim).__name__}")
        data = check_commit(record, claim)
        with self._file.transaction(write=True) as connection:
            latest = connection.execute(
                "SELECT max(generation) FROM commits WHERE run = ?", (record.run,)
            ).fetchone()[0]
            owner = self._owner_instead(connection, claim)
            stored = judge(
                record,
                stored=_decided(connection, record.run, record.generation),
                latest=latest,
                in_force=owner is None,
                owner=owner or "",
            )
            if stored is not None:
                return stored
            connection.execute(
                "INSERT INTO commits (run, generation, record) VALUES (?,?,?)",
                (record.run, record.generation, data),
            )
        return record

    def abort(self, run: str, generation: int, *, token: str, reason: str) -> Decision:
        """Decide that a generation will not be committed; see `Coordinator`."""
        self._session.check_usable()
        wanted = Abort(run, generation, token, reason)
        data = check_abort(wanted)
        with self._file.transaction(write=True) as connection:
            found = _decided(connection, run, generation)
            if found is None:
                connection.execute(
                    "INSERT INTO aborts (run, generation, abort) VALUES (?,?,?)", (run, generation, data)
                )
        return wanted if found is None else found

    def newest_decided(self, run: str) -> int:
        """Return the greatest generation that was committed or aborted, 0 if there is none."""
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            found = [
                connection.execute(
                    f"SELECT max(generation) FROM {table} WHERE run = ?",  # noqa: S608
                    (run,),
                ).fetchone()[0]
                for table in ("commits", "aborts")
            ]
        return max(generation or 0 for generation in found)

    def mark_persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation; see `Coordinator`."""
        self._session.check_usable()
        with self._file.transaction(write=True) as connection:
            found = _decided(connection, run, generation)
            if found is None:
                return
            if isinstance(found, Abort) or found.token != token:
                raise conflicting_mark(run, generation)
            connection.execute(
                "UPDATE commits SET persisted = 1 WHERE run = ? AND generation = ?", (run, generation)
            )

    def relocate(self, record: CommitRecord, moved: CommitRecord, *, fencing_token: int) -> CommitRecord:
        """Say that other nodes hold the newest generation of a run; see `Coordinator`."""
        self._session.check_usable()
        data = bounded(moved.to_bytes(), f"commit record of generation {moved.generation} of run {moved.run}")
        with self._file.transaction(write=True) as connection:
            epoch = connection.execute("SELECT version FROM entries WHERE path = ?", (EPOCH,)).fetchone()
            latest = connection.execute(
                "SELECT max(generation) FROM commits WHERE run = ?", (record.run,)
            ).fetchone()[0]
            found = None if latest is None else _stored(connection, record.run, latest)
            stored = judge_relocation(
                record,
                moved,
                stored=found,
                masters_token=None if epoch is None else epoch[0],
                fencing_token=fencing_token,
            )
            if stored is not None:
                return stored
            assert found is not None
            connection.execute(
                "UPDATE commits SET record = ? WHERE run = ? AND generation = ?",
                (data, record.run, record.generation),
            )
        return found.held_by(moved.nodes, moved.addresses)

    def latest(self, run: str) -> CommitRecord | None:
        """Return the newest committed generation of a run, None if there is none."""
        found = self._commits(run, "ORDER BY generation DESC LIMIT 1")
        return found[0] if found else None

    def commits(self, run: str) -> tuple[CommitRecord, ...]:
        """Return all committed generations of a run, oldest first."""
        return self._commits(run, "ORDER BY generation")

    @property
    def layout_version(self) -> int:
        """Version of the file's schema; another one would have been refused."""
        return SCHEMA_VERSION

    def health(self) -> Health:
        """Say whether the file is there and ours to write; see `Coordinator`."""
        why, session = "", self._session
        if not os.access(self.path, os.R_OK | os.W_OK):
            why = f"{self.path} is gone, or not ours to write"
        elif not session.connected:
            why = "this process gave no sign of life for a while"
        state: HealthState = "closed" if session.closed else "lost" if why else "connected"
        found = self._health
        why = "" if state == "closed" else why
        if (state, session.name, why) != (found.state, found.session_id, found.why):
            since = found.since_seconds if state == found.state else SYSTEM_CLOCK.now()
            self._health = Health(state, since, found.hosts, session.name, why)
        return self._health

    def close(self) -> None:
        """End the session; see `Coordinator`. In a forked child this does nothing."""
        if not self._session.foreign:
            self._pause.set()
            self._session.close()

    def update_node(self, info: NodeInfo) -> None:
        """Replace what the registry says of a node of this session; for its `Registration`."""
        self._session.check_usable()
        data = _node_bytes(info)
        with self._session.transaction() as (connection, session):
            changed = connection.execute(
                "UPDATE nodes SET info = ? WHERE name = ? AND session = ?", (data, info.name, session)
            ).rowcount
        if not changed:
            raise SessionLostError(
                f"{self.path} no longer knows storage node {info.name!r}; register it again"
            )

    def restore_node(self, info: NodeInfo) -> None:
        """Register a node again if its session is over; for its `Registration`."""
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            row = connection.execute("SELECT session FROM nodes WHERE name = ?", (info.name,)).fetchone()
            if row is not None and row[0] == self._session.name and row[0] in live_sessions(connection):
                return
        logger.warning("node %s was no longer registered; it registers again", info.name)
        self.register(info)

    def remove_node(self, name: str) -> None:
        """Take a node of this session out of the registry; for its `Registration`."""
        if not self._session.closed and not self._session.foreign:
            with self._session.transaction() as (connection, session):
                connection.execute("DELETE FROM nodes WHERE name = ? AND session = ?", (name, session))

    def remove_claim(self, run: str, fence: int) -> None:
        """Give back a claim of this session; for its `RunClaim`."""
        if not self._session.closed and not self._session.foreign:
            with self._file.transaction(write=True) as connection:
                connection.execute("DELETE FROM claims WHERE run = ? AND fence = ?", (run, fence))

    def check_claim(self, claim: EmbeddedClaim) -> None:
        """Raise `FencedError` unless a claim of this session is in force; for the claim itself."""
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            owner = self._owner_instead(connection, claim)
        if owner is not None:
            raise fenced(claim.run, owner)

    def _try_claim(self, run: str, owner: str, *, takeover: bool) -> int | str:
        """Return the fencing token, or the words for who owns the run."""
        with self._session.transaction() as (connection, session):
            row = connection.execute("SELECT session, owner FROM claims WHERE run = ?", (run,)).fetchone()
            pid = live_sessions(connection).get(row[0]) if row else None
            if pid is not None and not takeover:
                return f"{row[1]!r} (process {pid})"
            connection.execute(
                "INSERT OR IGNORE INTO fences (run, fence) VALUES (?, ?)", (run, time.time_ns() // 1_000_000)
            )
            connection.execute("UPDATE fences SET fence = fence + 1 WHERE run = ?", (run,))
            fence = int(connection.execute("SELECT fence FROM fences WHERE run = ?", (run,)).fetchone()[0])
            connection.execute(
                "INSERT OR REPLACE INTO claims (run, session, owner, fence) VALUES (?,?,?,?)",
                (run, session, owner, fence),
            )
        return fence

    def _owner_instead(self, connection: sqlite3.Connection, claim: EmbeddedClaim) -> str | None:
        """Return None if the claim is in force, or who has the run instead; empty for nobody."""
        # The number alone says it: nobody else ever had it, and who takes the run writes another.
        row = connection.execute("SELECT fence, owner FROM claims WHERE run = ?", (claim.run,)).fetchone()
        if row is None or claim.coordinator is not self:
            return ""
        return None if row[0] == claim.fencing_token else str(row[1])

    def _commits(self, run: str, order: str) -> tuple[CommitRecord, ...]:
        self._session.check_usable()
        with self._file.transaction(write=False) as connection:
            rows = connection.execute(
                f"SELECT generation, record, persisted FROM commits WHERE run = ? {order}",  # noqa: S608
                (run,),
            ).fetchall()
        return tuple(_record(run, *row) for row in rows)


class _EmbeddedRegistration:
    def __init__(self, coordinator: EmbeddedCoordinator, info: NodeInfo) -> None:
        self._coordinator, self._info = coordinator, info
        self._closed = False

    def update(self, info: NodeInfo) -> None:
        if self._closed:
            raise ClosedError(f"the registration of storage node {self._info.name!r} was closed")
        if info.name != self._info.name:
            raise ConfigError(f"the registration is of storage node {self._info.name!r}; got {info.name!r}")
        self._coordinator.update_node(info)
        self._info = info

    def restore(self) -> None:
        if not self._closed:
            self._coordinator.restore_node(self._info)

    def close(self) -> None:
        if not self._closed:
            self._coordinator.remove_node(self._info.name)
            self._closed = True


class EmbeddedClaim:
    """Ownership of a run through an `EmbeddedCoordinator`."""

    def __init__(self, coordinator: EmbeddedCoordinator, run: str, fencing_token: int) -> None:
        self.coordinator = coordinator
        self.run, self.fencing_token = run, fencing_token
        # The file starts counting at the time it first saw the run, so a new file goes on above an old one.
        self.order = fencing_token

    def check(self) -> None:
        """Raise `FencedError` unless the run is still owned."""
        self.coordinator.check_claim(self)

    def close(self) -> None:
        """Give the run back. Idempotent."""
        self.coordinator.remove_claim(self.run, self.fencing_token)


def _node_bytes(info: NodeInfo) -> bytes:
    check_name(info.name, "storage node")
    return bounded(info.to_bytes(), f"description of storage node {info.name}")


def _stored(connection: sqlite3.Connection, run: str, generation: int) -> CommitRecord | None:
    row = connection.execute(
        "SELECT generation, record, persisted FROM commits WHERE run = ? AND generation = ?",
        (run, generation),
    ).fetchone()
    return None if row is None else _record(run, *row)


def _decided(connection: sqlite3.Connection, run: str, generation: int) -> Decision | None:
    row = connection.execute(
        "SELECT abort FROM aborts WHERE run = ? AND generation = ?", (run, generation)
    ).fetchone()
    if row is not None:
        return read_stored(row[0], run=run, generation=generation)
    return _stored(connection, run, generation)


def _record(run: str, generation: int, data: bytes, persisted: int) -> CommitRecord:
    record = read_record(data, run=run, generation=generation)
    return record.as_persisted() if persisted else record
