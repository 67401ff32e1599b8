"""Why the object tier does not have the newest checkpoints of a run yet, for who looks at the cluster.

::

    delays/<run>   the generation that could not be persisted, since when it is tried, and the last error
"""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Final

from fastcheck_dask.coordination.entries import Delete, Entries, EntryConflictError, OutcomeUnknownError
from fastcheck_dask.coordination.runs import publish
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.ids import check_name

#: Entries of the delays, by run.
DELAYS: Final = "delays"
#: The whole error is in the log of who tried.
_CHARACTERS: Final = 500

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Delay:
    """A checkpoint that could not be persisted, and is tried again, or left to a newer one."""

    generation: int
    tag: str
    #: Since when nothing of the run was persisted that was to be, in seconds since 1970.
    since_unix: float
    reason: str

    def to_bytes(self) -> bytes:
        """Return it as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> Delay:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped."""
        try:
            found = json.loads(data)
            return cls(
                int(found["generation"]),
                str(found["tag"]),
                float(found["since_unix"]),
                str(found["reason"]),
            )
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise UnknownFormatError(f"a delay of {len(data)} bytes cannot be read: {error!r}") from error


def note_delay(
    entries: Entries, run: str, generation: int, tag: str, reason: str, *, now_unix: float
) -> None:
    """Say why a generation could not be persisted. Idempotent: the same again writes nothing.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """
    before = read_delays(entries, run)[0]
    since = now_unix if before is None else before.since_unix
    publish(entries, _path(run), Delay(generation, tag, since, reason[:_CHARACTERS]).to_bytes())


def forget_delay(entries: Entries, run: str) -> None:
    """Say that the object tier has what it is to have. Idempotent; raises as :func:`note_delay`."""
    while (found := entries.get(_path(run))) is not None:
        try:
            entries.apply(Delete(_path(run), found.version))
        except (EntryConflictError, OutcomeUnknownError) as error:
            logger.debug("delay of run %s: %s", run, error)


def read_delays(entries: Entries, *runs: str) -> tuple[Delay | None, ...]:
    """Return what keeps each of some runs from the object tier; None where nothing does, or is readable."""
    return tuple(
        None if entry is None else _readable(run, entry.value)
        for run, entry in zip(runs, entries.get_many(*map(_path, runs)), strict=True)
    )


def _readable(run: str, data: bytes) -> Delay | None:
    try:
        return Delay.from_bytes(data)
    except UnknownFormatError as error:
        logger.warning("run %s: %s", run, error)
        return None


def _path(run: str) -> str:
    return f"{DELAYS}/{check_name(run, 'run')}"
