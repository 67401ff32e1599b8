"""Entries in ZooKeeper: a znode each, one transaction for all changes, reads that went through the quorum."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any, Final

from kazoo.exceptions import (
    BadVersionError,
    KazooException,
    NoChildrenForEphemeralsError,
    NodeExistsError,
    NoNodeError,
    NotEmptyError,
)

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.changes import check_changes, check_path, with_parents
from fastcheck_dask.coordination.entries import (
    Change,
    Check,
    Create,
    Delete,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
)
from fastcheck_dask.coordination.zookeeper.client import (
    AnswerMissingError,
    ReplyLostError,
    Session,
    Znode,
    znode,
)
from fastcheck_dask.coordination.zookeeper.liveness import Liveness
from fastcheck_dask.coordination.zookeeper.watches import Watches, ZooKeeperWatch
from fastcheck_dask.coordination.zookeeper.znodes import Znodes
from fastcheck_dask.errors import CoordinationError

logger = logging.getLogger(__name__)

#: Entries asked for at once.
_BATCH: Final = 200
_ANY_VERSION: Final = -1
_REASONS: Final[dict[type[KazooException], str]] = {
    NoNodeError: "there is none",
    NodeExistsError: "it exists already",
    NotEmptyError: "there are entries under it",
    NoChildrenForEphemeralsError: "its parent is ephemeral, nothing can be under it",
}


class ZooKeeperEntries:
    """The entries under a root in ZooKeeper; see `Entries`."""

    def __init__(self, session: Session, znodes: Znodes) -> None:
        self._session = session
        self._root = znodes.entries
        self._liveness = Liveness(session, znodes.entries)
        self._watches = Watches(session)
        self._session_id = session.session_id

    @property
    def session(self) -> str:
        """Name of the present session; while there is no connection, of the last one."""
        # kazoo forgets the id while it is not connected.
        self._session_id = self._session.session_id or self._session_id
        return _name(self._session_id)

    @property
    def connected(self) -> bool:
        """Whether there is a connection, and the server surely still keeps the session; see `Liveness`."""
        return self._liveness.certain

    def get(self, path: str, *, fresh: bool = True) -> Entry | None:
        """Return an entry; see `Entries`."""
        if fresh:
            return self.get_many(path)[0]
        return _entry(self._session.read(self._znode(path), deadline=self._session.deadline()))

    def get_many(self, *paths: str) -> list[Entry | None]:
        """Return many entries; see `Entries`."""
        asked = [self._znode(path) for path in paths]
        deadline = self._session.deadline()
        found: list[Entry | None] = []
        for start in range(0, len(asked), _BATCH):
            batch = asked[start : start + _BATCH]
            found += self._read(batch, deadline=deadline)
        return found

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names under a path; see `Entries`."""
        parent = self._znode(path)
        (found,) = self._session.fresh(
            f"listing {parent}",
            lambda c: [c.get_children_async(parent)],
            fence=self._root,
            deadline=self._session.deadline(),
        )
        return tuple(sorted(found or ()))

    def apply(self, *changes: Change) -> None:
        """Make all changes or none; see `Entries`."""
        self._session.check_usable()
        check_changes(changes)
        if not changes:
            return
        if any(isinstance(change, Create) and change.ephemeral for change in changes):
            self._liveness.watch_over()
        deadline = self._session.deadline()
        parents, complete = with_parents(changes)
        missing: list[Change] = []
        while (refused := self._transact((*missing, *complete), deadline=deadline)) is not None:
            index, error = refused
            change, ours = (*missing, *complete)[index], index < len(missing)
            if not _is_about_parents(change, error, ours=ours):
                path = parents[change.path] if ours else change.path
                raise EntryConflictError(path, _reason(change, error)) from error
            if deadline.passed:
                raise CoordinationError(
                    f"entry {change.path}: what is above it came and went again and again for "
                    f"{self._session.timeout_seconds:g} s; nothing was applied"
                )
            missing = self._missing(parents, deadline=deadline)

    def watch(self, path: str) -> ZooKeeperWatch:
        """Watch a path; see `Entries`."""
        return self._watches.watch(self._znode(path))

    def close(self) -> None:
        """Wake those who wait for a change, and end the thread. The session is the coordinator's to close."""
        self._watches.close()
        self._liveness.close()

    def _read(self, places: list[str], *, deadline: Deadline) -> list[Entry | None]:
        answers = self._session.fresh(
            f"reading {', '.join(places[:3])}",
            lambda client: [client.get_async(place) for place in places],
            fence=self._root,
            deadline=deadline,
        )
        return [None if answer is None else _entry(znode(answer)) for answer in answers]

    def _transact(
        self, changes: tuple[Change, ...], *, deadline: Deadline
    ) -> tuple[int, KazooException] | None:
        """Send the changes once; return None, or which was refused and why."""

        def build(transaction: Any) -> None:
            for change in changes:
                _add(transaction, change, path=self._znode(change.path))

        what = f"changing {', '.join(change.path for change in changes[:3])}"
        try:
            refused = self._session.transact(what, build, deadline=deadline)
        except (ReplyLostError, AnswerMissingError) as error:
            raise OutcomeUnknownError(
                f"ZooKeeper at {self._session.hosts}: the answer to {what} was lost; the changes may take "
                "effect, now or later, or not: read to learn"
            ) from error
        return None if isinstance(refused, list) else refused

    def _missing(self, parents: Iterable[str], *, deadline: Deadline) -> list[Change]:
        """Return what makes those parents that are not there; others may be faster, or delete them again."""
        found = self._session.fresh(
            "looking for parents",
            lambda client: [client.exists_async(self._znode(path)) for path in parents],
            fence=self._root,
            deadline=deadline,
        )
        return [Create(path, b"") for path, stat in zip(parents, found, strict=True) if stat is None]

    def _znode(self, path: str) -> str:
        return f"{self._root}/{check_path(path)}"


def _add(transaction: Any, change: Change, *, path: str) -> None:
    if isinstance(change, Create):
        transaction.create(path, change.value, ephemeral=change.ephemeral)
        return
    version = _ANY_VERSION if change.version is None else change.version
    if isinstance(change, Check):
        transaction.check(path, version)
    elif isinstance(change, Delete):
        transaction.delete(path, version)
    else:
        transaction.set_data(path, change.value, version)


def _is_about_parents(change: Change, error: KazooException, *, ours: bool) -> bool:
    """Say whether a refused transaction may be accepted with other parents; `ours`: it was one of these."""
    return isinstance(change, Create) and (
        isinstance(error, NoNodeError) or (ours and isinstance(error, NodeExistsError))
    )


def _reason(change: Change, error: KazooException) -> str:
    if isinstance(error, BadVersionError) and not isinstance(change, Create):
        return f"it does not have version {change.version}"
    return _REASONS.get(type(error), repr(error))


def _entry(found: Znode | None) -> Entry | None:
    if found is None:
        return None
    return Entry(found.data, found.version, _name(found.session_id) if found.session_id else "")


def _name(session_id: int) -> str:
    # Ids are unsigned in the server's log, and signed here.
    return f"{session_id % 2**64:x}"
