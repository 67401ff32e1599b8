"""Persist what a run committed, when its owner is gone before the object tier had it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from functools import partial

from fastcheck_dask.coordination.base import CommitRecord, Coordinator
from fastcheck_dask.coordination.delays import forget_delay, note_delay
from fastcheck_dask.coordination.runs import RunDescription, described_runs
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.engine.roots import groups_from_text
from fastcheck_dask.errors import FastCheckError, TierError
from fastcheck_dask.master.duty import Leadership
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient

logger = logging.getLogger(__name__)


def left_over(
    description: RunDescription, latest: CommitRecord | None, owner: str | None
) -> CommitRecord | None:
    """Say which generation of a run nobody persists though it should be; no I/O.

    Parameters
    ----------
    description : RunDescription
        What the run says of itself.
    latest : CommitRecord or None
        Its newest committed generation.
    owner : str or None
        The live owner: it persists by itself, and the newest generation also when the run ends.
    """
    if latest is None or latest.persisted or owner is not None or description.persist_every == 0:
        return None
    return latest


class PersistDuty:
    """Has the nodes write the newest generation of every run that was left without an owner.

    A master that was deposed may go on for a while beside the next one, and an owner may come back: all of
    them write the same bytes to the same names, and one commit marker is created once.

    Parameters
    ----------
    coordinator : Coordinator
        With the entries of the descriptions.
    client : callable
        Opens a node by name and address.
    interval_seconds : float
        Pause between two rounds.
    """

    name = "persisting"

    def __init__(
        self,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
        *,
        interval_seconds: float = 2.0,
    ) -> None:
        self._coordinator, self._client = coordinator, client
        self.interval_seconds = interval_seconds

    async def run(self, leadership: Leadership) -> None:
        """Persist what is left over, one run after the other; an error of one does not keep the others."""
        failures: list[FastCheckError] = []
        for run, description in (await asyncio.to_thread(described_runs, self._coordinator.entries)).items():
            if not leadership.in_force:
                return
            try:
                record = await asyncio.to_thread(self._left_over, run, description)
                if record is not None:
                    await self._persist(description, record)
            except FastCheckError as error:
                failures.append(error)
        if failures:
            more = f" (and {len(failures) - 1} runs more)" if len(failures) > 1 else ""
            raise TierError(f"{failures[0]}{more}") from failures[0]

    async def _persist(self, description: RunDescription, record: CommitRecord) -> None:
        """Persist one generation; whoever looks at the cluster sees why that fails."""
        entries, run = self._coordinator.entries, record.run
        try:
            await persist_from_nodes(self._coordinator, self._client, description, record)
        except FastCheckError as error:
            note = partial(note_delay, entries, run, record.generation, record.tag, str(error))
            await asyncio.to_thread(note, now_unix=time.time())
            raise
        await asyncio.to_thread(forget_delay, entries, run)

    def _left_over(self, run: str, description: RunDescription) -> CommitRecord | None:
        latest = self._coordinator.latest(run)
        if left_over(description, latest, None) is None:
            return None
        return left_over(description, latest, self._coordinator.owner(run))


async def persist_from_nodes(
    coordinator: Coordinator,
    client: Callable[[str, str], PeerClient],
    description: RunDescription,
    record: CommitRecord,
) -> None:
    """Have the nodes write a committed generation to the object tier; idempotent.

    Raises
    ------
    TierError
        If the nodes cannot give it, or the object tier refuses.
    """
    causes: list[str] = []
    found = await manifest_from_nodes(record, client, causes=causes)
    if found is None:
        raise TierError(
            f"generation {record.generation} ({record.tag}) of run {record.run} cannot be persisted: no "
            f"storage node gave its manifest. Causes: {'; '.join(causes) or 'it is on no node'}"
        )
    folder = CheckpointFolder(await asyncio.to_thread(open_store, description.location))
    persister = Persister(
        description.location,
        folder,
        None,
        coordinator,
        client,
        retention=Retention.from_text(description.keep),
        # Whole, and said so before anything is written: its agent may live after all, and write as well.
        chains=ChainPolicy(max_deltas=0),
        groups=groups_from_text(description.groups),
    )
    await persister.persist(*found, record=record, source=None)
    await persister.retire()
    logger.info(
        "generation %d (%s) of run %s is persisted in %s",
        record.generation,
        record.tag,
        record.run,
        description.location,
    )
