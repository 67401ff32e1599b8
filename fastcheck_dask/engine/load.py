"""Load one checkpoint, chunk by chunk, from the fastest source that has each.

The order is shared memory, the storage nodes in parallel, parity for a chunk that is lost or damaged, the
object tier. Every chunk is verified by the digest in the manifest before it counts; what came damaged is
named, and the node that gave it is told.

A node that is late, by the pace of the others, is not waited for: its chunks are also rebuilt from parity, as
soon as the others of their stripes are there, and what is verified first counts. So it is with the node of a
parity chunk where there is another one. Only who has claimed a chunk writes to its memory.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable, Collection, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from functools import partial
from itertools import chain

import numpy as np

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.copies import give_copies
from fastcheck_dask.engine.decode import decode_verified
from fastcheck_dask.engine.encode import Bits, Region, digest
from fastcheck_dask.engine.erasures import Erasure, rebuildable_now
from fastcheck_dask.engine.load_report import LoadReport
from fastcheck_dask.engine.objects import read_objects
from fastcheck_dask.engine.pace import Pace
from fastcheck_dask.engine.parity_source import PARITY_BYTES, ParitySource
from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.errors import (
    FastCheckError,
    ShardUnavailableError,
    UnrecoverableError,
)
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.peer import PeerClient, Read
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

log = logging.getLogger(__name__)

#: Raw bytes that are asked of a node by one message; two are on their way at a time.
_BATCH_BYTES = 8 * 2**20
#: Threads that copy chunks out of shared memory.
_COPIERS = 4
#: Raw bytes of the sources of derived chunks that are in memory at once, if nobody asked for the sources.
_SOURCE_BYTES = 64 * 2**20


class ChunkLoader:
    """Loads the chunks of one checkpoint into memory that the caller provides."""

    def __init__(
        self,
        manifest: Manifest,
        region: Region,
        *,
        record: CommitRecord | None,
        client: Callable[[str, str], PeerClient],
        stored: StoredCheckpoint | None,
        report: LoadReport,
        newest: bool = True,
        without: Collection[int] = (),
        settle: Callable[[str], None] = lambda _key: None,
    ) -> None:
        #: Shards whose nodes are known to be gone, or shall do without: nobody asks them.
        self._without_shards = frozenset(without)
        #: Told of each chunk that is in its region, verified; by any thread, before anything reads it again.
        self._settle = settle
        self._newest = newest
        self._manifest = manifest
        self._region = region
        self._record = record
        self._client = client
        #: The same checkpoint in the object tier.
        self._stored = stored
        self._report = report
        #: Chunks whose bits are in their region, verified.
        self._good: set[str] = set()
        #: Why each source did not give what it was asked for.
        self._causes: list[str] = []
        self._damaged_at: dict[int, set[str]] = {}
        #: Nodes that live and do not hold the generation.
        self._without: list[str] = []
        #: Chunks whose memory is being written, or was.
        self._claimed: set[str] = set()
        self._pace = Pace()
        #: Set when chunks have become good.
        self._progress = asyncio.Event()
        self._from_parity = ParitySource(
            manifest,
            region,
            good=self._good,
            without=self._without_shards,
            read=partial(self._from_shard, source=None),
            patience=self._pace.patience,
            take=self._take_computed,
            refuse=self._lost,
        )

    async def _give_copies(self) -> None:
        if self._record is not None:
            await give_copies(
                self._damaged_at,
                self._good,
                self._manifest,
                record=self._record,
                client=self._client,
                bits=self._region,
            )

    def take_local(self, keys: Iterable[str], slot_bits: Region) -> list[str]:
        """Verify chunks of a slot, and copy them unless they are in place; return those damaged there."""
        keys = list(keys)
        with ThreadPoolExecutor(_COPIERS) as copiers:
            taken = list(copiers.map(lambda key: self._take_from_slot(key, slot_bits(key)), keys))
        for key, good in zip(keys, taken, strict=True):
            if good:
                self._good.add(key)
                self._report.count("local", self._manifest.sizes[key])
            else:
                self._lost(f"chunk {key} is damaged in shared memory")
        return [key for key, good in zip(keys, taken, strict=True) if not good]

    def _take_from_slot(self, key: str, bits: Bits) -> bool:
        target = self._region(key)
        if target.ctypes.data != bits.ctypes.data:
            np.copyto(target, bits)
        # What was copied is verified: nobody can change it any more.
        if digest(target) != self._manifest.digests[key]:
            return False
        self._settle(key)
        return True

    async def load(self, keys: Iterable[str]) -> None:
        """Get every chunk of `keys` that is not there yet.

        Raises
        ------
        UnrecoverableError
            If a chunk is with no source; carries what each source said.
        """
        wanted = [key for key in keys if key not in self._good]
        derived = [key for key in wanted if key in self._manifest.sources]
        stored = [key for key in wanted if key not in self._manifest.sources]
        await self._from_nodes(stored)
        await self._from_objects([key for key in stored if key not in self._good])
        await self._from_sources(derived, asked=set(stored))
        await self._from_objects([key for key in derived if key not in self._good])
        self._log_without(wanted)
        await self._give_copies()
        missing = [key for key in wanted if key not in self._good]
        if missing:
            what = f"generation {self._manifest.generation} ({self._manifest.tag}): {len(missing)} chunks"
            raise UnrecoverableError(f"{what} (first {missing[0]})", tuple(self._causes))

    def _unread(self, shard: int, name: str, error: FastCheckError, how_far: str) -> None:
        """Note that a node could not be read, or does not hold the generation."""
        self._causes.append(f"shard {shard}: {error}")
        if isinstance(error, ShardUnavailableError):
            self._without.append(name)
        else:
            log.warning(
                "generation %d: shard %d on %s cannot be read (%s): %s",
                self._manifest.generation,
                shard,
                name,
                how_far,
                error,
            )

    def _log_without(self, wanted: list[str]) -> None:
        """Say once from where a checkpoint came that nodes did not hold; of an older one that is expected."""
        if self._without:
            log.log(
                logging.WARNING if self._newest else logging.INFO,
                "generation %d (%s) is not in the memory of %s; %d of %d chunks came from %s",
                self._manifest.generation,
                self._manifest.tag,
                ", ".join(sorted(set(self._without))),
                sum(key in self._good for key in wanted),
                len(wanted),
                self._report.source,
            )

    def _lost(self, why: str) -> None:
        log.warning("generation %d: %s", self._manifest.generation, why)
        self._report.rebuilt.append(why)
        self._causes.append(why)

    async def _from_nodes(self, keys: list[str]) -> None:
        if keys and self._record is not None and self._record.nodes and self._manifest.layout is not None:
            await self._from_peers(keys)
            await self._from_parity.rebuild_all(key for key in keys if key not in self._good)

    async def _from_sources(self, keys: list[str], *, asked: set[str]) -> None:
        """Make derived chunks of sources that are here, or that nobody asked for and the nodes give."""
        sources = self._manifest.sources
        await self._cast([key for key in keys if sources[key] in self._good], self._region)
        hidden = {sources[key] for key in keys} - asked - self._good
        for batch in batches_of(sorted(hidden), self._manifest.nbytes_of, budget_bytes=_SOURCE_BYTES):
            scratch: dict[str, Bits] = {}

            def room(key: str, scratch: dict[str, Bits] = scratch) -> Bits:
                return scratch.setdefault(key, np.empty(self._manifest.nbytes_of(key), np.uint8))

            loader = ChunkLoader(
                self._manifest,
                room,
                record=self._record,
                client=self._client,
                stored=None,
                report=self._report,
            )
            await loader._from_nodes(batch)
            await loader._give_copies()
            self._causes += loader._causes
            await self._cast([key for key in keys if sources[key] in loader._good], room)

    async def _cast(self, keys: list[str], source_bits: Region) -> None:
        made = await asyncio.gather(*(asyncio.to_thread(self._cast_one, key, source_bits) for key in keys))
        for key, found in zip(keys, made, strict=True):
            if found != self._manifest.digests[key]:
                self._lost(
                    f"chunk {key}: the cast of {self._manifest.sources[key]} gives other bits ({found})"
                )
                continue
            self._settle(key)
            self._good.add(key)
            self._report.count("derived", self._manifest.sizes[key])

    def _cast_one(self, key: str, source_bits: Region) -> str:
        source, dtype = source_bits(self._manifest.sources[key]), self._manifest.chunks[key].dtype
        return digest(cast(source, dtype, out=self._region(key)))

    async def _from_peers(self, keys: list[str]) -> None:
        assert self._manifest.layout is not None
        by_shard: dict[int, list[str]] = {}
        for key in keys:
            shard = self._manifest.layout.position[key][1]
            if shard not in self._without_shards:
                by_shard.setdefault(shard, []).append(key)
        readers = {
            asyncio.create_task(self._from_shard(shard, of_shard, self._region, "peers")): shard
            for shard, of_shard in by_shard.items()
        }
        try:
            await self._watch(readers, by_shard)
        finally:
            # What is left has nothing to give that is still wanted, or the load is over.
            for reader in readers:
                reader.cancel()
            results = await asyncio.gather(*readers, return_exceptions=True)
        for result in results:
            if isinstance(result, Exception):
                raise result

    async def _watch(
        self, readers: Mapping[asyncio.Task[set[str]], int], by_shard: dict[int, list[str]]
    ) -> None:
        """Wait until all is there or no node gives any more; rebuild meanwhile what late nodes owe."""
        wanted = {key for of_shard in by_shard.values() for key in of_shard}
        hedge: asyncio.Task[None] | None = None
        tried: set[str] = set()
        try:
            while not wanted <= self._good and not all(reader.done() for reader in readers):
                self._progress.clear()
                late, seconds = self._pace.late(time.monotonic())
                if hedge is None or hedge.done():
                    if hedge is not None:
                        hedge.result()
                    ended = [shard for reader, shard in readers.items() if reader.done()]
                    group = self._rebuildable(late, ended, by_shard, tried) if late else []
                    tried.update(key for erasure in group for key in erasure.lost)
                    hedge = asyncio.create_task(self._rebuild_late(group)) if group else None
                waits = {reader for reader in readers if not reader.done()} | ({hedge} if hedge else set())
                progress = asyncio.create_task(self._progress.wait())
                await asyncio.wait({*waits, progress}, timeout=seconds, return_when=asyncio.FIRST_COMPLETED)
                progress.cancel()
            if hedge is not None and not wanted <= self._good:
                await hedge
        finally:
            if hedge is not None:
                hedge.cancel()
                await asyncio.gather(hedge, return_exceptions=True)

    def _rebuildable(
        self, late: list[int], ended: list[int], by_shard: dict[int, list[str]], tried: set[str]
    ) -> list[Erasure]:
        """Return a bounded number of chunks of late shards whose stripes are there otherwise."""
        assert self._manifest.layout is not None
        owed = (key for shard in late for key in by_shard[shard])
        return rebuildable_now(
            self._manifest.layout,
            (key for key in owed if key not in self._claimed and key not in tried),
            self._manifest.sizes,
            awaited=set(chain.from_iterable(by_shard.values())) - self._good,
            given_up={key for shard in ended for key in by_shard[shard]} - self._good,
            budget_bytes=PARITY_BYTES,
        )

    async def _rebuild_late(self, group: list[Erasure]) -> None:
        assert self._manifest.layout is not None
        assert self._record is not None
        lost = [key for erasure in group for key in erasure.lost]
        shards = {self._manifest.layout.position[key][1] for key in lost}
        names = ", ".join(f"{self._record.nodes[shard]} (shard {shard})" for shard in sorted(shards))
        log.warning("%d chunks that late nodes owe (%s) are rebuilt from parity", len(lost), names)
        await self._from_parity.rebuild(group)
        self._progress.set()

    async def _from_shard(self, shard: int, keys: list[str], region: Region, source: str | None) -> set[str]:
        """Get chunks from one node; return those that came, and note why others did not."""
        assert self._record is not None
        name, address = self._record.nodes[shard], self._record.addresses[shard]
        identity = (self._manifest.run, self._manifest.generation, self._manifest.token)
        got: set[str] = set()
        damaged: list[str] = []
        client = self._client(name, address)
        # What goes to scratch is read besides: it is no measure, and the memory is nobody else's.
        pace = Pace() if source is None else self._pace
        try:
            async with aclosing(self._reads(client, shard, keys, pace)) as reads:
                async for read in reads:
                    for key in read.missing:
                        state = "a damaged copy of" if key in read.corrupt else "no"
                        self._lost(f"storage node {name} (shard {shard}) has {state} chunk {key}")
                        self._damaged_at.setdefault(shard, set()).add(key)
                    self._report.received_bytes += sum(payload.nbytes for _, payload in read.chunks)
                    chunks = [c for c in read.chunks if source is None or self._claim(c[0].key)]
                    got |= await self._take(chunks, region, name, source, damaged)
            # After the reading: a node that fails here has given already what it could.
            if damaged:
                self._damaged_at.setdefault(shard, set()).update(damaged)
                await client.quarantine(*identity, keys=damaged)
        except FastCheckError as error:
            self._unread(shard, name, error, f"{len(got)} of {len(keys)} chunks came")
        finally:
            pace.ended(shard)
            await client.close()
        return got

    async def _reads(
        self, client: PeerClient, shard: int, keys: list[str], pace: Pace
    ) -> AsyncGenerator[Read]:
        """Read chunks of a node, one batch ahead: while one is decoded the next is on its way."""
        identity = (self._manifest.run, self._manifest.generation, self._manifest.token)
        asked: deque[tuple[int, asyncio.Task[Read]]] = deque()
        batches = batches_of(keys, self._manifest.nbytes_of, budget_bytes=_BATCH_BYTES)
        try:
            for batch in chain(batches, [None]):
                if batch is not None:
                    nbytes = sum(map(self._manifest.nbytes_of, batch))
                    asked.append((nbytes, asyncio.create_task(client.read(*identity, keys=batch))))
                if len(asked) > (1 if batch is not None else 0):
                    nbytes, reading = asked[0]
                    pace.asked(shard, nbytes, time.monotonic())
                    read = await reading
                    pace.came(shard, time.monotonic())
                    asked.popleft()
                    yield read
        finally:
            for _, reading in asked:
                reading.cancel()
            await asyncio.gather(*(reading for _, reading in asked), return_exceptions=True)

    async def _take(
        self,
        chunks: list[tuple[Descriptor, Bits]],
        region: Region,
        name: str,
        source: str | None,
        damaged: list[str],
    ) -> set[str]:
        """Decode what a node gave, each chunk into its region; return the good ones, and add to `damaged`."""

        def take(descriptor: Descriptor, payload: Bits) -> None:
            key = descriptor.key
            decode_verified(descriptor, payload, region(key), wanted=self._manifest.digests[key], where=name)
            if source is not None:
                self._settle(key)

        results = await asyncio.gather(
            *(asyncio.to_thread(take, *chunk) for chunk in chunks), return_exceptions=True
        )
        good: set[str] = set()
        for (descriptor, _), result in zip(chunks, results, strict=True):
            if isinstance(result, FastCheckError):
                self._claimed.discard(descriptor.key)
                self._lost(str(result))
                damaged.append(descriptor.key)
            elif isinstance(result, BaseException):
                raise result
            else:
                good.add(descriptor.key)
                if source is not None:
                    self._is_good(descriptor.key, source)
        return good

    def _claim(self, key: str) -> bool:
        """Have a chunk's memory for oneself; False if another source has it, or the chunk is good."""
        if key in self._claimed:
            return False
        self._claimed.add(key)
        return True

    def _is_good(self, key: str, source: str) -> None:
        """Note that a chunk is there, and settled."""
        self._good.add(key)
        self._report.count(source, self._manifest.sizes[key])
        self._progress.set()

    def _take_computed(self, key: str, bits: Bits) -> None:
        """Take a verified chunk that was computed from parity, unless a late node gave it meanwhile."""
        if self._claim(key):
            np.copyto(self._region(key), bits)
            self._settle(key)
            self._report.rebuilt.append(f"chunk {key} was rebuilt from parity")
            self._is_good(key, "parity")

    async def _from_objects(self, keys: list[str]) -> None:
        stored = self._stored
        if stored is None or not keys:
            return
        read = await read_objects(keys, stored, region=self._region, settle=self._settle)
        for key, received in read.items():
            if isinstance(received, FastCheckError):
                self._causes.append(str(received))
                continue
            self._report.received_bytes += received
            self._good.add(key)
            self._report.count("object", self._manifest.sizes[key])
        if self._record is not None and self._record.nodes and not self._without:
            log.warning(
                "generation %d: %d chunks that the storage nodes could not give were asked of the object "
                "tier, %d came",
                self._manifest.generation,
                len(keys),
                sum(key in self._good for key in keys),
            )
