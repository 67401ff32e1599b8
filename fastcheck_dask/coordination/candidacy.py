"""Who leads: how a candidate stands, takes office, keeps it and leaves it. Pure.

::

    epoch                whose version is the fencing token; its value names the master. Never deleted
    candidates/<name>    ephemeral: stands for election, with the version that `epoch` had then

A candidate that stood under an older epoch goes before one that stood under a newer, so that everybody has a
turn, and no counter is fought over. Each watches only whoever is directly before it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

from fastcheck_dask.coordination.entries import (
    Change,
    Check,
    Create,
    Delete,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.coordination.steps import Apply, Get, Names, Session, Steps, Wait
from fastcheck_dask.errors import SessionLostError

EPOCH: Final = "epoch"
CANDIDATES: Final = "candidates"
#: How long a candidate waits before it looks again though nothing was told: seldom, for each look costs the
#: coordinator a read through its quorum, and many candidates may stand.
LOOK_SECONDS: Final = 60.0


@dataclass(frozen=True)
class Candidate:
    """Who stands for election."""

    name: str
    #: Where it serves when it leads.
    address: str
    #: Of this candidacy alone: by it a candidate recognises its own writes.
    nonce: str

    @property
    def path(self) -> str:
        """Its entry."""
        return f"{CANDIDATES}/{self.name}"

    def to_bytes(self, stood: int) -> bytes:
        """Return its entry's value, or that of `EPOCH`; it stands since the fencing token `stood`."""
        return json.dumps(
            {"name": self.name, "address": self.address, "nonce": self.nonce, "stood": stood}
        ).encode()


@dataclass(frozen=True)
class Office:
    """Leadership as it was won."""

    fencing_token: int
    #: With which it ends.
    session: str
    #: Of the candidacy that won it, drawn: a coordinator that lost its data counts fencing tokens anew.
    nonce: str = ""


@dataclass(frozen=True)
class Standing:
    """A candidate's entry as others see it."""

    name: str
    nonce: str
    address: str
    stood: int
    session: str


def standing(entry: Entry | None) -> Standing | None:
    """Read a candidate's entry or that of `EPOCH`; None for one that names nobody."""
    if entry is None:
        return None
    try:
        found: Any = json.loads(entry.value)
        name, nonce, address, stood = (found[key] for key in ("name", "nonce", "address", "stood"))
    except (ValueError, TypeError, KeyError):
        return None
    if type(stood) is not int or not all(isinstance(text, str) for text in (name, nonce, address)):
        return None
    return Standing(name, nonce, address, stood, entry.session)


def line(master: Standing | None, candidates: Iterable[Standing]) -> list[Standing]:
    """Return the order in which candidates lead: whoever is in office and still stands, then by turn."""

    def turn(found: Standing) -> tuple[bool, int, str]:
        in_office = master is not None and (found.name, found.nonce) == (master.name, master.nonce)
        return not in_office, found.stood, found.name

    return sorted(candidates, key=turn)


def fenced(fencing_token: int, *changes: Change) -> tuple[Change, ...]:
    """Return changes that are refused as soon as there is another master."""
    return (Check(EPOCH, fencing_token), *changes)


def take_office(me: Candidate) -> Steps[Office]:
    """Stand for election until it is won.

    Returns
    -------
    Office
        The fencing token is the version of `EPOCH` that this candidate wrote.

    Raises
    ------
    SessionLostError
        If it was won, and the candidacy went before that was known; stand again with another nonce.
    """
    while True:
        # The epoch is read first: whatever happens in the office later makes its version another one.
        (epoch,) = yield Get((EPOCH,))
        if epoch is None:
            yield from try_apply(Create(EPOCH, b"{}"))
            continue
        session = yield Session()
        mine, others = yield from _candidates(me)
        master = standing(epoch)
        won = master is not None and master.nonce == me.nonce
        if won and not is_candidacy(me, mine, session):
            raise SessionLostError(f"{me.name} won the election and lost its session; it stands again")
        if won:
            return Office(epoch.version, session, me.nonce)
        if mine is None:
            # With the check nobody can stand under an epoch that is over, and overtake others.
            stand = Create(me.path, me.to_bytes(epoch.version), ephemeral=True)
            yield from try_apply(*fenced(epoch.version, stand))
        elif mine.session == session and not is_candidacy(me, mine, session):
            yield from try_apply(Delete(me.path, mine.version))
        elif mine.session != session:
            # Of a process of the same name that was killed, or of a session that ends: so will the entry.
            yield Wait(me.path, LOOK_SECONDS)
        else:
            before = predecessor(me, line(master, others))
            if before is not None:
                yield from _wait_behind(me, mine, before)
                continue
            write = Write(EPOCH, me.to_bytes(epoch.version), epoch.version)
            if (yield from try_apply(Check(me.path, mine.version), write)):
                return Office(epoch.version + 1, session, me.nonce)


def is_candidacy(me: Candidate, mine: Entry | None, session: str) -> bool:
    """Say whether an entry is this candidacy, and goes with that session."""
    found = standing(mine)
    return found is not None and (found.nonce, found.session) == (me.nonce, session)


def predecessor(me: Candidate, candidates: list[Standing]) -> Standing | None:
    """Return whoever is directly before a candidate; None if it is its turn."""
    place = next(number for number, found in enumerate(candidates) if found.name == me.name)
    return None if place == 0 else candidates[place - 1]


def _wait_behind(me: Candidate, mine: Entry, before: Standing) -> Steps[None]:
    """Wait for as long as a candidate stands as it did, and so does the one before it.

    Only these two are looked at: were it everybody, a thousand candidates would read a million entries at
    each look, and whenever the coordinator was away.
    """
    path = f"{CANDIDATES}/{before.name}"
    while True:
        yield Wait(path, LOOK_SECONDS)
        session = yield Session()
        found = yield Get((me.path, path))
        if session != mine.session or found[0] != mine or standing(found[1]) != before:
            return


def confirm(me: Candidate, office: Office) -> Steps[bool]:
    """Find out whether an office is still held: nobody else took it, and the candidacy stands."""
    session = yield Session()
    epoch, mine = yield Get((EPOCH, me.path))
    held = epoch is not None and epoch.version == office.fencing_token
    return held and session == office.session and is_candidacy(me, mine, session)


def resign(me: Candidate) -> Steps[None]:
    """Let the next one lead: the candidacy goes, and with it the office."""
    (mine,) = yield Get((me.path,))
    found = standing(mine)
    if found is not None and found.nonce == me.nonce:
        yield from try_apply(Delete(me.path, mine.version))


def try_apply(*changes: Change) -> Steps[bool]:
    """Try changes; False if they were refused, or it is not known: read again."""
    try:
        yield Apply(changes)
    except (EntryConflictError, OutcomeUnknownError):
        return False
    return True


def _candidates(me: Candidate) -> Steps[tuple[Entry | None, list[Standing]]]:
    """Return a candidate's own entry, and what all stand with."""
    names = yield Names(CANDIDATES)
    mine, *entries = yield Get((me.path, *(f"{CANDIDATES}/{name}" for name in names)))
    found = [one for one in map(standing, entries) if one is not None and one.name != me.name]
    own = standing(mine)
    return mine, found if own is None else [own, *found]
