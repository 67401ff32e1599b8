"""Make checkpoints whole, those of several ranks in all their folders."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fastcheck_dask.engine.compact import compact_chosen
from fastcheck_dask.errors import CheckpointNotFoundError, CorruptDataError
from fastcheck_dask.inspection.joint_verification import choose_one
from fastcheck_dask.inspection.ranks import Part, survey_ranks
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder


@dataclass(frozen=True)
class CompactedPart:
    """What became of one checkpoint, of several ranks of the part of one."""

    #: None in a location of a single process.
    rank: int | None
    generation: int
    tag: str
    #: Of the checkpoint.
    raw_bytes: int
    #: Chunks that were written; 0 if it was whole already.
    chunks: int
    written_bytes: int


def parts_to_compact(
    folder: CheckpointFolder, tag: str | None, *, directory: str | None = None
) -> tuple[Part, ...]:
    """Return what is meant: of a tag the newest checkpoint, of several ranks all its parts; else everything.

    Raises
    ------
    CheckpointNotFoundError
        If there is none.
    CorruptDataError
        If a rank has no part of it, or a marker of the tag cannot be read.
    """
    if tag is None and directory is None:
        ranks = survey_ranks(folder, folder.store.list(""))
        parts = (*(Part(folder, marker) for marker in folder.committed()), *ranks.parts)
        if not parts:
            raise CheckpointNotFoundError(f"{folder.store.location} has no committed checkpoint")
        return parts
    chosen = choose_one(folder, tag, directory=directory)
    if chosen.problems:
        first = chosen.problems[0]
        raise CorruptDataError(f"{first.name} in {folder.store.location}: {first.detail}")
    return chosen.parts


def compact_parts(parts: Sequence[Part], *, scheduler: str | None = None) -> Iterator[CompactedPart]:
    """Make them whole, one after the other; see `engine.compact`.

    Yields
    ------
    CompactedPart
        After each.
    """
    done = compact_chosen([(part.folder, part.marker) for part in parts], scheduler=scheduler)
    for part, found in zip(parts, done, strict=True):
        yield CompactedPart(
            part.rank,
            found.generation,
            found.tag,
            part.marker.raw_bytes,
            found.chunks,
            found.written_bytes,
        )
