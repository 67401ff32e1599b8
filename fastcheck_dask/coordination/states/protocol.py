"""The three parts of the protocol, as steps: a node's update, a reader's read, what a master does. Pure.

Each order of things here is one of the defences without which a reader may be told an old state: see
``docs/concepts/coordination.md``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from fastcheck_dask.coordination.candidacy import EPOCH, fenced, standing
from fastcheck_dask.coordination.entries import (
    Change,
    Create,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.coordination.states.bits import Operation, StateBits
from fastcheck_dask.coordination.states.value import STATES, VERSIONS, state_path, version_path
from fastcheck_dask.coordination.steps import Apply, Ask, Get, Names, Pause, Session, Steps
from fastcheck_dask.errors import NoMasterError

#: Between two questions of a reader that finds a state changing.
CHANGING_SECONDS: Final = 0.02
#: Before the next try, when there is no master or a change was refused.
RETRY_SECONDS: Final = 0.1
#: The office of no master.
NOBODY: Final = (-1, "")


@dataclass(frozen=True)
class Written:
    """A state that was written."""

    version: int
    #: With which it goes.
    session: str


@dataclass(frozen=True)
class Begun:
    """An operation whose bit is set."""

    operation: Operation
    #: Of the master that set it, and under which alone it may be written.
    fencing_token: int


def update(node: str, value: bytes, number: int) -> Steps[Written]:
    """Change the state of a node: begin, write, end. Tries again until it is written.

    Parameters
    ----------
    node : str
        Who alone writes this state.
    value : bytes
        The new one.
    number : int
        Greater than that of any operation that this session began before; those of the update follow.
    """
    tried: tuple[bytes, ...] = ()
    begun: Begun | None = None
    while True:
        session = yield Session()
        # Read before the bit is set: when the master rules an operation out, this version is over.
        version, state = yield Get((version_path(node), state_path(node)))
        if begun is not None and version is not None and state is not None and version.value in tried:
            # It had taken effect, and the answer was lost; so whatever was begun after it never will.
            yield from _end(begun, version.version)
            return Written(version.version, state.session)
        if state is not None and state.session != session:
            # Of another process of this name, or of our own last session: it goes with that.
            yield Pause(RETRY_SECONDS)
            continue
        number += 1
        operation = Operation(node, session, number)
        try:
            reply = yield Ask(operation.to_request("state_begin"))
        except NoMasterError:
            yield Pause(RETRY_SECONDS)
            continue
        begun = Begun(operation, reply["fencing_token"])
        tried = (*tried, operation.token)
        try:
            yield Apply(fenced(begun.fencing_token, *_writes(operation, value, version=version, state=state)))
        except (EntryConflictError, OutcomeUnknownError):
            # The bit stays: it is replaced by the next operation's, or ends with its lease.
            continue
        written = 0 if version is None else version.version + 1
        yield from _end(begun, written)
        return Written(written, session)


def _writes(
    operation: Operation, value: bytes, *, version: Entry | None, state: Entry | None
) -> tuple[Change, Change]:
    where, mark = version_path(operation.node), operation.token
    count: Change = Create(where, mark) if version is None else Write(where, mark, version.version)
    path = state_path(operation.node)
    if state is None:
        return count, Create(path, value, ephemeral=True)
    return count, Write(path, value, state.version)


def _end(begun: Begun, version: int) -> Steps[None]:
    try:
        yield Ask(begun.operation.to_request("state_end", fencing_token=begun.fencing_token, version=version))
    except NoMasterError:
        # It is written; the bit ends with its lease.
        return


@dataclass(frozen=True)
class Known:
    """A state as a reader knows it."""

    value: bytes
    #: That the master gave for it; None if the master knew none.
    version: int | None
    #: Of the office of that master: a coordinator that lost its data comes to the same versions again.
    nonce: str = ""


def read(known: Mapping[str, Known]) -> Steps[dict[str, Known]]:
    """Read the states of all nodes.

    A state that was written before the read began is in the answer, or a newer one; so is one that was begun
    and then takes effect.

    Parameters
    ----------
    known : mapping of str to Known
        What the read before this one returned; only what changed is read again.
    """
    office = NOBODY
    settled: dict[str, int] = {}
    while True:
        try:
            reply = yield Ask({"op": "state_query"})
        except NoMasterError:
            yield Pause(RETRY_SECONDS)
            continue
        if (asked := (reply["fencing_token"], reply["nonce"])) != office:
            # Another master knows nothing of what the last one said.
            office, settled = asked, {}
        settled = _settled(reply["versions"], reply["changing"]) | settled
        if set(reply["changing"]) - settled.keys():
            yield Pause(CHANGING_SECONDS)
            continue
        names = yield Names(STATES)
        wanted = [
            name for name in names if not is_current(known.get(name), settled.get(name), nonce=office[1])
        ]
        epoch, *found = yield Get((EPOCH, *map(state_path, wanted)))
        if is_confirmed(epoch, office):
            fresh = dict(zip(wanted, found, strict=True))
            return _answer(known, names, settled=settled, fresh=fresh, nonce=office[1])
        office, settled = NOBODY, {}


def _settled(versions: Mapping[str, int], changing: list[str]) -> dict[str, int]:
    """Return the versions of the nodes without a bit."""
    return {name: version for name, version in versions.items() if name not in changing}


def is_current(known: Known | None, version: int | None, *, nonce: str) -> bool:
    """Say whether a known state need not be read again."""
    return known is not None and version is not None and (known.version, known.nonce) == (version, nonce)


def is_confirmed(epoch: Entry | None, office: tuple[int, str]) -> bool:
    """Say whether the master that answered still led when the entries were read."""
    if epoch is None:
        return False
    master = standing(epoch)
    return (epoch.version, "" if master is None else master.nonce) == office


def _answer(
    known: Mapping[str, Known],
    names: tuple[str, ...],
    *,
    settled: Mapping[str, int],
    fresh: Mapping[str, Entry | None],
    nonce: str,
) -> dict[str, Known]:
    answer = {}
    for name in names:
        if name not in fresh:
            answer[name] = known[name]
        elif (entry := fresh[name]) is not None:
            # What was read may be newer than the version says: then it is read once more next time.
            answer[name] = Known(entry.value, settled.get(name), nonce)
    return answer


def open_bits(fencing_token: int, nonce: str = "") -> Steps[StateBits]:
    """Return the bits of a new master: nothing is set, and the versions are those that are stored now."""
    names = yield Names(VERSIONS)
    entries = yield Get(tuple(map(version_path, names)))
    found = zip(names, entries, strict=True)
    versions = {name: entry.version for name, entry in found if entry is not None}
    return StateBits(fencing_token, versions, nonce=nonce)


def rule_out(operation: Operation, fencing_token: int) -> Steps[int | None]:
    """Make sure that an operation which took too long has no effect later; then its bit may be cleared.

    Returns
    -------
    int or None
        The version of the node's state from now on; None if it is not known: try again.

    Raises
    ------
    EntryConflictError
        Of the entry `epoch`, if there is another master.
    """
    path = version_path(operation.node)
    (entry,) = yield Get((path,))
    change: Change = Create(path, b"") if entry is None else Write(path, entry.value, entry.version)
    try:
        yield Apply(fenced(fencing_token, change))
    except OutcomeUnknownError:
        return None
    except EntryConflictError as error:
        if error.path == EPOCH:
            raise
        # The node was quicker.
        return None
    return 0 if entry is None else entry.version + 1
