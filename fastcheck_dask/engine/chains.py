"""Which persisted checkpoint the next one is stored against, if any. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from fastcheck_dask.config import Settings
from fastcheck_dask.tiers.commit_marker import CommitMarker

#: Until a checkpoint is written whole again: deltas at most, and hours at most.
MAX_DELTAS = 3
FULL_HOURS = 24.0


@dataclass(frozen=True)
class ChainPolicy:
    """How long the chains of the object tier get."""

    #: Most deltas that follow a whole checkpoint; 0: each one is whole.
    max_deltas: int = MAX_DELTAS
    #: Age of the whole one, in hours, from which the next is whole, too.
    full_hours: float = FULL_HOURS
    #: To how many other checkpoints one may refer, where it has no base, for chunks that did not change; 0:
    #: then it is whole.
    max_references: int = 0

    @classmethod
    def of(cls, settings: Settings) -> ChainPolicy:
        """Return what the settings say."""
        return cls(settings.max_deltas, settings.full_hours, settings.max_references)


def chain_of(marker: CommitMarker, by_directory: Mapping[str, CommitMarker]) -> list[CommitMarker] | None:
    """Return a checkpoint, its base, and so on down to one that has none; None if a link is missing."""
    chain = [marker]
    while (link := chain[-1].base) is not None:
        # Bases are older than what is stored against them, so this ends.
        found = by_directory.get(link.directory)
        if found is None or found.link != link:
            return None
        chain.append(found)
    return chain


def needed_of(marker: CommitMarker, by_directory: Mapping[str, CommitMarker]) -> list[CommitMarker]:
    """Return a checkpoint and all that it needs in its own location, as far as it is there."""
    found: dict[str, CommitMarker] = {}
    waiting = [marker]
    while waiting:
        # What is needed is older than what needs it, so this ends.
        at = waiting.pop()
        if at.directory in found:
            continue
        found[at.directory] = at
        links = [link for link in at.needs.links if link.location is None]
        waiting += [by_directory[link.directory] for link in links if link.directory in by_directory]
    return list(found.values())


def newest_before(committed: Iterable[CommitMarker], *, run: str, generation: int) -> CommitMarker | None:
    """Return the newest checkpoint of a run that is older than a generation; None if there is none."""
    markers = [m for m in committed if m.run == run and m.generation < generation]
    return max(markers, key=lambda marker: marker.generation, default=None)


def choose_base(
    committed: Iterable[CommitMarker], policy: ChainPolicy, *, run: str, generation: int, created_unix: float
) -> CommitMarker | None:
    """Return the checkpoint against which a new one is to be stored, None if it is to have no deltas.

    Parameters
    ----------
    committed : iterable of CommitMarker
        Of the object tier.
    policy : ChainPolicy
        What a chain may be.
    run, generation, created_unix
        Of the new one.
    """
    known = list(committed)
    newest = newest_before(known, run=run, generation=generation)
    if newest is None:
        return None
    chain = chain_of(newest, {m.directory: m for m in known if m.run == run})
    if chain is None or len(chain) > policy.max_deltas:
        return None
    age_hours = (created_unix - chain[-1].created_unix) / 3600
    # Negative: a clock was set; how old the whole one is, nobody knows.
    return newest if 0 <= age_hours < policy.full_hours else None
