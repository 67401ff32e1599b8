"""Leadership with a fencing token, tied to the service that whoever leads has to give."""

from __future__ import annotations

import logging
import math
import secrets
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Final, TypeVar

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock, Deadline
from fastcheck_dask.coordination.candidacy import (
    EPOCH,
    Candidate,
    Office,
    Standing,
    confirm,
    fenced,
    resign,
    standing,
    take_office,
)
from fastcheck_dask.coordination.entries import Change, Entries, EntryConflictError
from fastcheck_dask.coordination.steps import Apply, Steps, perform
from fastcheck_dask.errors import ClosedError, CoordinationError, FencedError

T = TypeVar("T")
_RESIGN_SECONDS: Final = 1.0
_CLOSE_SECONDS: Final = 5.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ElectionTimes:
    """How often things are looked at, in seconds."""

    #: A master asks the coordinator this often whether it is still one,
    confirm_seconds: float = 0.5
    #: and relies on the answer for so long: less than a session lasts.
    trust_seconds: float = 1.5
    #: A service that is silent for so long counts as dead.
    watchdog_seconds: float = 5.0
    #: After a service failed, others go first.
    back_off_seconds: float = 1.0


class Leadership:
    """The office of a master. Any thread may call; no method but `wait` and `apply` blocks.

    Attributes
    ----------
    fencing_token : int
        Version of the entry `epoch`; grows with each master.
    nonce : str
        What the entry `epoch` names besides, drawn for this office alone.
    """

    def __init__(
        self, entries: Entries, office: Office, *, times: ElectionTimes, clock: Clock = SYSTEM_CLOCK
    ) -> None:
        self.fencing_token, self.nonce = office.fencing_token, office.nonce
        self._entries, self._session = entries, office.session
        self._times, self._clock = times, clock
        self._over = threading.Event()
        self._began = clock.now()
        #: When each part of the service gave its last sign of life.
        self._heard: dict[str, float] = {}
        #: Not in force before the coordinator confirmed it: time may have passed since it was won.
        self._confirmed = -math.inf

    @property
    def over(self) -> bool:
        """Whether it ended for good."""
        return self._over.is_set()

    @property
    def in_force(self) -> bool:
        """Whether to act now: there is a connection, and the coordinator confirmed the office lately.

        A process that was stopped and goes on finds this False until it has asked again.
        """
        return (
            not self.over
            and self._entries.connected
            and self._entries.session == self._session
            and self._clock.now() - self._confirmed <= self._times.trust_seconds
        )

    @property
    def is_served(self) -> bool:
        """Whether every part of the service gave a sign of life lately."""
        heard = min(self._heard.copy().values(), default=self._began)
        return self._clock.now() - heard <= self._times.watchdog_seconds

    def apply(self, *changes: Change) -> None:
        """Make changes that are refused if there is another master; see `Entries.apply`.

        Raises
        ------
        FencedError
            If the office is over or not in force; another master's is never undone.
        EntryConflictError, OutcomeUnknownError
            As with `Entries`.
        """
        self.perform(_apply(fenced(self.fencing_token, *changes)))

    def perform(self, steps: Steps[T]) -> T:
        """Do what steps want under this office; they fence their changes. Errors as with :meth:`apply`."""
        if not self.in_force:
            raise FencedError(
                f"the office of fencing token {self.fencing_token} is not in force; do not act as master"
            )
        try:
            return perform(steps, self._entries)
        except EntryConflictError as error:
            if error.path != EPOCH:
                raise
            self.end()
            raise FencedError(
                f"the master with fencing token {self.fencing_token} was deposed: {error}"
            ) from error

    def wait(self, seconds: float, part: str = "") -> bool:
        """Wait, and say whether the office is still held; to be called by the service, as a sign of life.

        A service of several parts names them: each has to go on calling once it has begun to.
        """
        self._heard[part] = self._clock.now()
        held = not self._over.wait(seconds)
        self._heard[part] = self._clock.now()
        return held

    def confirmed(self, since: float) -> None:
        """Note that the coordinator confirmed the office when it was asked at `since`."""
        self._confirmed = since

    def end(self) -> None:
        """End it for good. Idempotent."""
        self._over.set()


#: Runs while the node leads: returns soon after `Leadership.wait` said False.
Service = Callable[[Leadership], None]


