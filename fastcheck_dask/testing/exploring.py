"""Runs steps in every order: small worlds, what can happen in them, and a search for what must not.

The steps (`fastcheck_dask.coordination.steps`) are those of the product. A world is never changed: each thing
that can happen next gives another one.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any, Protocol, TypeVar

from fastcheck_dask.coordination.entries import Change, Create, Delete, Entry, EntryConflictError, Write
from fastcheck_dask.coordination.steps import Step, Steps

W = TypeVar("W", bound="World")


class World(Protocol):
    """A moment of everything that is simulated."""

    @property
    def key(self) -> Hashable:
        """Equal for worlds in which the same can happen; a hash will do."""
        ...

    @property
    def fault(self) -> str:
        """What went wrong; empty as long as all is well."""
        ...

    def moves(self: W) -> Iterator[tuple[str, W]]:
        """Yield what can happen next, and what comes of it."""
        ...


class Task:
    """Steps in progress: which it is, what it was answered, and what it wants next.

    Parameters
    ----------
    make : callable
        Begins the steps; what was answered so far is told to them again.
    memo : dict
        What became of tasks of the same rules; shared by all of them, at first empty.
    """

    def __init__(
        self, make: Callable[[], Steps[Any]], memo: dict[Hashable, Task], answers: tuple[Any, ...] = ()
    ) -> None:
        self.make, self.memo, self.answers = make, memo, answers
        self.want: Step | None = None
        self.result: Any = None
        #: What the steps raised; not something that went wrong with the simulation.
        self.error: Exception | None = None
        steps = make()
        try:
            self.want = next(steps)
            for answer in answers:
                self.want = steps.throw(answer) if isinstance(answer, Exception) else steps.send(answer)
        except StopIteration as end:
            self.want, self.result = None, end.value
        except Exception as error:  # boundary of the simulated process
            self.want, self.error = None, error
        #: Equal for tasks that will do the same.
        self.key: int = hash((_position(steps), frozen(self.result), frozen(self.error)))
        steps.close()

    def told(self, answer: Any) -> Task:
        """Return the task after it was given an answer, or was raised an error."""
        key = self.key, frozen(answer)
        found = self.memo.get(key)
        if found is None:
            found = self.memo[key] = Task(self.make, self.memo, (*self.answers, answer))
        return found


def _position(steps: Any) -> Hashable:
    """Return where generators are, and all that they know."""
    found: list[Hashable] = []
    while steps is not None and steps.gi_frame is not None:
        frame = steps.gi_frame
        found.append((frame.f_code.co_name, frame.f_lasti, frozen(frame.f_locals)))
        steps = steps.gi_yieldfrom
    return tuple(found)


def frozen(value: Any) -> Hashable:
    """Return something hashable that is equal for equal values."""
    if isinstance(value, dict):
        return tuple(
            sorted(((str(key), frozen(one)) for key, one in value.items()), key=lambda pair: pair[0])
        )
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, Exception):
        return type(value).__name__, frozen(value.args)
    if is_dataclass(value):
        return type(value).__name__, tuple(frozen(getattr(value, one.name)) for one in fields(value))
    found: Hashable = value
    return found


def changed(entries: dict[str, Entry], changes: tuple[Change, ...], session: str) -> dict[str, Entry]:
    """Return the entries after changes; `EntryConflictError` if they are refused."""
    draft = dict(entries)
    for change in changes:
        found = draft.get(change.path)
        if isinstance(change, Create):
            if found is not None:
                raise EntryConflictError(change.path, "it exists already")
            draft[change.path] = Entry(change.value, 0, session if change.ephemeral else "")
        elif found is None:
            raise EntryConflictError(change.path, "there is none")
        elif change.version not in (None, found.version):
            raise EntryConflictError(change.path, f"it has version {found.version}, not {change.version}")
        elif isinstance(change, Write):
            draft[change.path] = Entry(change.value, found.version + 1, found.session)
        elif isinstance(change, Delete):
            del draft[change.path]
    return draft


@dataclass
class Explored:
    """What a search found."""

    #: Worlds that differ.
    worlds: int
    seconds: float
    #: Whether nothing was left to look at.
    complete: bool
    #: What went wrong; empty if nothing did.
    fault: str = ""
    #: What happened up to there.
    trace: list[str] = field(default_factory=list)

    def __str__(self) -> str:
        """Return a report to print."""
        how = "all of them" if self.complete else "not all"
        said = [f"{self.worlds} worlds ({how}) in {self.seconds:.1f} s: {self.fault or 'all is well'}"]
        return "\n".join([*said, *(f"  {number:2d}. {line}" for number, line in enumerate(self.trace, 1))])


def explore(
    start: W,
    *,
    goal: Callable[[W], bool] | None = None,
    seconds: float = 60.0,
    limit: int = 10_000_000,
) -> Explored:
    """Visit every world that can come of one, the near ones first, until something is wrong.

    Parameters
    ----------
    start : World
        The first.
    goal : callable, optional
        What must stay possible whatever happened; looked at when all worlds were visited.
    seconds, limit
        How long it may take, and how many worlds it may visit.
    """
    started = time.monotonic()
    parents: dict[Hashable, tuple[Hashable, str] | None] = {start.key: None}
    following: dict[Hashable, list[Hashable]] = {}
    reached: set[Hashable] = set()
    waiting = deque([start])
    while waiting:
        world = waiting.popleft()
        key = world.key
        if goal is not None and goal(world):
            reached.add(key)
        after = following[key] = []
        for what, new in world.moves():
            after.append(new.key)
            if new.key not in parents:
                parents[new.key] = key, what
                waiting.append(new)
            if new.fault:
                trace = [*_trace(parents, key), what]
                return Explored(len(parents), time.monotonic() - started, False, new.fault, trace)
        if len(parents) > limit or time.monotonic() - started > seconds:
            return Explored(len(parents), time.monotonic() - started, False)
    found = Explored(len(parents), time.monotonic() - started, True)
    if goal is not None and (stuck := _first_stuck(following, reached)) is not None:
        found.fault, found.trace = "it waits for ever", _trace(parents, stuck)
    return found


def _trace(parents: dict[Hashable, tuple[Hashable, str] | None], key: Hashable) -> list[str]:
    trace = []
    while (found := parents[key]) is not None:
        key, what = found
        trace.append(what)
    return trace[::-1]


def _first_stuck(following: dict[Hashable, list[Hashable]], reached: set[Hashable]) -> Hashable | None:
    """Return the first world from which no goal can be reached any more."""
    before: dict[Hashable, list[Hashable]] = {}
    for key, after in following.items():
        for one in after:
            before.setdefault(one, []).append(key)
    able, waiting = set(reached), deque(reached)
    while waiting:
        for key in before.get(waiting.popleft(), ()):
            if key not in able:
                able.add(key)
                waiting.append(key)
    return next((key for key in following if key not in able), None)


def wander(start: W, *, seed: int, steps: int) -> Explored:
    """Let things happen at random, until something is wrong or nothing can happen any more."""
    started, dice, world = time.monotonic(), random.Random(seed), start
    trace: list[str] = []
    for _ in range(steps):
        options = list(world.moves())
        if not options:
            break
        what, world = dice.choice(options)
        trace.append(what)
        if world.fault:
            return Explored(len(trace), time.monotonic() - started, False, world.fault, trace)
    return Explored(len(trace), time.monotonic() - started, False)
