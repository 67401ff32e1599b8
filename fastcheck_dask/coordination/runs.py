"""What a run tells about itself, so that the master can finish its work when the trainer is gone."""

from __future__ import annotations

import json
import logging
from dataclasses import asdict, dataclass
from typing import Final

from fastcheck_dask.coordination.entries import (
    Create,
    Entries,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.ids import check_name

#: Entries of the descriptions, by run.
DESCRIPTIONS: Final = "descriptions"

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class RunDescription:
    """Where a run's object tier lies, and what shall become of its checkpoints without it."""

    #: Of the object tier, as the storage nodes open it.
    location: str
    #: Each k-th generation goes there, and the newest one when the run ends; 0: none.
    persist_every: int
    #: Rules by which older ones go when a newer one is complete, as `engine.retention` writes them.
    keep: str = ""
    #: What lies elsewhere, as `engine.roots` writes it; empty: nothing.
    groups: str = ""

    def to_bytes(self) -> bytes:
        """Return the description as canonical JSON."""
        return json.dumps(asdict(self), sort_keys=True, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> RunDescription:
        """Undo :meth:`to_bytes`; fields that this version does not know are dropped."""
        try:
            found = json.loads(data)
            location, persist_every = found["location"], found["persist_every"]
            keep, groups = found.get("keep", ""), found.get("groups", "")
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise UnknownFormatError(f"description of a run cannot be read: {error!r}") from error
        texts = all(isinstance(text, str) for text in (location, keep, groups))
        if not texts or type(persist_every) is not int:
            raise UnknownFormatError(f"description of a run has a field of the wrong type: {found!r:.200}")
        return cls(location, persist_every, keep, groups)


def describe(entries: Entries, run: str, description: RunDescription) -> None:
    """Say what a run is; its owner does so before the first save. Idempotent.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached.
    """
    publish(entries, f"{DESCRIPTIONS}/{check_name(run, 'run')}", description.to_bytes())


def publish(entries: Entries, path: str, data: bytes) -> None:
    """Have an entry say something, whatever it said before; nothing is written if it says so already."""
    while True:
        found = entries.get(path)
        if found is not None and found.value == data:
            return
        try:
            entries.apply(Create(path, data) if found is None else Write(path, data, found.version))
        except (EntryConflictError, OutcomeUnknownError) as error:
            logger.debug("%s: %s", path, error)


def described_runs(entries: Entries) -> dict[str, RunDescription]:
    """Return the descriptions by run; one that cannot be read is left out and named in the log."""
    runs = entries.names(DESCRIPTIONS)
    found = {}
    for run, entry in zip(runs, entries.get_many(*(f"{DESCRIPTIONS}/{run}" for run in runs)), strict=True):
        try:
            if entry is not None:
                found[run] = RunDescription.from_bytes(entry.value)
        except UnknownFormatError as error:
            logger.warning("run %s is left alone: %s", run, error)
    return found