class Election:
    """Stands for election, and runs a service while elected.

    The office is given up when the service ends, fails, or does not call `Leadership.wait` any more: whoever
    leads serves. After a lost session it stands again under the new one.

    Parameters
    ----------
    entries : Entries
        Session of the candidate.
    name : str
        Of the candidate, unique.
    service : callable
        Called in a thread of its own for each office.
    address : str
        Where the master serves; for those who look for it.
    times : ElectionTimes, optional
        For tests.
    """

    def __init__(
        self,
        entries: Entries,
        name: str,
        service: Service,
        *,
        address: str = "",
        times: ElectionTimes | None = None,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._entries, self._service = entries, service
        self._me = Candidate(name, address, "")
        self._times, self._clock = times or ElectionTimes(), clock
        self._closing = threading.Event()
        self._leadership: Leadership | None = None
        self._thread = threading.Thread(target=self._run, name="fastcheck-election", daemon=True)

    @property
    def leadership(self) -> Leadership | None:
        """The present office, if there is one."""
        found = self._leadership
        return None if found is None or found.over else found

    def start(self) -> None:
        """Begin to stand."""
        self._thread.start()

    def close(self) -> None:
        """Stand no more; a master resigns. Blocks for a few seconds at most. Idempotent."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join(_CLOSE_SECONDS)

    def _run(self) -> None:
        reported = ""
        while not self._closing.is_set():
            me = replace(self._me, nonce=secrets.token_hex(8))
            try:
                self._lead(me, perform(take_office(me), self._entries, stopping=self._closing))
                reported = ""
            except ClosedError:
                # Ours or the session's: either way nobody is asked to stand any more.
                break
            except CoordinationError as error:
                if str(error) != reported:
                    logger.warning("%s cannot stand for election: %s", me.name, error)
                    reported = str(error)
            finally:
                self._resign(me)
            self._closing.wait(self._times.back_off_seconds)

    def _lead(self, me: Candidate, office: Office) -> None:
        leadership = Leadership(self._entries, office, times=self._times, clock=self._clock)
        done = threading.Event()
        logger.info("%s leads with fencing token %d", me.name, office.fencing_token)
        self._leadership = leadership
        thread = threading.Thread(
            target=self._serve, args=(leadership, done), name="fastcheck-master", daemon=True
        )
        thread.start()
        try:
            self._watch(me, office, leadership=leadership, done=done)
        finally:
            leadership.end()
            logger.info("%s leads no more (fencing token %d)", me.name, office.fencing_token)
            self._resign(me)
        # A service that is stuck must not be joined by another one: this candidate is out until it ends.
        while not done.wait(self._times.confirm_seconds) and not self._closing.is_set():
            pass

    def _serve(self, leadership: Leadership, done: threading.Event) -> None:
        try:
            self._service(leadership)
        except FencedError as error:
            logger.info("%s stops: %s", self._me.name, error)
        except Exception:  # boundary of the thread: whatever it was, somebody else shall lead
            logger.exception("the service of master %s failed", self._me.name)
        finally:
            done.set()

    def _watch(self, me: Candidate, office: Office, *, leadership: Leadership, done: threading.Event) -> None:
        """Return when the office is lost or has to be given up."""
        while not leadership.over and not self._closing.is_set():
            if not self._confirm(me, office, leadership=leadership) or done.wait(self._times.confirm_seconds):
                return
            if not leadership.is_served:
                logger.error("the service of master %s is stuck; it resigns", me.name)
                return

    def _confirm(self, me: Candidate, office: Office, *, leadership: Leadership) -> bool:
        """Ask whether the office is held; while nobody answers it is simply not in force."""
        since = self._clock.now()
        if not self._entries.connected:
            return True
        try:
            held = perform(confirm(me, office), self._entries)
        except CoordinationError:
            return True
        if held:
            leadership.confirmed(since)
        return held

    def _resign(self, me: Candidate) -> None:
        # Who cannot be asked now removes the candidacy with the session.
        with suppress(CoordinationError, ClosedError):
            if self._entries.connected:
                perform(resign(me), self._entries, deadline=Deadline.after(_RESIGN_SECONDS))


def master_of(entries: Entries) -> Standing | None:
    """Return whom the coordinator names as master; it may have ended since, and the answer a little old."""
    return standing(entries.get(EPOCH, fresh=False))


def _apply(changes: tuple[Change, ...]) -> Steps[None]:
    yield Apply(changes)
