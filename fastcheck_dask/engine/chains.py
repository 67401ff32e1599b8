"""Which persisted checkpoint the next one is stored against, if any. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

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


def chain_of(marker: CommitMarker, by_directory: Mapping[str, CommitMarker]) -> list[CommitMarker] | None:
    """Return a checkpoint, its base, and so on down to the whole one; None if a link is missing."""
    chain = [marker]
    while (link := chain[-1].base) is not None:
        # Bases are older than what is stored against them, so this ends.
        found = by_directory.get(link.directory)
        if found is None or found.link != link:
            return None
        chain.append(found)
    return chain


def choose_base(
    committed: Iterable[CommitMarker], policy: ChainPolicy, *, run: str, generation: int, created_unix: float
) -> CommitMarker | None:
    """Return the checkpoint against which a new one is to be stored, None if it is to be whole.

    Parameters
    ----------
    committed : iterable of CommitMarker
        Of the object tier.
    policy : ChainPolicy
        What a chain may be.
    run, generation, created_unix
        Of the new one.
    """
    markers = {m.directory: m for m in committed if m.run == run and m.generation < generation}
    if not markers:
        return None
    newest = max(markers.values(), key=lambda marker: marker.generation)
    chain = chain_of(newest, markers)
    if chain is None or len(chain) > policy.max_deltas:
        return None
    age_hours = (created_unix - chain[-1].created_unix) / 3600
    # Negative: a clock was set; how old the whole one is, nobody knows.
    return newest if 0 <= age_hours < policy.full_hours else None
