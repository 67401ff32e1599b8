"""Publish what could be recovered now, and rehearse it: a checkpoint is rebuilt without some of its nodes."""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import aclosing
from itertools import combinations

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.coordination.base import CommitRecord, Coordinator
from fastcheck_dask.coordination.entries import Create, EntryConflictError, OutcomeUnknownError, Write
from fastcheck_dask.coordination.recoverable import Drill, Recoverable, drill_path, recoverable_path
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.engine.rebuild import loaded
from fastcheck_dask.errors import FastCheckError, UnrecoverableError
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.stripes import Layout
from fastcheck_dask.master.duty import Leadership
from fastcheck_dask.master.survey import ShardState, survey
from fastcheck_dask.tiers.peer import PeerClient

logger = logging.getLogger(__name__)

#: From one drill of a run to the next.
DRILL_SECONDS = 3600.0
#: How fast a drill reads.
DRILL_BYTES_PER_SECOND = 64 * 2**20


def recoverable(
    record: CommitRecord, shards: Sequence[ShardState], layout: Layout | None = None
) -> Recoverable:
    """Say from where a generation could be had.

    Parameters
    ----------
    record : CommitRecord
        The newest committed generation of a run.
    shards : sequence of ShardState
        How its shards are.
    layout : Layout, optional
        Without it chunks that are damaged on two nodes count as lost.
    """
    here = _can_do_without(record, shards, set(), layout)
    return Recoverable(
        generation=record.generation,
        tag=record.tag,
        source="peers" if here else "object" if record.persisted else "nowhere",
        may_die=[
            s.node
            for s in shards
            if s.condition != "gone" and _can_do_without(record, shards, {s.shard}, layout)
        ],
        nodes={s.node: s.condition for s in shards},
        damaged={s.node: s.damaged for s in shards if s.damaged},
        persisted=record.persisted,
    )


def _can_do_without(
    record: CommitRecord, shards: Sequence[ShardState], lost: set[int], layout: Layout | None
) -> bool:
    """Say whether the nodes could give everything, some shards left out."""
    lost = lost | {s.shard for s in shards if s.condition in ("gone", "silent")}
    damaged = [s for s in shards if s.damaged and s.shard not in lost]
    spare = record.parity
    if len(lost) > spare or not damaged:
        return len(lost) <= spare
    if layout is None or any(len(s.damaged_keys) < s.damaged for s in damaged):
        return len(lost) + len(damaged) <= spare
    missing = Counter(layout.position[key][0].id for s in damaged for key in s.damaged_keys)
    for shard in lost:
        missing.update(layout.position[key][0].id for key in layout.keys_of(shard))
    return max(missing.values()) <= spare


class RecoverableDuty:
    """Publishes, for every run of which nodes hold anything, what could be recovered now.

    An entry is written only when it changes.

    Parameters
    ----------
    coordinator : Coordinator
        With the entries.
    client : callable
        Opens a node by name and address.
    interval_seconds : float
        Pause between two rounds.
    """

    name = "recoverable"

    def __init__(
        self,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
        *,
        interval_seconds: float = 2.0,
    ) -> None:
        self._coordinator, self._client = coordinator, client
        self.interval_seconds = interval_seconds
        #: Runs that were seen before: when no node holds them any more, that is published, too.
        self._runs: set[str] = set()

    async def run(self, leadership: Leadership) -> None:
        """Look at every run once."""
        records = [await asyncio.to_thread(self._coordinator.latest, run) for run in sorted(self._runs)]
        # The nodes are asked after the records were read: they hold whatever was committed.
        found = await survey(self._coordinator, self._client)
        self._runs.update(found.runs)
        for record in records:
            shards = None if record is None or not record.nodes else found.shards(record)
            if record is None or shards is None:
                continue
            if not leadership.in_force:
                return
            layout = None
            if any(shard.damaged for shard in shards):
                manifest = await manifest_from_nodes(record, self._client, causes=[])
                layout = None if manifest is None else manifest[0].layout
            said = recoverable(record, shards, layout)
            await asyncio.to_thread(
                publish, self._coordinator, leadership, recoverable_path(record.run), said.to_bytes()
            )


