"""Leases of runs: a run that nobody renews gives its place in the nodes' memory up, after a long while.

The owner of a run renews by writing one entry; nobody compares clocks of two machines: the master sees that
the entry's version stays the same, by its own monotonic clock, and starts counting anew when another master
takes over. So a lease can only last longer than was asked for, never shorter.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.entries import (
    Create,
    Entries,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.ids import check_name

#: Long enough to outlive the replacement of a machine and the start of the next training process.
DEFAULT_LEASE_SECONDS: Final = 3600.0
#: An owner renews this many times within one lease: some renewals may fail.
RENEWALS_PER_LEASE: Final = 4
#: Entries of the leases, by run.
LEASES: Final = "leases"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class LeaseTerms:
    """What an owner wrote: how long its run shall be kept without another sign of life."""

    seconds: float

    def to_bytes(self) -> bytes:
        """Return the terms as JSON."""
        return json.dumps({"seconds": self.seconds}).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> LeaseTerms:
        """Undo :meth:`to_bytes`; what cannot be read counts as the default, so that nothing ends early."""
        try:
            seconds = json.loads(data)["seconds"]
        except (ValueError, TypeError, KeyError):
            return cls(DEFAULT_LEASE_SECONDS)
        usable = isinstance(seconds, int | float) and 0 < seconds < float("inf")
        return cls(float(seconds) if usable else DEFAULT_LEASE_SECONDS)


def lease_path(run: str) -> str:
    """Return where the lease of a run stands."""
    return f"{LEASES}/{check_name(run, 'run')}"


def renew(entries: Entries, run: str, seconds: float) -> None:
    """Renew the lease of a run, or begin it.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached; a renewal whose answer was lost counts as done, since the next
        one comes long before the lease ends.
    """
    path, data = lease_path(run), LeaseTerms(seconds).to_bytes()
    try:
        try:
            entries.apply(Write(path, data, None))
        except EntryConflictError:
            entries.apply(Create(path, data))
    except (EntryConflictError, OutcomeUnknownError) as error:
        logger.debug("lease of run %s: %s", run, error)


@dataclass(frozen=True)
class _Seen:
    version: int
    since: float


class LeaseWatch:
    """Which leases have ended, as one master sees it. Belongs to one thread and one leadership.

    Parameters
    ----------
    clock : Clock
        Monotonic.
    """

    def __init__(self, clock: Clock = SYSTEM_CLOCK) -> None:
        self._clock = clock
        self._seen: dict[str, _Seen] = {}

    def ended(self, read: Callable[[], Mapping[str, Entry]]) -> dict[str, Entry]:
        """Say which of the leases have ended.

        Parameters
        ----------
        read : callable
            Returns the lease entries by run, as they are when it is called (:func:`read_leases`).

        Returns
        -------
        dict of str to Entry
            Those whose version was seen to stay the same for as long as their terms say. Whoever ends one
            checks that version once more, in the same transaction.
        """
        # Before the read: what is renewed while this process is stopped in between is seen as renewed.
        now = self._clock.now()
        before, self._seen = self._seen, {}
        found = {}
        for run, entry in read().items():
            seen = before.get(run)
            if seen is None or seen.version != entry.version:
                # After the read: it may have taken long, and the renewal may be as young as its end.
                seen = _Seen(entry.version, self._clock.now())
            self._seen[run] = seen
            if now - seen.since >= LeaseTerms.from_bytes(entry.value).seconds:
                found[run] = entry
        return found


def read_leases(entries: Entries) -> dict[str, Entry]:
    """Return the lease entries by run."""
    runs = entries.names(LEASES)
    found = entries.get_many(*(f"{LEASES}/{run}" for run in runs))
    return {run: entry for run, entry in zip(runs, found, strict=True) if entry is not None}


class LeaseRenewer:
    """Renews a lease in time whenever it is asked to; for the owner's side. Belongs to one thread.

    Parameters
    ----------
    renew : callable
        Writes the renewal; `CoordinationError` means try again at the next call.
    seconds : float
        The lease.
    clock : Clock
        Monotonic.
    """

    def __init__(self, renew: Callable[[], None], seconds: float, clock: Clock = SYSTEM_CLOCK) -> None:
        self._renew, self._clock = renew, clock
        self.interval_seconds = seconds / RENEWALS_PER_LEASE
        self._done_at: float | None = None

    @property
    def due(self) -> bool:
        """Whether it is time to renew."""
        return self._done_at is None or self._clock.now() - self._done_at >= self.interval_seconds

    def tick(self) -> None:
        """Renew if it is due; a coordinator that is away is told in the log and asked again next time."""
        if not self.due:
            return
        started = self._clock.now()
        try:
            self._renew()
        except CoordinationError as error:
            logger.warning("the lease could not be renewed: %s", error)
        else:
            self._done_at = started
