"""The rules of a commit, the same for every coordinator. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Final

from fastcheck_dask.coordination.base import CommitRecord, RunClaim
from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
    UnknownFormatError,
)
from fastcheck_dask.ids import check_name

#: ZooKeeper drops the connection of who sends it 1 MiB; every coordinator refuses the same sizes.
MAX_ENTRY_BYTES: Final = 900_000
#: Generations are written with ten digits, so that text order is commit order.
MAX_GENERATION: Final = 10**10 - 1


def bounded(data: bytes, what: str) -> bytes:
    """Return `data` if a coordinator can hold it; raise `CoordinationError` with its size if not."""
    if len(data) > MAX_ENTRY_BYTES:
        raise CoordinationError(
            f"{what} takes {len(data):,} bytes; a coordinator holds at most {MAX_ENTRY_BYTES:,} in one entry"
        )
    return data


def check_commit(record: CommitRecord, claim: RunClaim) -> bytes:
    """Check what can be checked of a commit without asking anybody, and return the record's bytes.

    Raises
    ------
    ConfigError
        If the run or the generation is not one, or the claim is of another run.
    CoordinationError
        If the record is too large.
    """
    check_name(record.run, "run")
    if type(record.generation) is not int or not 0 <= record.generation <= MAX_GENERATION:
        raise ConfigError(f"generation must be an int from 0 to {MAX_GENERATION}; got {record.generation!r}")
    if not record.token:
        raise ConfigError(f"commit of generation {record.generation} of run {record.run} has an empty token")
    if claim.run != record.run:
        raise ConfigError(f"the claim is of run {claim.run}, the commit of run {record.run}")
    return bounded(record.to_bytes(), f"commit record of generation {record.generation} of run {record.run}")


def read_record(data: bytes, *, run: str, generation: int) -> CommitRecord:
    """Parse a stored record; raise `UnknownFormatError` if it is not the one that its place says."""
    record = CommitRecord.from_bytes(data)
    if (record.run, record.generation) != (run, generation):
        raise UnknownFormatError(
            f"the entry of generation {generation} of run {run} holds generation {record.generation!r} "
            f"of run {record.run!r}"
        )
    return record


def judge(
    record: CommitRecord, *, stored: CommitRecord | None, latest: int | None, in_force: bool
) -> CommitRecord | None:
    """Say what becomes of a commit: None to write it, or the stored record when it was written before.

    Parameters
    ----------
    record : CommitRecord
        What its author wants to publish.
    stored : CommitRecord or None
        What the coordinator holds for that generation.
    latest : int or None
        The newest committed generation of the run.
    in_force : bool
        Whether the author's claim still holds.

    Raises
    ------
    FencedError
        If the claim no longer holds. An author that was fenced after its write took effect is still told
        that it did.
    CommitConflictError
        If somebody else decided the generation, or a later one.
    """
    if stored is not None and stored.token == record.token:
        return stored
    if not in_force:
        raise fenced(record.run)
    if stored is not None:
        raise CommitConflictError(
            f"generation {record.generation} of run {record.run} was decided already: it is {stored.tag!r}, "
            f"written with another token ({stored.token})"
        )
    if latest is not None and record.generation <= latest:
        raise CommitConflictError(
            f"generation {record.generation} of run {record.run} is not greater than the latest, {latest}"
        )
    return None


def fenced(run: str) -> FencedError:
    """Return the error of an owner that is none any more."""
    return FencedError(f"run {run} is no longer owned here: it was claimed by another process, or given back")


def conflicting_mark(run: str, generation: int) -> CommitConflictError:
    """Return the error of who marks another author's generation as persisted."""
    return CommitConflictError(
        f"generation {generation} of run {run} was committed with another token; not marked as persisted"
    )
