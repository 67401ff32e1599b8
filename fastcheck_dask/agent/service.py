"""The agent's work: saves one after the other, persisting in the background, slots given back when free.

A slot is in use while any of these holds: a snapshot in it waits to be saved, it is the delta base, or its
checkpoint is being persisted. With two slots this bounds everything that can queue up.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from fastcheck_dask.agent.delays import Delays
from fastcheck_dask.agent.encoder_pool import EncoderPool
from fastcheck_dask.agent.events import committed_event
from fastcheck_dask.agent.lease import LeaseKeeper
from fastcheck_dask.agent.node_states import NodeStates
from fastcheck_dask.agent.persisting import Persisting
from fastcheck_dask.agent.placing import Placing
from fastcheck_dask.agent.ranks import RankDuties, known_commits
from fastcheck_dask.agent.slots import SlotUse
from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.base import CommitRecord, Coordinator, RunClaim
from fastcheck_dask.coordination.leases import renew
from fastcheck_dask.coordination.runs import RunDescription, describe
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.derive import derive
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.engine.roots import groups_to_text
from fastcheck_dask.engine.save import PeerSaver, Saved, SaveStats, Snapshot, publish
from fastcheck_dask.engine.save_objects import save_to_objects
from fastcheck_dask.engine.snapshot import as_base, parse
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FastCheckError,
    NodeFullError,
    NodeUnavailableError,
    SaveFailedError,
    ShardCorruptError,
    StaleBaseError,
    to_wire,
)
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.placement.policy import Choice
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier, Slot
from fastcheck_dask.tiers.object_store import is_remote, open_store
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.peer import clients_for

log = logging.getLogger(__name__)

#: How often one snapshot is tried from the start before its save fails; nodes are replaced without that.
_ATTEMPTS = 4
_NO_NODES = Choice(0, False, ())

Notify = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class RunConfig:
    """Where and with whom an agent works."""

    run: str
    location: str
    coordinator_url: str
    #: Whether storage nodes are used.
    peers: bool
    #: Data shards if they were given explicitly.
    wanted_shards: int | None
    settings: Settings
    #: Whether the run was taken from an owner that may be alive, and at work on its last save.
    takeover: bool = False


class SaveService:
    """Serves the saves of one run. Belongs to the agent's event loop; one save at a time."""

    def __init__(
        self,
        config: RunConfig,
        coordinator: Coordinator,
        claim: RunClaim,
        notify: Notify,
        *,
        states: NodeStates | None = None,
        ranks: RankDuties | None = None,
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._claim = claim
        self._notify = notify
        self._ranks = ranks
        settings = config.settings
        local = LocalTier(config.run, Path(settings.local_dir) if settings.local_dir else None)
        self._slots = SlotUse(local, lambda number: notify({"event": "free", "slot": number}))
        self._folder = CheckpointFolder(open_store(config.location))
        self._encoders = EncoderPool(
            settings.encoders,
            compress=settings.compression != "never",
            cpus=settings.encoder_cpus,
            nice=settings.encoder_nice,
        )
        self._pacer = Pacer(settings.limit_bytes_per_second)
        # Ranks would measure at the same time, each what the others leave of the links.
        unasked = ranks is not None and settings.measure_links == "auto"
        self._placing = Placing(
            replace(settings, measure_links=False) if unasked else settings,
            coordinator,
            wanted_shards=config.wanted_shards,
            states=states,
            pacer=self._pacer,
        )
        client = clients_for(settings, self._pacer)
        self._saver = PeerSaver(
            config.run,
            coordinator,
            claim,
            self._encoders,
            client,
            compression=CompressionPolicy(settings.compression, settings.encoders),
            substitute=self._placing.substitute,
        )
        self._object_compression = CompressionPolicy(settings.compression, settings.encoders)
        incremental = settings.persist == "incremental"
        self._persister = Persister(
            config.location,
            self._folder,
            self._encoders,
            coordinator,
            client,
            chains=ChainPolicy.of(settings) if incremental else None,
            retention=Retention.of(settings),
            pacer=self._pacer if is_remote(config.location) else None,
            groups=settings.groups,
            root_pacer=self._pacer if any(is_remote(g.root) for g in settings.groups if g.root) else None,
        )
        self._lease = LeaseKeeper(
            config.run,
            client,
            settings.lease_seconds,
            partial(renew, coordinator.entries, config.run, settings.lease_seconds),
        )
        self._delays = Delays(coordinator, config.run)
        self._persisting = Persisting(
            self._persister,
            self._slots,
            notify,
            persisted=self._is_persisted,
            delayed=self._delays.failed,
        )
        #: The newest commit of this agent and the number of its save, until the object tier has it.
        self._unpersisted: tuple[Saved, int] | None = None
        #: Of the newest checkpoint, be it in a slot or not: what is suspicious is judged by it.
        self._before: Manifest | None = None
        #: Newest generation that the object tier or a save of this agent has; None: the tier has to be asked.
        self._newest_written: int | None = None
        #: The run's commits when the coordinator was last asked, and ours since; oldest first.
        self._known: tuple[CommitRecord, ...] = ()
        #: Generations left out before the next one. Without storage nodes a fenced owner may still write the
        #: directory that follows the newest one it knew: it is not written by two at once.
        self._left_out = 1 if config.takeover else 0

    async def start(self, keep: int | None = None) -> list[int]:
        """Start the encoders and find out what the slots hold; return the numbers of the free ones.

        Parameters
        ----------
        keep : int, optional
            The slot that the trainer is at work in.
        """
        await self._encoders.start()
        if self._config.peers:
            self._placing.start()
        await asyncio.to_thread(self._describe)
        records = self._known = await asyncio.to_thread(self._coordinator.commits, self._config.run)
        self._slots.recognise({record.token: record for record in records})
        self._slots.drop_unfinished(keep)
        if records:
            self._lease.note(records[-1])
        if records and any(self._slots.adopt(number, records[-1]) for number in (0, 1)):
            await self._adopted(records[-1])
        await self._mark_persisted()
        return self._slots.free

    def _describe(self) -> None:
        """Tell the master what it needs to persist what this agent may not live to."""
        settings = self._config.settings
        # What a rank alone has is no checkpoint: only its agent knows which ones all ranks have.
        keep = Retention.of(settings).to_text() if self._ranks is None else ""
        groups = groups_to_text(settings.groups)
        description = RunDescription(self._config.location, settings.persist_every, keep, groups)
        describe(self._coordinator.entries, self._config.run, description)

    async def adopt(self, number: int) -> bool:
        """Take the checkpoint that a load put into a slot as delta base."""
        records = await asyncio.to_thread(self._records)
        if not records or not self._slots.adopt(number, records[-1]):
            return False
        await self._adopted(records[-1])
        return True

    def set_busy(self, busy: bool) -> None:
        """Note that the training begins to communicate, or has ended: meanwhile nothing large is sent."""
        self._pacer.set_busy(busy)

    async def _adopted(self, latest: CommitRecord) -> None:
        base = self._slots.base
        self._before = None if base is None else base.manifest
        await self._resume_persist(latest)

    def accept(self, number: int) -> None:
        """Note that a snapshot in a slot waits to be saved."""
        self._slots.hold(number, "snapshot")

    async def save(self, number: int, seq: int) -> None:
        """Save the snapshot in a slot; everything that happens is told through `notify`."""
        started = time.monotonic()
        slot = self._slots[number]
        try:
            snapshot = replace(parse(slot.path, slot.read_draft()), opened=slot)
            saved = await self._save(snapshot, slot)
            self._newest_written = saved.record.generation
            self._lease.note(saved.record)
            self._before = saved.manifest
        except Exception as error:  # whatever it was, training goes on and the handle has to say it
            log.warning("save %d failed: %s", seq, error, exc_info=not isinstance(error, FastCheckError))
            self._notify({"event": "failed", "seq": seq, "error": to_wire(error)})
            # It may have come as far as its marker in the object tier.
            self._newest_written = None
            status = self._slots.status(number)
            await self.gave_up(status.tag, str(error), token=status.token)
            self._slots.empty(number)
        else:
            self._make_base(number, saved)
            saved.stats.seconds = time.monotonic() - started
            self._placing.observe(saved.stats.transfers)
            self._report(saved, seq)
            await self._queue_persist(saved, number, seq)
        finally:
            self._slots.release(number, "snapshot")

    async def gave_up(self, tag: str, reason: str, *, token: str = "") -> None:
        """Tell the other ranks, if there are any, that a save of this one failed."""
        if self._ranks is not None and tag:
            await asyncio.to_thread(self._ranks.gave_up, tag, token, reason)

    async def _retire(self) -> None:
        """Remove what the rules do not keep, now that a newer checkpoint is complete (on all ranks)."""
        if self._ranks is None:
            await self._persister.retire()
        elif (proven := await asyncio.to_thread(self._ranks.proven_generation)) is not None:
            await self._persister.retire(proven)

    async def _mark_persisted(self) -> None:
        if self._ranks is not None:
            await asyncio.to_thread(self._ranks.persisted)

    def _make_base(self, number: int, saved: Saved) -> None:
        """Let the snapshot that was just committed be the base of the next save."""
        slot = self._slots[number]
        try:
            slot.commit(saved.record.generation, token=saved.record.token)
        except (FastCheckError, OSError) as error:
            # The checkpoint is in force; only this host cannot say so, and sends the next one whole.
            log.warning("generation %d is not kept in shared memory: %s", saved.record.generation, error)
            self._slots.rebase(None, None)
            self._slots.empty(number)
        else:
            self._slots.rebase(number, as_base(slot.path, saved.manifest))

    def _report(self, saved: Saved, seq: int) -> None:
        self._known = (*self._known, saved.record)
        stats = saved.stats
        log.info(
            "generation %d (%s): %d bytes raw, %d sent to %s in %.3f s",
            saved.record.generation,
            saved.record.tag,
            stats.raw_bytes,
            stats.sent_bytes,
            ", ".join(stats.nodes) or "the object tier",
            stats.seconds,
        )
        if stats.degraded:
            log.warning("generation %d (%s): %s", saved.record.generation, saved.record.tag, stats.degraded)
        if stats.flags:
            told = saved.manifest.notes.describe()
            log.warning("generation %d (%s) is flagged: %s", saved.record.generation, saved.record.tag, told)
        self._notify(committed_event(saved, seq))

    async def _save(self, snapshot: Snapshot, slot: Slot) -> Saved:
        # First: what is in doubt of the save before is decided by this.
        decided = await asyncio.to_thread(self._coordinator.newest_decided, self._config.run)
        latest = await asyncio.to_thread(self._coordinator.latest, self._config.run)
        generation = 1 + await asyncio.to_thread(self._newest_generation, decided) + self._left_out
        # After the number was found: an owner that takes the run from now on finds a greater one.
        await asyncio.to_thread(self._claim.check)
        self._left_out = 0
        base = self._slots.base
        if base is not None and (latest is None or base.manifest.token != latest.token):
            self._slots.rebase(None, None)
        if self._config.peers:
            snapshot = await derive(snapshot, self._encoders)
        seal = partial(slot.seal, token=snapshot.token)
        excluded: set[str] = set()
        cause: FastCheckError | None = None
        for _ in range(_ATTEMPTS):
            choice = await self._placing.choose(latest, excluded, cause) if self._config.peers else _NO_NODES
            if choice.shards == 0:
                return await self._save_to_objects(snapshot, generation, choice, seal)
            try:
                return await self._saver.save(
                    snapshot,
                    choice,
                    latest=latest,
                    base=self._slots.base,
                    generation=generation,
                    seal=seal,
                    before=self._before,
                )
            except (NodeUnavailableError, NodeFullError) as error:
                # And no other node was to be had: with fewer shards, if that is allowed.
                excluded.add(error.node)
                self._placing.suspect(error.node)
                cause = error
            except ShardCorruptError as error:
                # Damaged on the way: the node took nothing of it.
                cause = error
            except StaleBaseError as error:
                # A node holds other bits than the slot: with the base given up every chunk goes whole.
                self._slots.rebase(None, None)
                cause = error
            log.warning("generation %d is tried again: %s", generation, cause)
        raise SaveFailedError(
            f"generation {generation} ({snapshot.tag}) could not be saved in {_ATTEMPTS} attempts; "
            f"the last one failed with: {cause}"
        ) from cause

    def _newest_generation(self, decided: int) -> int:
        """Return the highest known generation: object tier and slots outlive a lost coordinator.

        A number that is used twice would let an older state in another tier pass for the newest.
        """
        if self._newest_written is None:
            # Not for every save: this agent alone writes more of them.
            self._newest_written = self._folder.newest_generation()
        return max(self._newest_written, decided, *self._slots.generations(), 0)

    async def _save_to_objects(
        self, snapshot: Snapshot, generation: int, choice: Choice, seal: Callable[[bytes], None]
    ) -> Saved:
        saved = await save_to_objects(
            self._config.run,
            snapshot,
            generation=generation,
            persister=self._persister,
            compression=self._object_compression,
            seal=seal,
            degraded=choice.degraded,
            base=self._slots.base,
            before=self._before,
        )
        try:
            record = await publish(self._coordinator, saved.record, self._claim)
        except CommitConflictError:
            if self._ranks is not None:
                # One rank's part of a save that was aborted for all.
                directory = directory_name(generation, snapshot.tag)
                await asyncio.to_thread(self._folder.remove, directory)
            raise
        return replace(saved, record=record, unplaced=choice.cause)

    async def _queue_persist(self, saved: Saved, number: int, seq: int) -> None:
        """Start persisting a committed generation when its turn comes; at most one is being written."""
        self._unpersisted = None if saved.record.persisted else (saved, seq)
        if saved.record.persisted:
            await self._mark_persisted()
            self._notify({"event": "persisted", "seq": seq})
            await self._retire()
            return
        every = self._config.settings.persist_every
        if every == 0 or saved.record.generation % every:
            self._notify({"event": "not_persisted", "seq": seq, "every": every})
            return
        await self._persisting.begin(saved, number, seq)

    async def _is_persisted(self, saved: Saved, seq: int, noted: bool, stats: dict[str, Any]) -> None:
        """Tell the other ranks and the trainer, and remove what the rules do not keep."""
        if noted and self._unpersisted is not None and self._unpersisted[0] is saved:
            self._unpersisted = None
        await self._mark_persisted()
        self._notify({"event": "persisted", "seq": seq, "stats": stats})
        await self._delays.over()
        await self._retire()

    async def _resume_persist(self, latest: CommitRecord) -> None:
        """Persist the newest generation if an agent before this one did not live to do it."""
        if latest.persisted or self._config.settings.persist_every == 0:
            return
        base, number = self._slots.base, self._slots.base_number
        if base is None or number is None or self._persisting.busy:
            return
        saved = Saved(latest, base.manifest, base.manifest.to_bytes(), SaveStats())
        await self._persisting.begin(saved, number, -1)

    async def finish(self) -> None:
        """Before the process ends: persist the newest generation, if its turn had not come or it failed."""
        await self._persisting.finish(self._unpersisted if self._config.settings.persist_every else None)

    def orphans(self) -> list[int]:
        """Return the slots with a complete snapshot that the trainer did not live to hand over."""
        return self._slots.orphans()

    def records(self) -> list[bytes]:
        """Return the commit records of the run, oldest first."""
        return [record.to_bytes() for record in self._records()]

    def _records(self) -> tuple[CommitRecord, ...]:
        """Ask the coordinator; while it is away, return what is known: nobody but us commits in this run.

        Unless we lost the run meanwhile, and then our next save is refused.
        """
        away = self._coordinator.health()
        try:
            if not self._known or away.state in ("connected", "closed"):
                self._known = self._coordinator.commits(self._config.run)
                return self._known
            why = away.why
        except CoordinationError as error:
            if not self._known or not error.retryable:
                raise
            why = str(error)
        log.warning(
            "run %s: the coordinator is away, generation %d is the newest that is known: %s",
            self._config.run,
            self._known[-1].generation,
            why,
        )
        return self._known

    def known_commits(self, run: str) -> dict[str, Any]:
        """Return which checkpoints of all ranks of a run there are, and the newest of a single process.

        What was known once will not do: other ranks may know more, and all have to load the same.
        """
        now = self._coordinator.health()
        # A single process does without; ranks wait, since a server that leads no more is soon followed.
        if now.state == "suspended" and self._ranks is None:
            raise CoordinationError(f"the coordinator is away: {now.why}")
        return known_commits(self._coordinator, run)

    def safe_elsewhere(self) -> bool:
        """Say whether the newest checkpoint is in another tier than the memory of this host."""
        latest = self._coordinator.latest(self._config.run)
        if latest is None:
            return True
        if latest.persisted and not latest.nodes and self._config.settings.groups:
            # Where a group is older, the object tier has not what is here.
            try:
                marker = self._folder.marker(directory_name(latest.generation, latest.tag))
            except FastCheckError:
                return False
            return marker is not None and not marker.older
        return latest.persisted or (bool(latest.nodes) and self._config.settings.persist_every == 0)

    async def close(self) -> None:
        """End the encoders, and the renewing of the lease."""
        await self._lease.close()
        self._pacer.set_busy(False)
        await self._placing.close()
        await self._encoders.close()
