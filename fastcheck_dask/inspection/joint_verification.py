"""Which checkpoints a verification is of, those of several ranks included, and how it names what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import PurePosixPath

from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.ids import parse_directory_name
from fastcheck_dask.inspection.location import choose
from fastcheck_dask.inspection.ranks import (
    Joint,
    Part,
    RanksSurvey,
    newest_joint,
    rank_folders,
    rank_prefix,
    survey_ranks,
)
from fastcheck_dask.inspection.repair import Sources
from fastcheck_dask.inspection.verification import Fault, Problem, Verified, verify_rest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.joint_marker import JointFolder, path_of

#: Tags that an error names.
_SHOWN_TAGS = 8


@dataclass(frozen=True)
class Chosen:
    """What is to be verified, and what is known to be wrong before anything is read."""

    parts: tuple[Part, ...]
    problems: tuple[Problem, ...]


def choose_one(folder: CheckpointFolder, tag: str | None, *, directory: str | None = None) -> Chosen:
    """Return the checkpoint that is meant, of several ranks all its parts.

    Raises
    ------
    CheckpointNotFoundError
        If there is none; names those that there are.
    TierError
        If the store does not answer.
    """
    ranks = survey_ranks(folder, folder.store.list(""))
    committed = folder.committed()
    if directory is not None:
        return Chosen((Part(folder, choose(folder, committed, tag, directory=directory)),), ())
    own = [marker for marker in committed if tag in (None, marker.tag, marker.directory)]
    joint = newest_joint(ranks, tag, after_unix=own[-1].created_unix if own else float("-inf"))
    # Which checkpoint a damaged marker was of, nobody knows: it may have been the newest.
    damaged = _damaged(ranks, tag)
    if joint is not None:
        return Chosen(tuple(part for part in joint.parts if part is not None), damaged + _missing(joint))
    if not own and damaged:
        return Chosen((), damaged)
    if not own and ranks.joint:
        tags = ", ".join(one.marker.tag for one in reversed(ranks.joint[-_SHOWN_TAGS:]))
        raise CheckpointNotFoundError(
            f"{folder.store.location} has no checkpoint {tag!r} of all ranks; the newest tags are: {tags}"
        )
    return Chosen((Part(folder, choose(folder, committed, tag)),), damaged)


def choose_all(folder: CheckpointFolder) -> Chosen:
    """Return every committed checkpoint, in the folders of all ranks, too.

    Raises
    ------
    TierError
        If the store does not answer.
    """
    names = folder.store.list("")
    ranks = survey_ranks(folder, names)
    problems = [*verify_rest(folder), *_damaged(ranks)]
    for rank, part in rank_folders(folder, names).items():
        problems += [
            _prefixed(problem, rank_prefix(rank))
            for problem in verify_rest(part)
            if problem.fault is not Fault.DAMAGED
        ]
    for joint in ranks.joint:
        problems += _missing(joint)
    own = [Part(folder, marker) for marker in folder.committed()]
    return Chosen((*own, *ranks.parts), tuple(problems))


def each_damaged_marker(
    folder: CheckpointFolder, action: Callable[[CheckpointFolder, str, str], None]
) -> None:
    """Call an action with the folder, the directory and the full name of each damaged commit marker."""
    of_ranks = rank_folders(folder, folder.store.list(""))
    for prefix, part in [("", folder), *((rank_prefix(rank), part) for rank, part in of_ranks.items())]:
        for problem in verify_rest(part):
            directory = problem.name.rpartition("/")[2].removesuffix(".json")
            action(part, directory, prefix + problem.name)


def seen_from_above(found: Verified, part: Part) -> Verified:
    """Name what was found in a rank's folder from the location of all ranks."""
    if part.rank is None:
        return found
    problems = tuple(_prefixed(problem, part.prefix) for problem in found.problems)
    return dataclasses.replace(found, directory=part.prefix + found.directory, problems=problems)


def sources_of(part: Part, sources: Sources) -> Sources:
    """Return where else the bits of a part may be: of other locations of ranks, that rank's folder."""
    if part.rank is None:
        return sources
    folders = [JointFolder(other.store.location).folder(part.rank) for other in sources.folders]
    return dataclasses.replace(sources, folders=folders)


def repair_joint_markers(folder: CheckpointFolder) -> list[str]:
    """Write the joint markers anew that are damaged or gone, and proven by the rest; return their names.

    Raises
    ------
    TierError
        If the store does not answer, or cannot be written.
    """
    lost = survey_ranks(folder, folder.store.list("")).lost
    for marker in lost:
        JointFolder(folder.store.location).restore(marker)
    return [path_of(marker) for marker in lost]


def _damaged(ranks: RanksSurvey, tag: str | None = None) -> tuple[Problem, ...]:
    """Return the damaged markers, of one tag as far as their names tell."""
    return tuple(
        Problem(path, Fault.DAMAGED, reason, fatal=True)
        for path, reason in ranks.damaged
        if tag in (None, *(parse_directory_name(PurePosixPath(path).stem) or ())[1:])
    )


def _missing(joint: Joint) -> tuple[Problem, ...]:
    of = f"{joint.marker.tag!r} of {joint.marker.world_size} ranks cannot be restored without it"
    return tuple(
        Problem(name, Fault.MISSING, f"the part of rank {rank} is not there; {of}", fatal=True)
        for name, rank in joint.missing.items()
    )


def _prefixed(problem: Problem, prefix: str) -> Problem:
    return dataclasses.replace(problem, name=prefix + problem.name)
