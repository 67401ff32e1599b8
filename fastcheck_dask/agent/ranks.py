"""What an agent does for the other ranks: says when its save failed, and marks what all have persisted."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.joint import JointCommit, Rank
from fastcheck_dask.coordination.joint_saves import JointSaves
from fastcheck_dask.coordination.rank_coordinator import RankCoordinator
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.tiers.joint_marker import JointFolder, JointMarker

log = logging.getLogger(__name__)

#: So many of the newest joint checkpoints are looked at for a marker that is missing.
_LOOK_BACK = 4


class RankDuties:
    """The duties of one rank's agent. Every method blocks, and raises nothing: a save is not lost by it.

    Parameters
    ----------
    coordinator : RankCoordinator
        Of this rank.
    location : str
        The checkpoint directory of all ranks.
    rank : int
        Number of this rank.
    """

    def __init__(self, coordinator: RankCoordinator, location: str, *, rank: int) -> None:
        self._coordinator, self._location, self._rank = coordinator, location, rank

    def gave_up(self, tag: str, token: str, reason: str) -> None:
        """Tell the other ranks that this one has no part for a save."""
        try:
            self._coordinator.give_up(tag, token=token, reason=reason)
        except FastCheckError as error:
            log.warning("the other ranks wait for save %r until their deadline: %s", tag, error)

    def persisted(self) -> None:
        """Write the markers of joint checkpoints that are complete in the object tier by now."""
        try:
            folder = JointFolder(self._location)
            commits = self._coordinator.joint_commits()[-_LOOK_BACK:]
        except FastCheckError as error:
            log.warning("joint checkpoints in %s are not marked as such: %s", self._location, error)
            return
        for commit in commits:
            try:
                folder.publish(JointMarker(**vars(commit)))
            except FastCheckError as error:
                # A part that is lost for good is no reason to leave the later ones unmarked.
                log.warning(
                    "checkpoint %r of all ranks in %s is not marked as such: %s",
                    commit.tag,
                    self._location,
                    error,
                )

    def proven_generation(self) -> int | None:
        """Return this rank's generation of the newest checkpoint that all ranks have in the object tier.

        None if there is none, or nobody knows: what is older may then be the only one that all have.
        """
        try:
            markers = JointFolder(self._location).markers()
        except FastCheckError as error:
            log.warning("nothing is removed: the joint checkpoints cannot be listed: %s", error)
            return None
        fitting = [marker for marker in markers if self._rank < marker.world_size]
        return fitting[-1].generations[self._rank] if fitting else None


def known_commits(coordinator: Coordinator, run: str) -> dict[str, Any]:
    """Return, as plain values, which checkpoints of all ranks there are, and the newest of a single process.

    Parameters
    ----------
    coordinator : Coordinator
        Any one.
    run : str
        The run of all ranks.
    """
    joint: Iterable[JointCommit] = JointSaves(coordinator.entries, run, Rank(0, 1)).commits()
    alone = coordinator.latest(run)
    return {
        "joint": [vars(commit) for commit in joint],
        "alone": None if alone is None else [alone.tag, alone.created_unix],
    }
