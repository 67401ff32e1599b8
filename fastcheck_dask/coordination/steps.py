"""Decisions apart from deeds: a generator yields what it wants done, and is sent the answers.

The same generators run with a real coordinator (:func:`perform`) and, one step of one of them at a time,
under a simulation that tries every order. So that it can tell two of their states apart, they keep everything
in local variables and do not yield inside a ``for``.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Protocol, TypeVar

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.entries import Change, Entries, Watch
from fastcheck_dask.errors import ClosedError, CoordinationError

T = TypeVar("T")

#: How long a wait takes no notice of being told to stop.
_SLICE_SECONDS: Final = 0.2


@dataclass(frozen=True)
class Session:
    """Answer: the name of the present session."""


@dataclass(frozen=True)
class Get:
    """Answer: the entries, None for those that are missing; each read is linearizable."""

    paths: tuple[str, ...]


@dataclass(frozen=True)
class Names:
    """Answer: the names under a path; the read is linearizable."""

    path: str


@dataclass(frozen=True)
class Apply:
    """Make all changes or none; `EntryConflictError` and `OutcomeUnknownError` come as with `Entries`."""

    changes: tuple[Change, ...]


@dataclass(frozen=True)
class Ask:
    """Answer: the reply of the master; `NoMasterError` if there is none or it is lost."""

    request: Mapping[str, Any]


@dataclass(frozen=True)
class Pause:
    """Let some time pass."""

    seconds: float


@dataclass(frozen=True)
class Wait:
    """Wait until an entry may have changed, or the time has passed; the first for a path returns at once."""

    path: str
    seconds: float


Step = Session | Get | Names | Apply | Ask | Pause | Wait
Steps = Generator[Step, Any, T]


class MasterLink(Protocol):
    """The way to the master."""

    def ask(self, request: Mapping[str, Any]) -> Mapping[str, Any]:
        """Have the master serve a request, and return its reply; any thread may call.

        Raises
        ------
        NoMasterError
            If nobody leads, or the request or the reply was lost: the master may have done what was asked.
        """
        ...


class DeadlineError(CoordinationError):
    """There was not enough time; the steps are given up."""


def perform(
    steps: Steps[T],
    entries: Entries,
    *,
    link: MasterLink | None = None,
    deadline: Deadline | None = None,
    stopping: threading.Event | None = None,
) -> T:
    """Do what the steps want, and return what they come to. Blocks.

    Parameters
    ----------
    steps : Steps
        Errors of the coordinator and the link are raised in it where it yields.
    entries : Entries
        The coordinator's entries.
    link : MasterLink, optional
        For `Ask`.
    deadline : Deadline, optional
        By when it has to be over; a call to the coordinator that was begun is waited for.
    stopping : Event, optional
        Set to have it end.

    Raises
    ------
    CoordinationError
        If the deadline passed, or the steps did not handle one.
    ClosedError
        If `stopping` was set.
    """
    deadline, stopping = deadline or Deadline(None), stopping or threading.Event()
    with closing(_Performer(entries, link, deadline, stopping)) as performer:
        go_on: Callable[[], Step] = partial(next, steps)
        while True:
            try:
                step = go_on()
            except StopIteration as end:
                result: T = end.value
                return result
            performer.check()
            try:
                go_on = partial(steps.send, performer.answer(step))
            except CoordinationError as error:
                go_on = partial(steps.throw, error)


class _Performer:
    def __init__(
        self, entries: Entries, link: MasterLink | None, deadline: Deadline, stopping: threading.Event
    ) -> None:
        self._entries, self._link = entries, link
        self._deadline, self._stopping = deadline, stopping
        self._watches: dict[str, Watch] = {}

    def close(self) -> None:
        for watch in self._watches.values():
            watch.close()
        self._watches = {}

    def answer(self, step: Step) -> Any:
        match step:
            case Session():
                return self._entries.session
            case Get(paths):
                return self._entries.get_many(*paths)
            case Names(path):
                return self._entries.names(path)
            case Apply(changes):
                return self._entries.apply(*changes)
            case Ask(request):
                assert self._link is not None, "no way to the master was given"
                return self._link.ask(request)
            case Pause(seconds):
                return self._pause(seconds)
            case Wait(path, seconds):
                return self._wait(path, seconds)

    def check(self) -> None:
        if self._stopping.is_set():
            raise ClosedError("it was closed while it waited for the coordinator or the master")
        if self._deadline.passed:
            raise DeadlineError("the coordinator or the master took too long; try again, or do without")

    def _pause(self, seconds: float) -> None:
        left = self._deadline.left()
        self._stopping.wait(seconds if left is None else min(seconds, left))

    def _wait(self, path: str, seconds: float) -> None:
        if path not in self._watches:
            # What changed before there was a watch is not told: have the steps look once more.
            self.close()
            self._watches = {path: self._entries.watch(path)}
            return
        until = Deadline.after(seconds)
        while not until.passed and not self._stopping.is_set() and not self._deadline.passed:
            if self._watches[path].wait(min(_SLICE_SECONDS, until.left() or 0.0)):
                return
