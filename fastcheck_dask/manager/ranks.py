"""One rank among those that train together: who it is, and which checkpoint all of them load."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.coordination.joint import Rank, named, run_of_rank
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    ConfigError,
    FastCheckError,
    LayoutError,
    UnrecoverableError,
)
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker, location_of_rank
from fastcheck_dask.tiers.object_store import open_store

log = logging.getLogger(__name__)

_LISTED = 8


@dataclass(frozen=True)
class Place:
    """Where a rank saves, and under which run."""

    me: Rank
    #: Of all ranks.
    whole_run: str
    whole_location: str

    @property
    def run(self) -> str:
        """The run under which this process saves."""
        return self.whole_run if self.alone else run_of_rank(self.whole_run, self.me.rank)

    @property
    def location(self) -> str:
        """Where this process' checkpoints lie in the object tier."""
        return self.whole_location if self.alone else location_of_rank(self.whole_location, self.me.rank)

    @property
    def alone(self) -> bool:
        """Whether this process is the only one."""
        return self.me.world_size == 1

    @property
    def message(self) -> dict[str, Any] | None:
        """What the agent is told of it, None if there is nothing to tell."""
        if self.alone:
            return None
        return {
            "run": self.whole_run,
            "location": self.whole_location,
            "rank": self.me.rank,
            "world_size": self.me.world_size,
        }


def parse_rank(rank: object, world_size: object) -> Rank:
    """Return who this process is; ``rank="auto"`` asks the environment that torchrun makes.

    Raises
    ------
    ConfigError
        If only one of the two is given, they do not fit, or ``"auto"`` finds nothing.
    """
    if rank == "auto":
        rank, found = _from_environment("RANK"), _from_environment("WORLD_SIZE")
        if world_size is not None and world_size != found:
            raise ConfigError(f"world_size={world_size!r} was given, and WORLD_SIZE={found} is set")
        world_size = found
    if rank is None and world_size is None:
        return Rank(0, 1)
    if rank is None or world_size is None:
        raise ConfigError(
            f"rank and world_size go together (or give rank='auto'); got rank={rank!r}, "
            f"world_size={world_size!r}"
        )
    if not isinstance(rank, int) or not isinstance(world_size, int):
        raise ConfigError(f"rank and world_size must be whole numbers; got {rank!r} and {world_size!r}")
    return Rank(rank, world_size)


def _from_environment(name: str) -> int:
    text = os.environ.get(name, "")
    if not text.isdecimal():
        raise ConfigError(f"rank='auto' needs RANK and WORLD_SIZE, as torchrun sets them; {name} is {text!r}")
    return int(text)


class Known:
    """The checkpoints of a run, whoever saved them: all ranks of some world size, or a single process.

    Parameters
    ----------
    place : Place
        Of this process.
    commits : mapping
        What the coordinator knows, see `agent.ranks.known_commits`.
    """

    def __init__(self, place: Place, commits: Mapping[str, Any]) -> None:
        self._place = place
        folder = JointFolder(place.whole_location)
        #: By number.
        self.joint = merged((_marker(fields) for fields in commits["joint"]), folder)
        #: Tag and time of what single processes saved, oldest first.
        self.alone = sorted(_alone(place.whole_location, commits["alone"]), key=lambda one: one[1])

    def choose(self, tag: str | None) -> JointMarker | None:
        """Return the checkpoint that every rank loads, None if there never was one.

        Raises
        ------
        LayoutError
            If it was saved with another world size.
        CheckpointNotFoundError
            If there is none with that tag.
        """
        joint = [one for one in self.joint if tag in (None, one.tag)]
        alone = [one for one in self.alone if tag in (None, one[0])]
        newest = joint[-1] if joint else None
        if alone and (newest is None or alone[-1][1] > newest.created_unix):
            if self._place.alone:
                return None
            raise self._misfit(alone[-1][0], 1)
        if newest is None:
            if tag is not None and not self._place.alone:
                raise CheckpointNotFoundError(
                    f"no checkpoint has the tag {tag!r}; there are: {self._listed()}"
                )
            return None
        if newest.world_size != self._place.me.world_size:
            raise self._misfit(newest.tag, newest.world_size)
        return newest

    def older(self, than: JointMarker) -> str:
        """Return advice for when a part of a checkpoint cannot be had."""
        fitting = [
            one for one in self.joint if one.world_size == than.world_size and one.number < than.number
        ]
        if not fitting:
            return "there is no older checkpoint of all ranks"
        return (
            f"the next older checkpoint of all ranks is loaded by load(tag={fitting[-1].tag!r}) on all ranks"
        )

    def _misfit(self, tag: str, world_size: int) -> LayoutError:
        me = self._place.me
        return LayoutError(
            f"checkpoint {tag!r} in {self._place.whole_location} was saved with world_size={world_size}, and "
            f"this is rank {me.rank} of world_size={me.world_size}: start as many ranks, or load another tag "
            f"of the same world_size on all ranks; there are: {self._listed()}"
        )

    def _listed(self) -> str:
        found = [(one.created_unix, one.tag, one.world_size) for one in self.joint]
        found += [(created, tag, 1) for tag, created in self.alone]
        newest = sorted(found, reverse=True)[:_LISTED]
        return ", ".join(f"{tag!r} (world_size={size})" for _, tag, size in newest) or "none"


def merged(known: Iterable[JointMarker], folder: JointFolder) -> list[JointMarker]:
    """Return the joint checkpoints that the coordinator knows, or that the object tier has complete.

    A joint marker that is damaged or gone, and proven by the rest, is written anew.
    """
    found = {(one.number, one.tokens): one for one in known}
    sound = []
    for marker in folder.markers():
        if (marker.number, marker.tokens) in found:
            sound.append(marker)
            continue
        try:
            lacking = folder.lacking(marker)
        except FastCheckError as error:
            log.warning("checkpoint %r of all ranks is left out: %s", marker.tag, error)
            continue
        if lacking:
            log.warning("checkpoint %r of all ranks is left out: %s lack it", marker.tag, named(lacking))
        else:
            found[marker.number, marker.tokens] = marker
            sound.append(marker)
    for marker in folder.lost(sound):
        found[marker.number, marker.tokens] = marker
        _restore(marker, folder)
    return sorted(found.values(), key=lambda one: one.number)


def _restore(marker: JointMarker, folder: JointFolder) -> None:
    """Write it anew; who loads may have no right to."""
    try:
        folder.restore(marker)
        log.warning("the joint marker of %r in %s is written anew", marker.tag, folder.location)
    except FastCheckError as error:
        log.warning("the joint marker of %r is not written anew: %s", marker.tag, error)


def refuse_unproved(place: Place, has_parts: bool) -> None:
    """Do not let training start anew where this rank has parts of checkpoints that nobody knows."""
    if has_parts:
        raise UnrecoverableError(
            f"the run (rank {place.me.rank} has parts of checkpoints, and neither the coordinator nor "
            f"{place.whole_location} knows one that all ranks have)",
            (
                "the coordinator's data are lost, or another coordinator was given; bring them back, or move "
                "the ranks' folders and the local tier away to start anew",
            ),
        )


def _alone(location: str, latest: Sequence[Any] | None) -> list[tuple[str, float]]:
    found = [] if latest is None else [(str(latest[0]), float(latest[1]))]
    markers = CheckpointFolder(open_store(location)).committed()
    return found + [(marker.tag, marker.created_unix) for marker in markers]


def _marker(fields: Mapping[str, Any]) -> JointMarker:
    lists = {name: tuple(fields[name]) for name in ("tokens", "generations")}
    return JointMarker(**{**fields, **lists})
