"""Which checkpoints a verification is of, those of several ranks included, and how it names what it finds."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import PurePosixPath

from fastcheck_dask.errors import CheckpointNotFoundError, FastCheckError
from fastcheck_dask.ids import is_url, joined, parse_directory_name
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
from fastcheck_dask.inspection.verification import Fault, Problem, Verified, as_problem, verify_rest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, marker_path
from fastcheck_dask.tiers.joint_marker import JointFolder, copy_of, path_of

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
    listing = list(folder.store.listing(""))
    ranks = survey_ranks(folder, [stored.path for stored in listing])
    survey = folder.survey()
    committed, rest = list(survey.committed), verify_rest(folder, survey=survey, listing=listing)
    if directory is not None:
        if meant := tuple(_of_one(rest, (), directory)):
            return Chosen((), meant)
        return _with_roots([Part(folder, choose(folder, committed, tag, directory=directory))], ())
    own = [marker for marker in committed if tag in (None, marker.tag, marker.directory)]
    joint = newest_joint(ranks, tag, after_unix=own[-1].created_unix if own else float("-inf"))
    # Which checkpoint a damaged marker was of, nobody knows: it may have been the newest.
    damaged = _damaged(ranks, tag) + tuple(_of_one(rest, own, tag))
    if joint is not None:
        return _with_roots(
            (part for part in joint.parts if part is not None), damaged + _harmed(folder, joint)
        )
    if not own and damaged:
        return Chosen((), damaged)
    if not own and ranks.joint:
        tags = ", ".join(one.marker.tag for one in reversed(ranks.joint[-_SHOWN_TAGS:]))
        raise CheckpointNotFoundError(
            f"{folder.store.location} has no checkpoint {tag!r} of all ranks; the newest tags are: {tags}"
        )
    return _with_roots([Part(folder, choose(folder, committed, tag))], damaged)


def choose_all(folder: CheckpointFolder) -> Chosen:
    """Return every committed checkpoint, in the folders of all ranks, too.

    Raises
    ------
    TierError
        If the store does not answer.
    """
    listing = list(folder.store.listing(""))
    names = [stored.path for stored in listing]
    ranks, survey = survey_ranks(folder, names), folder.survey()
    problems = [*verify_rest(folder, survey=survey, listing=listing), *_damaged(ranks)]
    for rank, part in rank_folders(folder, names).items():
        problems += [
            _prefixed(problem, rank_prefix(rank))
            for problem in verify_rest(part)
            if problem.fault is not Fault.DAMAGED
        ]
    for joint in ranks.joint:
        problems += _harmed(folder, joint)
    own = [Part(folder, marker) for marker in survey.committed]
    return _with_roots((*own, *ranks.parts), tuple(problems))


def _with_roots(parts: Iterable[Part], problems: tuple[Problem, ...]) -> Chosen:
    """Choose also what parts need at the roots of groups, before them: it is nobody else's."""
    found: list[Part] = []
    known: dict[str, Problem | None] = {}
    for part in parts:
        for link in part.marker.refs:
            if link.location is None or link.place in known:
                continue
            known[link.place] = None
            try:
                there, marker = part.folder.linked(link, by=part.marker.called)
                found.append(Part(there, marker, root=link.location))
            except FastCheckError as error:
                name = joined(link.location, marker_path(link.directory))
                known[link.place] = as_problem(name, error, fatal=True)
        found.append(part)
    return Chosen(tuple(found), problems + tuple(filter(None, known.values())))


def _of_one(problems: Iterable[Problem], own: Sequence[CommitMarker], tag: str | None) -> Iterable[Problem]:
    """Return the damaged and lost markers that may be of the checkpoint that is meant."""
    newest = own[-1].generation if own else -1
    for problem in problems:
        directory = PurePosixPath(problem.name).stem
        parsed = parse_directory_name(directory)
        if parsed is not None and (parsed[0] > newest if tag is None else tag in (directory, parsed[1])):
            yield problem


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
    """Name what was found in a rank's folder, or at a root, from the location of all."""
    if part.rank is None and part.root is None:
        return found
    problems = tuple(dataclasses.replace(p, name=_named(part, p.name)) for p in found.problems)
    return dataclasses.replace(found, directory=part.named(found.directory), problems=problems)


def _named(part: Part, name: str) -> str:
    """Return the name of an object of a part; what lies in another location has its full name already."""
    return name if name.startswith("/") or is_url(name) else part.named(name)


def sources_of(part: Part, sources: Sources) -> Sources:
    """Return where else the bits of a part may be: of other locations of ranks, that rank's folder."""
    if part.rank is None:
        return sources
    folders = [JointFolder(other.store.location).folder(part.rank) for other in sources.folders]
    return dataclasses.replace(sources, folders=folders)


def repair_joint_markers(folder: CheckpointFolder) -> list[str]:
    """Write the joint markers and their copies anew that are damaged or gone, and proven by the rest.

    Those of earlier releases get the digest and the copy that they lack.

    Returns
    -------
    list of str
        Their names.

    Raises
    ------
    TierError
        If the store does not answer, or cannot be written.
    """
    ranks = survey_ranks(folder, folder.store.list(""))
    whole = JointFolder(folder.store.location)
    for marker in ranks.lost:
        whole.restore(marker)
    settled = [path for one in ranks.joint if not one.lacking for path in whole.settle(one.by_parts)]
    return [*map(path_of, ranks.lost), *settled]


def _damaged(ranks: RanksSurvey, tag: str | None = None) -> tuple[Problem, ...]:
    """Return the damaged markers, of one tag as far as their names tell."""
    return tuple(
        Problem(path, Fault.DAMAGED, reason, fatal=True)
        for path, reason in ranks.damaged
        if tag in (None, *(parse_directory_name(PurePosixPath(path).stem) or ())[1:])
    )


def _harmed(folder: CheckpointFolder, joint: Joint) -> tuple[Problem, ...]:
    """Return what is missing of a checkpoint of all ranks, or else what is wrong with its joint marker."""
    if joint.lacking:
        return _missing(joint)
    marker, found = joint.marker, []
    if joint.by_parts != marker:
        wanted = joint.by_parts.created_unix
        detail = f"created_unix is {marker.created_unix!r}, by the ranks' own markers {wanted!r}"
        found.append(Problem(path_of(marker), Fault.DAMAGED, detail, fatal=False))
    elif (fault := JointFolder(folder.store.location).copy_fault(marker)) is not None:
        detail = f"{fault}; it is the copy of {path_of(marker)}, from which that could not be written anew"
        found.append(Problem(copy_of(marker), Fault.DAMAGED, detail, fatal=False))
    return tuple(found)


def _missing(joint: Joint) -> tuple[Problem, ...]:
    of = f"{joint.marker.tag!r} of {joint.marker.world_size} ranks cannot be restored without it"
    return tuple(
        Problem(name, Fault.MISSING, f"the part of rank {rank} is not there; {of}", fatal=True)
        for name, rank in joint.missing.items()
    )


def _prefixed(problem: Problem, prefix: str) -> Problem:
    return dataclasses.replace(problem, name=prefix + problem.name)
