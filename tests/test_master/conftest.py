"""Offices and commits for the duties of the master."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.entries import Change, Check, Create, EntryConflictError, Write
from fastcheck_dask.errors import FencedError
from fastcheck_dask.testing.entries import MemoryEntries
from fastcheck_dask.testing.fakes import FakeClaim, FakeCoordinator

_EPOCH = "epoch"


class Office:
    """What a duty sees of a leadership; the next one deposes it."""

    def __init__(self, entries: MemoryEntries) -> None:
        self._entries = entries
        found = entries.get(_EPOCH)
        entries.apply(Create(_EPOCH, b"") if found is None else Write(_EPOCH, b"", found.version))
        self.fencing_token = 0 if found is None else found.version + 1
        self.in_force = True

    def apply(self, *changes: Change) -> None:
        """Change entries under this office."""
        try:
            self._entries.apply(Check(_EPOCH, self.fencing_token), *changes)
        except EntryConflictError as error:
            if error.path != _EPOCH:
                raise
            raise FencedError("there is another master") from error

    def depose(self) -> None:
        """Let somebody else be master."""
        Office(self._entries)
        self.in_force = False

    def pretend(self) -> None:
        """Believe in the office again, as a process does that was stopped."""
        self.in_force = True


@pytest.fixture
def office() -> Callable[[MemoryEntries], Office]:
    """Return what makes an office."""
    return Office


@pytest.fixture
def commit() -> Callable[..., tuple[CommitRecord, FakeClaim]]:
    """Return a function that claims a run and commits its next generation."""

    def make(coordinator: FakeCoordinator, run: str, **fields: object) -> tuple[CommitRecord, FakeClaim]:
        claim = coordinator.claim(run, "trainer")
        latest = coordinator.latest(run)
        record = CommitRecord(
            **{
                "run": run,
                "generation": 1 + (latest.generation if latest else 0),
                "tag": "t",
                "token": "token",
                "manifest_digest": "ab" * 32,
                "nodes": (),
                "addresses": (),
                "shards": 0,
                "parity": False,
                "raw_bytes": 1,
                "created_unix": 1.0,
                **fields,
            }
        )
        return coordinator.commit(record, claim), claim

    return make
