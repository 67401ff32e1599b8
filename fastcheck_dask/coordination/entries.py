"""Small shared entries with versions and sessions: what election, states, leases and groups are built on.

A path is like ``runs/run-1/lease``: names joined by slashes, relative to the coordinator's root. Parents need
not be made: missing ones become empty entries, which stay until they are deleted; under an ephemeral entry
there can be none. One `apply` takes at most 900,000 bytes of paths and values, and 1,000 changes. A version
is 0 when the entry is created and grows by one with each write; an entry that is deleted and created again
begins anew, so a fencing token has to be the version of one that is never deleted.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from fastcheck_dask.errors import CoordinationError, FastCheckError


@dataclass(frozen=True)
class Entry:
    """What was read at a path."""

    value: bytes
    version: int
    #: The session with which it goes; empty for one that stays.
    session: str = ""


@dataclass(frozen=True)
class Check:
    """Refuse everything unless the entry has this version."""

    path: str
    version: int


@dataclass(frozen=True)
class Create:
    """Make an entry; refuse everything if there is one."""

    path: str
    value: bytes
    #: Whether it goes when the session that makes it ends.
    ephemeral: bool = False


@dataclass(frozen=True)
class Write:
    """Replace the value of an entry that has this version; None: whatever version it has."""

    path: str
    value: bytes
    version: int | None


@dataclass(frozen=True)
class Delete:
    """Remove an entry that has this version and nothing under it; None: whatever version it has."""

    path: str
    version: int | None


Change = Check | Create | Write | Delete


class EntryConflictError(CoordinationError):
    """A change was refused because an entry is not as it was supposed to be; nothing was applied."""

    retryable = False

    def __init__(self, path: str, why: str) -> None:
        FastCheckError.__init__(self, path, why)
        self.path, self.why = path, why
        self.message = str(self)

    def __str__(self) -> str:
        return f"entry {self.path}: {self.why}; read again before the next try"


class OutcomeUnknownError(CoordinationError):
    """The answer was lost: all of the changes took effect, now or later, or none. Read to find out."""


class Watch(Protocol):
    """Tells that something at a path may have changed."""

    def wait(self, seconds: float | None) -> bool:
        """Wait for a change since the last return of True, or since the watch was made; False: none yet.

        Says True too often rather than too rarely: also when the connection came back, or the session is
        another one. Whoever sees True reads again; what is written after that read is told again. When the
        session was closed every call returns True at once: the read then says so. Blocks a little longer than
        `seconds` where it has to ask the coordinator.
        """
        ...

    def close(self) -> None:
        """Stop watching; whoever waits returns. Idempotent."""
        ...


class Entries(Protocol):
    """The entries of a coordinator, as one session sees and changes them.

    Any thread may call. Every call blocks for at most the time-out of the coordinator and raises
    `CoordinationError` when it cannot be reached; ephemeral entries go when the session ends, and the next
    session has another name: compare `Entry.session` with `session`.
    """

    @property
    def session(self) -> str:
        """Name of the present session, as far as this side knows."""
        ...

    @property
    def connected(self) -> bool:
        """Whether there is a connection now; False well before others may see the session as ended.

        Does not block. Whoever acts because of an ephemeral entry stops acting while this is False; ask this
        before `session`, since the next session may begin in between.
        """
        ...

    def get(self, path: str, *, fresh: bool = True) -> Entry | None:
        """Return an entry, None if there is none.

        `fresh` makes the read linearizable: it sees every change that was acknowledged to anybody before the
        call. Without it the answer may be a little old.
        """
        ...

    def get_many(self, *paths: str) -> list[Entry | None]:
        """Return many entries in the order asked; each as with ``fresh=True``, not all of one moment."""
        ...

    def names(self, path: str) -> tuple[str, ...]:
        """Return the names under a path, sorted; none if there is nothing. As fresh as ``get``."""
        ...

    def apply(self, *changes: Change) -> None:
        """Make all changes at once or none.

        Raises
        ------
        EntryConflictError
            If one of them was refused.
        OutcomeUnknownError
            If the answer was lost.
        """
        ...

    def watch(self, path: str) -> Watch:
        """Watch the value of an entry, its coming and going, and the names directly under it."""
        ...
