"""Checkpoints of several ranks: which part of each lies in which rank's folder."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace

from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError
from fastcheck_dask.ids import directory_name, joined
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, DamagedMarker, marker_path
from fastcheck_dask.tiers.joint_marker import (
    JointFolder,
    JointMarker,
    location_of_rank,
    path_of,
    rank_of_location,
)

_PROVEN = (
    "its copy and every rank's own marker prove what it said: `fastcheck verify --repair`, or the next load, "
    "writes it anew"
)


@dataclass(frozen=True)
class Part:
    """A committed checkpoint: of a location of several ranks, the part of one."""

    folder: CheckpointFolder
    marker: CommitMarker
    #: None in a location of a single process.
    rank: int | None = None
    #: Where it lies, if that is at the root of a group.
    root: str | None = None

    @property
    def prefix(self) -> str:
        """What stands before its names, seen from the location of all ranks."""
        return "" if self.rank is None else rank_prefix(self.rank)

    def named(self, name: str) -> str:
        """Return how one of its objects is called: from the location of all ranks, at a root in full."""
        return self.prefix + name if self.root is None else joined(self.root, name)


@dataclass(frozen=True)
class Joint:
    """A checkpoint of all ranks, and what there is of it."""

    marker: JointMarker
    #: By rank; None where the folder of the rank does not have it.
    parts: tuple[Part | None, ...]

    @property
    def lacking(self) -> tuple[int, ...]:
        """The ranks whose part is not there."""
        return tuple(rank for rank, part in enumerate(self.parts) if part is None)

    @property
    def by_parts(self) -> JointMarker:
        """The marker as its parts, which are all there, say that it has to be."""
        created = max(part.marker.created_unix for part in self.parts if part is not None)
        return replace(self.marker, created_unix=created)

    @property
    def problem(self) -> str | None:
        """Say which ranks' parts are not there; None if all are."""
        if not self.lacking:
            return None
        more = f" and {len(self.lacking) - 1} more" if len(self.lacking) > 1 else ""
        there = f"{len(self.parts) - len(self.lacking)} of {len(self.parts)} ranks have theirs"
        return f"the part of rank {self.lacking[0]}{more} is not there; {there}"

    @property
    def missing(self) -> dict[str, int]:
        """The commit markers that are not there, by name, each with its rank."""
        found = {}
        for rank in self.lacking:
            directory = directory_name(self.marker.generations[rank], self.marker.tag)
            found[rank_prefix(rank) + marker_path(directory)] = rank
        return found


@dataclass(frozen=True)
class RanksSurvey:
    """What lies in the folders of ranks."""

    #: By number.
    joint: tuple[Joint, ...]
    #: Committed by a rank, and of no checkpoint of all ranks: a rank died, or is not that far yet.
    unjoined: tuple[Part, ...]
    #: Joint markers and the ranks' commit markers that cannot be read.
    damaged: tuple[DamagedMarker, ...]
    #: Joint markers that are damaged or gone, and proven by the rest.
    lost: tuple[JointMarker, ...] = ()

    @property
    def parts(self) -> list[Part]:
        """Everything that is committed in a rank's folder, by rank and generation."""
        joined = [part for one in self.joint for part in one.parts if part is not None]
        return sorted([*joined, *self.unjoined], key=lambda part: (part.rank or 0, part.marker.generation))


def rank_folders(folder: CheckpointFolder, names: Iterable[str]) -> dict[int, CheckpointFolder]:
    """Return the folders of ranks in a location by rank, sorted; `names` is everything that lies there."""
    whole = JointFolder(folder.store.location)
    found = {rank_of_location(name.partition("/")[0]) for name in names}
    return {rank: whole.folder(rank) for rank in sorted(rank for rank in found if rank is not None)}


def rank_prefix(rank: int) -> str:
    """Return what stands before the names of a rank's objects.

    >>> rank_prefix(3)
    'rank-00003/'
    """
    return location_of_rank("", rank).removeprefix("/") + "/"


def survey_ranks(folder: CheckpointFolder, names: Iterable[str]) -> RanksSurvey:
    """Read the markers of a location of several ranks; all is empty for a location of a single process.

    Parameters
    ----------
    folder : CheckpointFolder
        The location of all ranks.
    names : iterable of str
        Everything that lies there.

    Raises
    ------
    TierError
        If the store does not answer.
    """
    whole = JointFolder(folder.store.location)
    survey = whole.survey()
    damaged: list[DamagedMarker] = []
    by_token: dict[tuple[int, str], Part] = {}
    for rank, part in rank_folders(folder, names).items():
        found = part.survey()
        damaged += [DamagedMarker(rank_prefix(rank) + path, reason) for path, reason in found.damaged]
        by_token |= {(rank, marker.token): Part(part, marker, rank) for marker in found.committed}
    joint = [
        Joint(marker, tuple(by_token.get((rank, token)) for rank, token in enumerate(marker.tokens)))
        for marker in survey.markers
    ]
    lost = whole.lost(one.marker for one in joint if not one.lacking)
    of_joint = {(part.rank, part.marker.token) for one in joint for part in one.parts if part is not None}
    unjoined = tuple(part for key, part in by_token.items() if key not in of_joint)
    of_all = _damaged(survey.damaged, lost)
    return RanksSurvey(tuple(_there(joint)), unjoined, (*of_all, *damaged), tuple(lost))


def _damaged(unreadable: Iterable[DamagedMarker], lost: Iterable[JointMarker]) -> list[DamagedMarker]:
    """Return the joint markers that are not as they were written, and say which of them can be again."""
    reasons = dict(unreadable)
    for path in map(path_of, lost):
        reasons[path] = f"{reasons.get(path, 'it is gone, or names other parts')}; {_PROVEN}"
    return [DamagedMarker(path, reason) for path, reason in sorted(reasons.items())]


def _there(joint: Sequence[Joint]) -> Sequence[Joint]:
    """Leave out the checkpoints that retention removed: no rank has a part, and a newer one is there."""
    some = [number for number, one in enumerate(joint) if any(one.parts)]
    newest = some[-1] if some else -1
    return [one for number, one in enumerate(joint) if any(one.parts) or number > newest]


def newest_joint(survey: RanksSurvey, tag: str | None, *, after_unix: float = float("-inf")) -> Joint | None:
    """Return the newest checkpoint of all ranks, of a tag if one is given; None if there is none so new."""
    fitting = [one for one in survey.joint if tag in (None, one.marker.tag)]
    return fitting[-1] if fitting and fitting[-1].marker.created_unix > after_unix else None


def rank_folder(folder: CheckpointFolder, rank: int) -> tuple[CheckpointFolder, list[CommitMarker]]:
    """Return a rank's folder, and the markers of its parts of checkpoints of all ranks, oldest first.

    Raises
    ------
    ConfigError
        If no ranks save there, or none with that number.
    CheckpointNotFoundError
        If its folder has no part of any.
    """
    location = folder.store.location
    whole = JointFolder(location)
    markers = whole.markers()
    if not markers:
        raise ConfigError(f"{location} has no checkpoint of several ranks: leave the rank out")
    tokens = {marker.tokens[rank] for marker in markers if rank < marker.world_size}
    if not tokens:
        size = max(marker.world_size for marker in markers)
        raise ConfigError(f"{location} has checkpoints of ranks 0 to {size - 1}; there is no rank {rank}")
    part = whole.folder(rank)
    committed = [marker for marker in part.committed() if marker.token in tokens]
    if not committed:
        raise CheckpointNotFoundError(
            f"{part.store.location} has no part of any checkpoint of all ranks; `fastcheck ls {location}` "
            "shows what there is"
        )
    return part, committed
