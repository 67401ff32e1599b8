"""The rules of a commit, the same for every coordinator. Pure: no I/O, no clock."""

from __future__ import annotations

from typing import Final

from fastcheck_dask.coordination.base import Abort, CommitRecord, Decision, RunClaim, read_decision
from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
    RunInUseError,
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
    _check_identity(record)
    if claim.run != record.run:
        raise ConfigError(f"the claim is of run {claim.run}, the commit of run {record.run}")
    return bounded(record.to_bytes(), f"commit record of generation {record.generation} of run {record.run}")


def check_abort(abort: Abort) -> bytes:
    """Check what can be checked of an abort without asking anybody, and return its bytes.

    Raises
    ------
    ConfigError
        If the run, the generation or the token is not one.
    CoordinationError
        If the reason is too long.
    """
    _check_identity(abort)
    return bounded(abort.to_bytes(), f"abort of generation {abort.generation} of run {abort.run}")


def _check_identity(decision: Decision) -> None:
    check_name(decision.run, "run")
    generation = decision.generation
    if type(generation) is not int or not 0 <= generation <= MAX_GENERATION:
        raise ConfigError(f"generation must be an int from 0 to {MAX_GENERATION}; got {generation!r}")
    if not decision.token:
        raise ConfigError(f"the decision of generation {generation} of run {decision.run} has an empty token")


def read_stored(data: bytes, *, run: str, generation: int) -> Decision:
    """Parse a stored decision; raise `UnknownFormatError` if it is not the one that its place says."""
    found = read_decision(data)
    if (found.run, found.generation) != (run, generation):
        raise UnknownFormatError(
            f"the entry of generation {generation} of run {run} holds generation {found.generation!r} "
            f"of run {found.run!r}"
        )
    return found


def read_record(data: bytes, *, run: str, generation: int) -> CommitRecord:
    """Parse what is stored of a committed generation, as :func:`read_stored`."""
    found = read_stored(data, run=run, generation=generation)
    if isinstance(found, Abort):
        raise UnknownFormatError(f"generation {generation} of run {run} was aborted ({found.reason})")
    return found


def judge(
    record: CommitRecord,
    *,
    stored: Decision | None,
    latest: int | None,
    in_force: bool,
    owner: str = "",
) -> CommitRecord | None:
    """Say what becomes of a commit: None to write it, or the stored record when it was written before.

    Parameters
    ----------
    record : CommitRecord
        What its author wants to publish.
    stored : CommitRecord, Abort or None
        What the coordinator holds for that generation.
    latest : int or None
        The newest committed generation of the run.
    in_force : bool
        Whether the author's claim still holds.
    owner : str
        Who has the run if it does not, as far as is known.

    Raises
    ------
    FencedError
        If the claim no longer holds. An author that was fenced after its write took effect is still told
        that it did.
    CommitConflictError
        If somebody else decided the generation, or it was aborted, or a later one is committed.
    """
    if isinstance(stored, Abort):
        raise CommitConflictError(
            f"generation {record.generation} of run {record.run} was aborted: {stored.reason}; save again"
        )
    if stored is not None and stored.token == record.token:
        return stored
    if not in_force:
        raise fenced(record.run, owner)
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


def judge_relocation(
    record: CommitRecord,
    moved: CommitRecord,
    *,
    stored: CommitRecord | None,
    masters_token: int | None,
    fencing_token: int,
) -> CommitRecord | None:
    """Say what becomes of a relocation: None to write it, or the stored record if it is written already.

    Parameters
    ----------
    record, moved : CommitRecord
        What the master read, and what it wants.
    stored : CommitRecord or None
        The newest committed generation of the run.
    masters_token : int or None
        The fencing token of the present master, None if there never was one.
    fencing_token : int
        That of who asks.

    Raises
    ------
    FencedError, CommitConflictError
        See `Coordinator.relocate`.
    """
    if moved != record.held_by(moved.nodes, moved.addresses) or not (
        len(moved.nodes) == len(moved.addresses) == len(record.nodes) == len(set(moved.nodes))
    ):
        raise ConfigError(f"a relocation of generation {record.generation} changes more than its nodes")
    what = f"generation {record.generation} of run {record.run}"
    if masters_token != fencing_token:
        raise FencedError(
            f"the nodes of {what} are changed by the master alone, whose fencing token is {masters_token}, "
            f"not {fencing_token}; stop acting as master"
        )
    if stored is None or (stored.generation, stored.token) != (record.generation, record.token):
        raise CommitConflictError(
            f"{what} ({record.token}) is not the newest any more; its nodes stay as they are"
        )
    if (stored.nodes, stored.addresses) == (moved.nodes, moved.addresses):
        return stored
    if (stored.nodes, stored.addresses) != (record.nodes, record.addresses):
        raise CommitConflictError(
            f"{what} is held by {', '.join(stored.nodes)} meanwhile, not by {', '.join(record.nodes)}; "
            "read again"
        )
    return None


def fenced(run: str, owner: str = "") -> FencedError:
    """Return the error of an owner that is none any more; `owner` has the run now, if that is known."""
    unknown = "it was given back or claimed by another process, or the coordinator lost its data"
    what = f"it was taken over by {owner!r}" if owner else unknown
    return FencedError(f"run {run} is no longer owned here: {what}; stop saving it, or start anew")


def in_use(run: str, owner: str) -> RunInUseError:
    """Return the error of who claims a run that has an owner."""
    return RunInUseError(
        f"run {run} is owned by {owner}, which is alive (or was a moment ago); close it, use another "
        "directory, or take the run from it with takeover=True"
    )


def conflicting_mark(run: str, generation: int) -> CommitConflictError:
    """Return the error of who marks another author's generation as persisted."""
    return CommitConflictError(
        f"generation {generation} of run {run} was committed with another token; not marked as persisted"
    )
