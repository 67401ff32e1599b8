"""Elections in a small world: a few candidates, who act while they believe that they lead, and faults."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastcheck_dask.coordination import candidacy
from fastcheck_dask.coordination.candidacy import CANDIDATES, EPOCH, Candidate, Office, standing
from fastcheck_dask.coordination.entries import Change, Entry, EntryConflictError, OutcomeUnknownError, Write
from fastcheck_dask.coordination.steps import Apply, Get, Names, Session, Step, Steps, Wait
from fastcheck_dask.testing.exploring import Task, changed

#: What masters change.
ACT = "act"


class ElectionRules:
    """What is simulated; a test of the test replaces parts of it."""

    def __init__(self) -> None:
        #: Of the tasks that were made by these rules.
        self.memo: dict[Hashable, Task] = {}

    def take_office(self, me: Candidate) -> Steps[Office]:
        """Return what a candidate does."""
        return candidacy.take_office(me)

    def act(self, office: Office) -> tuple[Change, ...]:
        """Return the changes of a master."""
        return candidacy.fenced(office.fencing_token, Write(ACT, str(office.fencing_token).encode(), None))


@dataclass(frozen=True)
class ElectionBounds:
    """How much may happen."""

    acts: int = 2
    #: Candidacies that a candidate begins.
    candidacies: int = 2
    expired: int = 1
    resigned: int = 1
    #: Changes whose outcome is not known.
    unknown: int = 0


@dataclass(frozen=True)
class Stander:
    """One candidate: its session, its candidacy, and its office as it believes."""

    name: str
    session: int = 1
    turn: int = 0
    task: Task | None = None
    office: Office | None = None

    @property
    def me(self) -> Candidate:
        """The present candidacy."""
        return Candidate(self.name, "", f"{self.name}-{self.turn}")

    @property
    def session_name(self) -> str:
        """The present session."""
        return f"{self.name}{self.session}"

    @property
    def key(self) -> Hashable:
        """Equal for those that will do the same."""
        return self.name, self.session, self.turn, self.task and self.task.key, self.office


@dataclass(frozen=True)
class ElectionWorld:
    """See `World`."""

    rules: ElectionRules
    left: ElectionBounds
    standers: tuple[Stander, ...]
    entries: dict[str, Entry] = field(default_factory=lambda: {ACT: Entry(b"0", 0)})
    fault: str = ""

    @classmethod
    def start(
        cls, bounds: ElectionBounds, rules: ElectionRules | None = None, *, candidates: str = "ab"
    ) -> ElectionWorld:
        """Return the world before anybody stood."""
        return cls(rules or ElectionRules(), bounds, tuple(Stander(name) for name in candidates))

    @property
    def key(self) -> Hashable:
        """See `World`."""
        standers = tuple(one.key for one in self.standers)
        return hash((self.left, standers, frozenset(self.entries.items()), self.fault))

    @property
    def led(self) -> bool:
        """Whether somebody holds the office, and knows it."""
        epoch = self.entries.get(EPOCH)
        return epoch is not None and any(
            one.office is not None
            and one.office.fencing_token == epoch.version
            and candidacy.is_candidacy(one.me, self.entries.get(one.me.path), one.session_name)
            for one in self.standers
        )

    def moves(self) -> Iterator[tuple[str, ElectionWorld]]:
        """See `World`."""
        if self.fault:
            return
        for place, one in enumerate(self.standers):
            if one.office is not None:
                yield from self._in_office(place, one, one.office)
            elif one.task is None:
                if one.turn < self.left.candidacies:
                    me = replace(one, turn=one.turn + 1).me
                    task = Task(lambda me=me: self.rules.take_office(me), self.rules.memo)  # type: ignore[misc]
                    yield f"{one.name}: stands", self._with(place, replace(one, turn=one.turn + 1, task=task))
            else:
                yield from self._candidate(place, one, one.task)
            if self.left.expired:
                yield f"{one.name}: its session ends", self._expired(place, one)

    def _in_office(self, place: int, one: Stander, office: Office) -> Iterator[tuple[str, ElectionWorld]]:
        if self.left.acts:
            world = replace(self, left=self._less("acts"))
            answer, world = world._applied(Apply(self.rules.act(office)), one)
            if answer is None:
                yield f"{one.name}: acts as master {office.fencing_token}", world
            else:
                yield f"{one.name}: is fenced", world._with(place, replace(one, office=None, task=None))
        epoch, mine = self.entries[EPOCH], self.entries.get(one.me.path)
        held = epoch.version == office.fencing_token
        if not held or not candidacy.is_candidacy(one.me, mine, one.session_name):
            yield (
                f"{one.name}: notices that it does not lead",
                self._with(place, replace(one, office=None, task=None)),
            )
        stands = standing(mine)
        if self.left.resigned and stands is not None and stands.nonce == one.me.nonce:
            entries = {path: entry for path, entry in self.entries.items() if path != one.me.path}
            world = replace(self, entries=entries, left=self._less("resigned"))
            yield f"{one.name}: resigns", world._with(place, replace(one, office=None, task=None))

    def _candidate(self, place: int, one: Stander, task: Task) -> Iterator[tuple[str, ElectionWorld]]:
        for what, answer, world in self._answers(task.want, one):
            new = task.told(answer)
            while isinstance(new.want, Wait) or (isinstance(new.want, Session) and not world.left.expired):
                # Who looks again now sees what there is; what happens while it waits comes in another order.
                new = new.told(one.session_name if isinstance(new.want, Session) else None)
            after = replace(one, task=new)
            if new.want is None:
                after = replace(one, task=None, office=new.result)
            world = world._with(place, after)
            if new.result is not None and self._offices(new.result.fencing_token):
                world = replace(world, fault=f"two masters with fencing token {new.result.fencing_token}")
            yield f"{one.name}: {what}", world

    def _offices(self, fencing_token: int) -> bool:
        return any(
            one.office is not None and one.office.fencing_token == fencing_token for one in self.standers
        )

    def _expired(self, place: int, one: Stander) -> ElectionWorld:
        entries = {path: entry for path, entry in self.entries.items() if entry.session != one.session_name}
        world = replace(self, entries=entries, left=self._less("expired"))
        return world._with(place, replace(one, session=one.session + 1))

    def _answers(self, want: Step | None, one: Stander) -> Iterator[tuple[str, Any, ElectionWorld]]:
        match want:
            case Session():
                yield "looks at its session", one.session_name, self
            case Names(path):
                names = [
                    found.removeprefix(f"{path}/") for found in self.entries if found.startswith(f"{path}/")
                ]
                yield "lists the candidates", tuple(sorted(names)), self
            case Get(paths):
                yield f"reads {', '.join(paths)}", [self.entries.get(path) for path in paths], self
            case Wait(path):
                yield f"looks again at {path}", None, self
            case Apply():
                answer, world = self._applied(want, one)
                yield f"{_named(want)}: {answer or 'done'}", answer, world
                if self.left.unknown:
                    lost = OutcomeUnknownError("lost")
                    less = self._less("unknown")
                    yield f"{_named(want)}: done, the answer is lost", lost, replace(world, left=less)
                    yield f"{_named(want)}: lost", lost, replace(self, left=less)

    def _applied(self, want: Apply, one: Stander) -> tuple[Any, ElectionWorld]:
        try:
            entries = changed(self.entries, want.changes, one.session_name)
        except EntryConflictError as error:
            return error, self
        return None, replace(self, entries=entries, fault=self._fault_of(entries))

    def _fault_of(self, entries: dict[str, Entry]) -> str:
        """Say what is wrong with a change of the entries."""
        if int(entries[ACT].value) < int(self.entries[ACT].value):
            return "a master that was deposed acted after its successor"
        for path in entries.keys() - self.entries.keys():
            found = standing(entries[path])
            if path.startswith(CANDIDATES) and found is not None and found.stood != entries[EPOCH].version:
                return f"{found.name} overtakes those who stood before it"
        epoch = entries.get(EPOCH)
        if epoch == self.entries.get(EPOCH) or (new := standing(epoch)) is None:
            return ""
        stands = [found for one in self.standers if (found := standing(entries.get(one.me.path)))]
        if not any(found.nonce == new.nonce for found in stands):
            return f"{new.name} took office though its candidacy had ended with its session"
        old = standing(self.entries.get(EPOCH))
        if old is not None and old.nonce != new.nonce and any(found.nonce == old.nonce for found in stands):
            return f"{new.name} deposed {old.name}, which still stood"
        return ""

    def _with(self, place: int, one: Stander) -> ElectionWorld:
        return replace(self, standers=(*self.standers[:place], one, *self.standers[place + 1 :]))

    def _less(self, name: str) -> ElectionBounds:
        return replace(self.left, **{name: getattr(self.left, name) - 1})


def _named(want: Apply) -> str:
    return ", ".join(f"{type(change).__name__.lower()} {change.path}" for change in want.changes)
