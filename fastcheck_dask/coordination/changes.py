"""The rules of entries and their changes, the same for every coordinator. Pure: no I/O, no clock."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from fastcheck_dask.coordination.commits import MAX_ENTRY_BYTES, bounded
from fastcheck_dask.coordination.entries import Change, Create, Delete, Entry, EntryConflictError, Write
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.ids import check_name

#: With their paths this many stay below the size that ZooKeeper takes in one transaction.
MAX_CHANGES: Final = 1000


def check_path(path: str) -> str:
    """Return `path` if it is one, names joined by slashes; raise `ConfigError` if not."""
    for name in path.split("/"):
        check_name(name, f"each name in the path of entry {path!r}")
    return path


def check_changes(changes: tuple[Change, ...]) -> None:
    """Refuse what no coordinator would do, without asking one.

    Raises
    ------
    ConfigError
        If a path is not one.
    CoordinationError
        If the changes are too many or too large for one transaction.
    EntryConflictError
        If an entry is made under one that the same changes delete.
    """
    if len(changes) > MAX_CHANGES:
        raise CoordinationError(f"{len(changes)} changes at once; a coordinator takes at most {MAX_CHANGES}")
    deleted: set[str] = set()
    nbytes = 0
    for change in changes:
        check_path(change.path)
        nbytes += len(change.path)
        if isinstance(change, Create | Write):
            bounded(change.value, f"entry {change.path}")
            nbytes += len(change.value)
        if isinstance(change, Delete):
            deleted.add(change.path)
        elif isinstance(change, Create) and (gone := deleted.intersection(parents(change.path))):
            raise EntryConflictError(change.path, f"{min(gone)} above it is deleted by the same changes")
    if nbytes > MAX_ENTRY_BYTES:
        raise CoordinationError(
            f"{len(changes)} changes from entry {changes[0].path} on take {nbytes:,} bytes; a coordinator "
            f"takes at most {MAX_ENTRY_BYTES:,} at once"
        )


def parents(path: str) -> Iterator[str]:
    """Yield the paths above one, the highest first.

    >>> list(parents("a/b/c"))
    ['a', 'a/b']
    """
    end = path.find("/")
    while end >= 0:
        yield path[:end]
        end = path.find("/", end + 1)


def with_parents(changes: tuple[Change, ...]) -> tuple[dict[str, str], tuple[Change, ...]]:
    """Say which parents have to be there before the changes, and which are made among them.

    Returns
    -------
    before : dict of str to str
        Paths that have to be there, the highest first, each with the path of who needs it.
    changes : tuple of Change
        All changes, and before each the missing parents under one that the changes make.

    >>> before, complete = with_parents((Create("a/b", b""), Create("a/b/c/d", b"")))
    >>> before, [change.path for change in complete]
    ({'a': 'a/b'}, ['a/b', 'a/b/c', 'a/b/c/d'])
    """
    before: dict[str, str] = {}
    complete: list[Change] = []
    made: set[str] = set()
    for change in changes:
        if isinstance(change, Create):
            for path in parents(change.path):
                if path in made or path in before:
                    continue
                if made.isdisjoint(parents(path)):
                    before[path] = change.path
                else:
                    complete.append(Create(path, b""))
                    made.add(path)
            made.add(change.path)
        complete.append(change)
    return before, tuple(complete)


def judge_change(change: Change, *, found: Entry | None, occupied: bool) -> None:
    """Return if a change may be made.

    Parameters
    ----------
    change : Change
        Of which entry, and what.
    found : Entry or None
        What is there.
    occupied : bool
        Whether there are entries under it.

    Raises
    ------
    EntryConflictError
        If not.
    """
    if isinstance(change, Create):
        if found is not None:
            raise EntryConflictError(change.path, "it exists already")
    elif found is None:
        raise EntryConflictError(change.path, "there is none")
    elif change.version is not None and change.version != found.version:
        raise EntryConflictError(change.path, f"it has version {found.version}, not {change.version}")
    elif isinstance(change, Delete) and occupied:
        raise EntryConflictError(change.path, "there are entries under it")


def judge_parent(path: str, parent: Entry) -> None:
    """Raise `EntryConflictError` if no entry can be made at `path`, because its parent is ephemeral."""
    if parent.session:
        raise EntryConflictError(path, "its parent is ephemeral, nothing can be under it")
