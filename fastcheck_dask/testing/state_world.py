"""The states protocol in a small world: a node that changes its state, a reader, two masters, faults."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fastcheck_dask.coordination.candidacy import EPOCH
from fastcheck_dask.coordination.entries import Entry, EntryConflictError, OutcomeUnknownError
from fastcheck_dask.coordination.states import protocol
from fastcheck_dask.coordination.states.bits import Operation, StateBits
from fastcheck_dask.coordination.states.value import state_path, version_path
from fastcheck_dask.coordination.steps import Apply, Ask, Get, Names, Pause, Session, Step, Steps
from fastcheck_dask.errors import CoordinationError, NoMasterError
from fastcheck_dask.testing.exploring import Task, changed, frozen

NODE = "n"
_LOST = NoMasterError("x", "", "")


class Rules:
    """What is simulated; a test of the test replaces parts of it."""

    bits: type[StateBits] = StateBits
    #: Whether reads of the entries see everything that was acknowledged before.
    fresh = True

    def __init__(self) -> None:
        #: Of the tasks that were made by these rules.
        self.memo: dict[Hashable, Task] = {}

    def update(self, value: bytes, number: int) -> Steps[Any]:
        """Return what a node does to change its state."""
        return protocol.update(NODE, value, number)

    def read(self, known: dict[str, protocol.Known]) -> Steps[Any]:
        """Return what a reader does."""
        return protocol.read(known)

    def rule_out(self, operation: Operation, fencing_token: int) -> Steps[Any]:
        """Return what a master does about an operation that takes too long."""
        return protocol.rule_out(operation, fencing_token)

    def sweeps(self) -> bool:
        """Say whether a master looks for operations that take too long."""
        return True


@dataclass(frozen=True)
class Bounds:
    """How much may happen."""

    updates: int = 2
    #: Operations that the node begins, the tries included.
    operations: int = 3
    reads: int = 2
    elections: int = 1
    #: Requests or replies that are lost.
    lost: int = 1
    #: Requests that arrive a second time, later.
    repeated: int = 0
    #: Changes whose outcome is not known: made, not made, or made later.
    unknown: int = 0
    expired: int = 0
    crashed: int = 1


@dataclass(frozen=True)
class StateWorld:
    """See `World`. The node's state is called the register, and what was in it the history."""

    rules: Rules
    left: Bounds
    entries: dict[str, Entry]
    #: A master that was deposed goes on until it is told.
    masters: tuple[StateBits | None, ...]
    rulings: tuple[tuple[Operation, Task] | None, ...] = (None, None)
    session: int = 1
    updater: Task | None = None
    #: Operations begun so far.
    number: int = 0
    crashed: bool = False
    reader: Task | None = None
    known: dict[str, protocol.Known] = field(default_factory=dict)
    history: tuple[bytes | None, ...] = (None,)
    #: Position in the history by the token of the operation that put it there.
    applied: tuple[tuple[bytes, int], ...] = ()
    #: When the present read began: last position, and operations under way.
    low: int = 0
    under_way: frozenset[bytes] = frozenset()
    #: Operations that must not take effect any more, because a read passed them over.
    passed_over: frozenset[bytes] = frozenset()
    #: Requests that may arrive again, and changes that may yet be made.
    copies: tuple[tuple[int, dict[str, Any]], ...] = ()
    late: tuple[Apply, ...] = ()
    fault: str = ""

    @classmethod
    def start(cls, bounds: Bounds, rules: Rules | None = None) -> StateWorld:
        """Return the world in which the first master has just taken office."""
        rules = rules or Rules()
        return cls(rules, bounds, {EPOCH: Entry(b"", 1)}, (rules.bits(1, {}), None))

    @property
    def key(self) -> Hashable:
        """See `World`."""
        found: Hashable = self.__dict__.get("_key")
        if found is None:
            found = hash(self._make_key())
            self.__dict__["_key"] = found
        return found

    def _make_key(self) -> Hashable:
        return (
            self.left,
            frozenset(self.entries.items()),
            tuple(_bits_key(bits) for bits in self.masters),
            tuple(None if one is None else (one[0], one[1].key) for one in self.rulings),
            self.session,
            self.updater and self.updater.key,
            self.number,
            self.crashed,
            self.reader and self.reader.key,
            frozen(self.known),
            self.history,
            self.low,
            self.under_way,
            self.passed_over,
            frozen(self.copies),
            self.late,
            self.fault,
        )

    def moves(self) -> Iterator[tuple[str, StateWorld]]:
        """See `World`."""
        over = not self.left.reads and self.reader is None and not self.passed_over
        if not (self.fault or over):
            every = (self._node_moves(), self._reader_moves(), self._master_moves(), self._fault_moves())
            for what, world in itertools.chain(*every):
                yield what, world._pruned()

    def _pruned(self) -> StateWorld:
        """Return the world without operations that cannot take effect any more."""
        if not (self.passed_over or self.under_way):
            return self
        wants = [*self.late, None if self.updater is None or self.crashed else self.updater.want]
        live = {_token(want) for want in wants if isinstance(want, Apply)}
        under_way = self.under_way & (live | {token for token, _ in self.applied})
        return replace(self, under_way=under_way, passed_over=self.passed_over & live)

    # ---- the node

    def _node_moves(self) -> Iterator[tuple[str, StateWorld]]:
        if self.crashed:
            return
        if self.updater is None:
            if self.left.updates:
                value = str(3 - self.left.updates).encode()
                number = self.number
                task = Task(lambda: self.rules.update(value, number), self.rules.memo)
                world = replace(self, left=self._less("updates"))
                yield f"node: wants state {value.decode()}", world._with_updater(task)
            return
        want = self.updater.want
        for what, answer, world in self._answers(want, f"s{self.session}"):
            if isinstance(want, Ask) and want.request["op"] == "state_begin":
                world = replace(world, number=want.request["number"])
            yield f"node: {what}", world._with_updater(self.updater.told(answer))

    def _with_updater(self, task: Task) -> StateWorld:
        while isinstance(task.want, Pause):
            task = task.told(None)
        if isinstance(task.want, Session) and not self.left.expired:
            task = task.told(f"s{self.session}")
        if task.want is not None:
            return replace(self, updater=task)
        # After an error, too: the caller goes on with its next state.
        return replace(self, updater=None)

    # ---- the reader

    def _reader_moves(self) -> Iterator[tuple[str, StateWorld]]:
        if self.reader is None:
            if self.left.reads:
                known = self.known
                task = Task(lambda: self.rules.read(known), self.rules.memo)
                pending = [self.updater.want] if self.updater is not None else []
                tokens = [_token(want) for want in [*pending, *self.late] if isinstance(want, Apply)]
                yield (
                    f"reader: calls, {len(tokens)} operations are under way",
                    replace(
                        self,
                        reader=task,
                        left=self._less("reads"),
                        low=len(self.history) - 1,
                        under_way=frozenset(tokens),
                    ),
                )
            return
        for what, answer, world in self._answers(self.reader.want, "r"):
            task = self.reader.told(answer)
            while isinstance(task.want, Pause):
                task = task.told(None)
            if task.want is not None:
                yield f"reader: {what}", replace(world, reader=task)
            else:
                yield f"reader: {what}, and returns", world._judged(task.result)

    def _judged(self, result: dict[str, protocol.Known]) -> StateWorld:
        """Judge what a read returned."""
        value = result[NODE].value if NODE in result else None
        positions = [place for place, held in enumerate(self.history) if held == value]
        newest = max(positions, default=-1)
        fault = ""
        if newest < self.low:
            fault = (
                f"a read returned {value!r}, older than {self.history[self.low]!r} written before its call"
            )
        applied = dict(self.applied)
        for token in self.under_way:
            if newest < applied.get(token, -1):
                fault = f"a read returned {value!r} from before {token!r}, which was begun before its call"
        return replace(
            self,
            reader=None,
            known=result,
            low=0,
            under_way=frozenset(),
            passed_over=self.passed_over | {token for token in self.under_way if token not in applied},
            fault=fault,
        )

    # ---- the masters

    def _master_moves(self) -> Iterator[tuple[str, StateWorld]]:
        for place, bits in enumerate(self.masters):
            if bits is None:
                continue
            ruling = self.rulings[place]
            if ruling is None:
                for operation in bits.expired(0.0) if self.rules.sweeps() else ():
                    task = Task(self._ruling(operation, bits.fencing_token), self.rules.memo)
                    yield (
                        f"master {place}: the lease of operation {operation.number} ended",
                        self._with_ruling(place, operation, task),
                    )
                continue
            operation, task = ruling
            for what, answer, world in self._answers(task.want, f"m{place}"):
                yield f"master {place}: {what}", world._with_ruling(place, operation, task.told(answer))

    def _ruling(self, operation: Operation, fencing_token: int) -> Callable[[], Steps[Any]]:
        return lambda: self.rules.rule_out(operation, fencing_token)

    def _with_ruling(self, place: int, operation: Operation, task: Task) -> StateWorld:
        if task.want is not None:
            return replace(self, rulings=_put(self.rulings, place, (operation, task)))
        world = replace(self, rulings=_put(self.rulings, place, None))
        if task.error is not None:
            return replace(world, masters=_put(self.masters, place, None))
        bits = _clone(self.masters[place])
        if task.result is not None and bits is not None:
            bits.ruled_out(operation, task.result)
        return replace(world, masters=_put(self.masters, place, bits))

    # ---- what goes wrong

    def _fault_moves(self) -> Iterator[tuple[str, StateWorld]]:
        if self.left.elections:
            yield "the other master takes office", self._elected()
        if self.left.crashed and not self.crashed and self.updater is not None:
            yield "node: dies", replace(self, crashed=True, left=self._less("crashed"))
        if self.left.expired:
            yield "node: its session ends", self._expired()
        for number, (place, request) in enumerate(self.copies):
            rest = self.copies[:number] + self.copies[number + 1 :]
            _, world = self._served(place, request)
            yield f"{request['op']} {request['number']} arrives again", replace(world, copies=rest)
        for number, late in enumerate(self.late):
            rest_late = self.late[:number] + self.late[number + 1 :]
            _, world = self._applied(late, f"s{self.session}")
            yield "a change is made late, or refused", replace(world, late=rest_late)

    def _elected(self) -> StateWorld:
        place = 1 if self.masters[1] is None else 0
        epoch = self.entries[EPOCH]
        entries = self.entries | {EPOCH: Entry(b"", epoch.version + 1)}
        world = replace(self, entries=entries, left=self._less("elections"))
        task = Task(lambda: protocol.open_bits(epoch.version + 1), {})
        while task.want is not None:
            # Nothing that matters to it can change between these two reads: it is refused.
            ((_, answer, world),) = world._answers(task.want, "m")
            task = task.told(answer)
        bits = self.rules.bits(task.result.fencing_token, task.result.versions)
        return replace(
            world, masters=_put(self.masters, place, bits), rulings=_put(self.rulings, place, None)
        )

    def _expired(self) -> StateWorld:
        entries = {path: entry for path, entry in self.entries.items() if entry.session != f"s{self.session}"}
        history = self.history if self.history[-1] is None else (*self.history, None)
        # What was sent in the session that ended is refused.
        return replace(
            self,
            entries=entries,
            session=self.session + 1,
            history=history,
            late=(),
            left=self._less("expired"),
        )

    # ---- answers

    def _answers(self, want: Step | None, session: str) -> Iterator[tuple[str, Any, StateWorld]]:
        match want:
            case Session():
                yield f"is in session {session}", session, self
            case Names(path):
                below = [found.removeprefix(f"{path}/") for found in self.entries]
                names = tuple(sorted(name for name in below if f"{path}/{name}" in self.entries))
                yield f"lists {path}", names, self
            case Get(paths):
                yield from self._gets(paths, session)
            case Ask(request):
                yield from self._asks(dict(request))
            case Apply():
                yield from self._applies(want, session)

    def _gets(self, paths: tuple[str, ...], session: str) -> Iterator[tuple[str, Any, StateWorld]]:
        found = [self.entries.get(path) for path in paths]
        yield f"reads {', '.join(paths)}", found, self
        if session == "r" and not self.rules.fresh and state_path(NODE) in paths and len(self.history) > 1:
            before = self.history[-2]
            old = None if before is None else Entry(before, 0, session)
            stale = [old if path == state_path(NODE) else one for path, one in zip(paths, found, strict=True)]
            yield f"reads {', '.join(paths)} from a server that lags behind", stale, self

    def _asks(self, request: dict[str, Any]) -> Iterator[tuple[str, Any, StateWorld]]:
        what = f"{request['op']} {request.get('number', '')}".strip()
        if request["op"] == "state_begin" and request["number"] > self.left.operations:
            return
        for place, bits in enumerate(self.masters):
            if bits is None:
                continue
            answer, world = self._served(place, request)
            yield f"{what} at master {place}: {answer}", answer, world
            if request["op"] == "state_query":
                continue
            if self.left.lost:
                less = replace(world, left=world._less("lost"))
                yield f"{what} at master {place}, its reply is lost", _LOST, less
            if self.left.repeated:
                again = replace(world, copies=(*world.copies, (place, request)), left=world._less("repeated"))
                yield f"{what} at master {place}, will arrive again", answer, again

    def _served(self, place: int, request: dict[str, Any]) -> tuple[Any, StateWorld]:
        """Have a master serve a request as it does over the wire."""
        bits = _clone(self.masters[place])
        if bits is None:
            return _LOST, self
        try:
            if request["op"] == "state_query":
                return bits.query(), self
            operation = Operation.from_request(request)
            if request["op"] == "state_begin":
                answer = bits.begin(operation, 0.0)
            else:
                answer = bits.end(operation, request["fencing_token"], request["version"])
        except CoordinationError as error:
            return error, self
        return answer, replace(self, masters=_put(self.masters, place, bits))

    def _applies(self, want: Apply, session: str) -> Iterator[tuple[str, Any, StateWorld]]:
        answer, world = self._applied(want, session)
        yield f"writes: {answer or 'done'}", answer, world
        if self.left.unknown:
            unknown = OutcomeUnknownError("lost")
            yield "writes, the answer is lost", unknown, replace(world, left=self._less("unknown"))
            if session.startswith("s"):
                late = replace(self, late=(*self.late, want), left=self._less("unknown"))
                yield "writes, which is on its way", unknown, late

    def _applied(self, want: Apply, session: str) -> tuple[Any, StateWorld]:
        """Make changes, and keep the history of the register."""
        try:
            entries = changed(self.entries, want.changes, session)
        except EntryConflictError as error:
            return error, self
        state, token = entries.get(state_path(NODE)), _token(want)
        if not any(change.path == state_path(NODE) for change in want.changes):
            return None, replace(self, entries=entries)
        history = (*self.history, None if state is None else state.value)
        fault = self.fault
        if token in self.passed_over:
            fault = f"{token!r} took effect after a read that began later had returned the state before it"
        applied = (*self.applied, (token, len(history) - 1))
        return None, replace(self, entries=entries, history=history, applied=applied, fault=fault)

    def _less(self, name: str) -> Bounds:
        return replace(self.left, **{name: getattr(self.left, name) - 1})


def _token(want: Apply) -> bytes:
    """Return the token of the operation that changes are of; empty for those of a master."""
    found = [change for change in want.changes if change.path == version_path(NODE)]
    return getattr(found[0], "value", b"") if found else b""


def _bits_key(bits: StateBits | None) -> Hashable:
    if bits is None:
        return None
    return bits.fencing_token, frozenset(bits.bits.items()), frozenset(bits.versions.items())


def _clone(bits: StateBits | None) -> StateBits | None:
    found = copy.copy(bits)
    if found is not None:
        found.bits, found.versions = dict(found.bits), dict(found.versions)
    return found


def _put(values: tuple[Any, ...], place: int, value: Any) -> tuple[Any, ...]:
    return (*values[:place], value, *values[place + 1 :])
