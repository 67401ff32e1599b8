"""Entries in memory, and faults of the way to them."""

from __future__ import annotations

import threading
from dataclasses import replace

from fastcheck_dask.coordination.changes import check_changes, check_path, judge_change, judge_parent, parents
from fastcheck_dask.coordination.entries import Change, Create, Delete, Entry, OutcomeUnknownError, Write
from fastcheck_dask.errors import ClosedError, CoordinationError


class SharedEntries:
    """What all sessions see: the memory of a coordinator."""

    def __init__(self) -> None:
        self.changed = threading.Condition(threading.RLock())
        self.entries: dict[str, Entry] = {}
        #: Grows with each change; tells watches that they may have missed one.
        self.count = 0
        self.sessions = 0

    def session(self) -> MemoryEntries:
        """Open a session."""
        return MemoryEntries(self)

    def apply(self, session: str, changes: tuple[Change, ...]) -> None:
        """Make all changes or none."""
        with self.changed:
            draft = dict(self.entries)
            for change in changes:
                _change(draft, change, session)
            self.entries = draft
            self._tell()

    def end(self, session: str) -> None:
        """Remove what goes with a session."""
        with self.changed:
            self.entries = {path: entry for path, entry in self.entries.items() if entry.session != session}
            self._tell()

    def _tell(self) -> None:
        self.count += 1
        self.changed.notify_all()


class MemoryEntries:
    """One session with `SharedEntries`; see `Entries`.

    Attributes
    ----------
    unreachable : bool
        Whether every call raises `CoordinationError`; the session lives on.
    faults : list of (error, done)
        The next calls of `apply` raise these, one each, after they took effect if `done`.
    """

    def __init__(self, shared: SharedEntries) -> None:
        self._shared = shared
        self.session = ""
        self.unreachable = False
        self.faults: list[tuple[BaseException, bool]] = []
        self.closed = False
        self._new_session()

    @property
    def connected(self) -> bool:
        """Whether calls are answered now."""
        return not self.unreachable and not self.closed

    def expire(self) -> None:
        """End the session as the coordinator does; the next one begins at once."""
        ended = self.session
        self._new_session()
        self._shared.end(ended)

    def close(self) -> None:
        """End the session for good. Idempotent."""
        self.closed = True
        self._shared.end(self.session)

    def get(self, path: str, *, fresh: bool = True) -> Entry | None:  # noqa: ARG002
        """Return an entry; always fresh."""
        self._check(path)
        with self._shared.changed:
            return self._shared.entries.get(path)

    def get_many(self, *paths: str) -> list[Entry | None]:
        """Return many entries."""
        return [self.get(path) for path in paths]

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names under a path."""
        self._check(path)
        prefix = f"{path}/"
        with self._shared.changed:
            below = [found for found in self._shared.entries if found.startswith(prefix)]
        return tuple(sorted({found.removeprefix(prefix).partition("/")[0] for found in below}))

    def apply(self, *changes: Change) -> None:
        """Make all changes or none."""
        self._check()
        check_changes(changes)
        error, done = self.faults.pop(0) if self.faults else (None, True)
        if done:
            self._shared.apply(self.session, changes)
        if error is not None:
            raise error

    def watch(self, path: str) -> MemoryWatch:
        """Watch a path; any change anywhere is told."""
        self._check(path)
        return MemoryWatch(self._shared, self)

    def lose_reply(self, *, done: bool) -> None:
        """Have the next change raise `OutcomeUnknownError`, after it took effect or without."""
        self.faults.append((OutcomeUnknownError("the answer was lost"), done))

    def _new_session(self) -> None:
        with self._shared.changed:
            self._shared.sessions += 1
            self.session = f"session-{self._shared.sessions}"

    def _check(self, path: str = "any") -> None:
        check_path(path)
        if self.closed:
            raise ClosedError("the session was closed")
        if self.unreachable:
            raise CoordinationError("the coordinator did not answer")


class MemoryWatch:
    """A watch on everything."""

    def __init__(self, shared: SharedEntries, entries: MemoryEntries) -> None:
        self._shared, self._entries = shared, entries
        self._seen = shared.count
        self._closed = False

    def wait(self, seconds: float | None) -> bool:
        """Wait for the next change."""
        with self._shared.changed:
            told = self._shared.changed.wait_for(lambda: self._closed or self._told(), timeout=seconds)
            self._seen = self._shared.count
            return told and not self._closed

    def close(self) -> None:
        """Stop watching."""
        with self._shared.changed:
            self._closed = True
            self._shared.changed.notify_all()

    def _told(self) -> bool:
        return self._entries.closed or self._shared.count != self._seen


def _change(entries: dict[str, Entry], change: Change, session: str) -> None:
    found = entries.get(change.path)
    occupied = isinstance(change, Delete) and any(path.startswith(f"{change.path}/") for path in entries)
    judge_change(change, found=found, occupied=occupied)
    if isinstance(change, Create):
        for above in parents(change.path):
            judge_parent(change.path, entries.setdefault(above, Entry(b"", 0)))
        entries[change.path] = Entry(change.value, 0, session if change.ephemeral else "")
    elif isinstance(change, Write):
        assert found is not None
        entries[change.path] = replace(found, value=change.value, version=found.version + 1)
    elif isinstance(change, Delete):
        del entries[change.path]
