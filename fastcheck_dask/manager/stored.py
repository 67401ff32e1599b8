"""The committed checkpoints of a manager: which there are, where they lie, and how one is brought back."""

from __future__ import annotations

import logging

from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.candidates import tags_of
from fastcheck_dask.engine.recover import Into, Recovered, Recovery
from fastcheck_dask.errors import (
    ConfigError,
    CoordinationError,
    CorruptDataError,
    FastCheckError,
    ShardUnavailableError,
    TierError,
    UnrecoverableError,
)
from fastcheck_dask.ids import joined
from fastcheck_dask.manager.agent_link import AgentLink
from fastcheck_dask.manager.agents import Agents
from fastcheck_dask.manager.ranks import Known, Place, refuse_unproved
from fastcheck_dask.manager.scheduler import run_apart
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier, SlotState
from fastcheck_dask.tiers.peer import clients_for

log = logging.getLogger(__name__)


class Stored:
    """What a run has committed, as its manager sees it. The caller is alone with the slots.

    Parameters
    ----------
    place : Place
        The run and, if there are several, the rank.
    agents : Agents
        Who knows the commits, and is offered what was loaded as delta base.
    local : LocalTier
    folder : CheckpointFolder
    settings : Settings
    peers : bool
        Whether there are storage nodes.
    """

    def __init__(
        self,
        place: Place,
        agents: Agents,
        local: LocalTier,
        folder: CheckpointFolder,
        settings: Settings,
        *,
        peers: bool,
    ) -> None:
        self._place, self._agents = place, agents
        self._local, self._folder, self._settings, self._peers = local, folder, settings, peers

    def tags(self) -> list[str]:
        """Return the tags, oldest first."""
        if not self._place.alone:
            return [joint.tag for joint in self._known().joint]
        return tags_of(self._records(), self._folder.survey())

    def path(self, tag: str) -> str:
        """Return where the object tier has the newest checkpoint of a tag."""
        tokens = None
        if not self._place.alone:
            tokens = {joint.tokens[self._place.me.rank] for joint in self._known().joint if joint.tag == tag}
        for marker in reversed(self._folder.committed()):
            if marker.tag == tag and (tokens is None or marker.token in tokens):
                return joined(self._place.location, marker.directory)
        where = self._place.location
        raise ConfigError(f"{where} has no committed checkpoint with the tag {tag!r} (yet)")

    def recover(
        self,
        tag: str | None,
        include: str | list[str] | None,
        *,
        into: Into | None,
        healthy: bool,
        any_older: bool,
    ) -> Recovered | None:
        """Bring a checkpoint back; see `FastCheckManager.load`."""
        if self._place.alone:
            try:
                self._known().choose(tag)
            except CoordinationError as error:
                log.warning("whether several ranks saved here since is not known: %s", error)
            return self._recover_one(tag, include, into=into, healthy=healthy, any_older=any_older)
        known = self._known()
        joint = known.choose(tag)
        if joint is None:
            slots = [slot.status.state is SlotState.COMMITTED for slot in self._local.slots]
            refuse_unproved(self._place, any(slots) or bool(self._folder.committed()))
            return None
        token = joint.tokens[self._place.me.rank]
        try:
            return self._recover_one(joint.tag, include, into=into, token=token, any_older=any_older)
        except (UnrecoverableError, CorruptDataError, ShardUnavailableError, TierError) as error:
            raise UnrecoverableError(
                f"the part of rank {self._place.me.rank} of checkpoint {joint.tag!r}",
                (str(error), known.older(joint)),
            ) from error

    def _known(self) -> Known:
        return Known(self._place, self._agents.ask("commits", run=self._place.whole_run))

    def _recover_one(
        self,
        tag: str | None,
        include: str | list[str] | None,
        *,
        into: Into | None,
        token: str | None = None,
        healthy: bool = False,
        any_older: bool = False,
    ) -> Recovered | None:
        records = self._records()
        link = self._agents.link()
        # Kept in shared memory only where the next save can be a delta against it.
        deltas = self._peers or self._settings.persist == "incremental"
        free = link.free_slot() if deltas else None
        self._agents.at_work = free
        try:
            recovery = Recovery(
                self._local,
                self._folder,
                clients_for(self._settings),
                check_documents=self._settings.check_documents,
            )
            loading = recovery.load(
                records,
                tag=tag,
                include=include,
                free_slot=free,
                token=token,
                healthy=healthy,
                older=None if any_older else [group.name for group in self._settings.groups],
                into=into,
            )
            recovered = run_apart(loading)
            if recovered is not None and recovered.filled is not None:
                self._offer_base(link, recovered.filled)
        finally:
            self._agents.at_work = None
        return recovered

    def _offer_base(self, link: AgentLink, number: int) -> None:
        try:
            link.adopt(number)
        except FastCheckError as error:
            # The state is here; a new agent finds the slot by itself.
            log.warning("the next save goes whole: %s", error)

    def _records(self) -> list[CommitRecord]:
        return [CommitRecord.from_bytes(data) for data in self._agents.ask("records")["records"]]