def publish(coordinator: Coordinator, leadership: Leadership, path: str, value: bytes) -> None:
    """Write an entry under an office, unless it says so already; what is in doubt is written next time."""
    entry = coordinator.entries.get(path)
    if entry is not None and entry.value == value:
        return
    try:
        leadership.apply(Create(path, value) if entry is None else Write(path, value, entry.version))
    except (EntryConflictError, OutcomeUnknownError) as error:
        logger.debug("%s is written in the next round: %s", path, error)


class DrillDuty:
    """Rehearses a recovery of every run now and then, and publishes how it went.

    Each drill leaves other nodes out, as many as there are parity shards. It needs as much memory as a
    repair, and reads at a bounded rate; what it finds damaged the nodes drop, and it is repaired.

    Parameters
    ----------
    coordinator : Coordinator
        With the entries.
    client : callable
        Opens a node by name and address.
    drill_seconds : float
        From one drill of a run to the next, and from the first look at it to its first one.
    bytes_per_second : float
        Raw bytes that are read in a second.
    interval_seconds : float
        Pause between two looks.
    clock : Clock
        Monotonic.
    """

    name = "restore drill"

    def __init__(
        self,
        coordinator: Coordinator,
        client: Callable[[str, str], PeerClient],
        *,
        drill_seconds: float = DRILL_SECONDS,
        bytes_per_second: float = DRILL_BYTES_PER_SECOND,
        interval_seconds: float = 10.0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._coordinator, self._client = coordinator, client
        self._drill_seconds, self._bytes_per_second = drill_seconds, bytes_per_second
        self.interval_seconds = interval_seconds
        self._clock = clock
        #: By run: when it was last drilled, or first seen.
        self._last: dict[str, float] = {}
        self._drills: Counter[str] = Counter()

    async def run(self, leadership: Leadership) -> None:
        """Drill the runs whose time has come, one after the other."""
        found = await survey(self._coordinator, self._client)
        now = self._clock.now()
        self._last = {run: self._last.get(run, now) for run in found.runs}
        for run in [run for run, last in self._last.items() if now - last >= self._drill_seconds]:
            record = await asyncio.to_thread(self._coordinator.latest, run)
            self._last[run] = self._clock.now()
            if record is None or not record.nodes or not record.parity:
                continue
            drill = await self._drill(record)
            if not leadership.in_force:
                return
            latest = await asyncio.to_thread(self._coordinator.latest, run)
            if not drill.passed and latest != record:
                # It was replaced meanwhile, or moved to another node: that says nothing of either.
                self._last[run] = now - self._drill_seconds
                continue
            self._drills[run] += 1
            logger.log(
                logging.INFO if drill.passed else logging.ERROR, "restore drill of run %s: %s", run, drill
            )
            await asyncio.to_thread(publish, self._coordinator, leadership, drill_path(run), drill.to_bytes())

    async def _drill(self, record: CommitRecord) -> Drill:
        choices = list(combinations(range(len(record.nodes)), record.parity))
        left_out = choices[self._drills[record.run] % len(choices)]
        started, why, nbytes = self._clock.now(), "", 0
        try:
            causes: list[str] = []
            found = await manifest_from_nodes(record, self._client, causes=causes)
            if found is None:
                raise UnrecoverableError("the manifest", tuple(causes))
            nbytes = await self._rebuild(found[0], record, left_out)
        except FastCheckError as error:
            why = str(error)
        return Drill(
            generation=record.generation,
            tag=record.tag,
            left_out=", ".join(record.nodes[shard] for shard in left_out),
            passed=not why,
            why=why,
            raw_bytes=nbytes,
            seconds=self._clock.now() - started,
            finished_unix=time.time(),
        )

    async def _rebuild(self, manifest: Manifest, record: CommitRecord, left_out: tuple[int, ...]) -> int:
        """Load every chunk without some shards and let it go; return the raw bytes."""
        assert manifest.layout is not None
        keys = [key for stripe in manifest.layout.stripes for key in stripe.members if key is not None]
        batches = loaded(manifest, keys, record=record, client=self._client, without=left_out)
        total = 0
        async with aclosing(batches):
            async for batch, _ in batches:
                nbytes = sum(map(manifest.nbytes_of, batch))
                total += nbytes
                await asyncio.sleep(nbytes / self._bytes_per_second)
        return total
