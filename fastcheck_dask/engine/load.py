"""Load one checkpoint, chunk by chunk, from the fastest source that has each.

The order is shared memory, the storage nodes in parallel, parity for a chunk that is lost or damaged, the
object tier. Every chunk is verified by the digest in the manifest before it counts; what came damaged is
named, and the node that gave it is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import numpy as np
from fastcheck_codecs import CodecError, PrefixIndex, checksum

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.encode import Bits, digest
from fastcheck_dask.engine.plan import batches_of, parity_dtype
from fastcheck_dask.errors import (
    FastCheckError,
    ShardCorruptError,
    ShardUnavailableError,
    UnrecoverableError,
)
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.parity import combine
from fastcheck_dask.layout.stripes import Stripe, parity_nbytes
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)

#: Raw bytes that are asked of a node by one message.
_BATCH_BYTES = 16 * 2**20
#: Raw bytes of the parity chunks that are in memory at once.
_PARITY_BYTES = 64 * 2**20
#: Raw bytes of the sources of derived chunks that are in memory at once, if nobody asked for the sources.
_SOURCE_BYTES = 64 * 2**20
#: Chunks of the object tier that are read at once.
_OBJECT_READERS = 4


@dataclass
class LoadReport:
    """Where the bytes of a load came from."""

    generation: int
    tag: str
    #: Raw bytes by source: ``"local"``, ``"peers"``, ``"parity"``, ``"object"``, and ``"derived"`` for what
    #: was made here of other chunks.
    raw_bytes: dict[str, int] = field(default_factory=dict)
    #: Encoded bytes that came over the network or from the object tier.
    received_bytes: int = 0
    #: Chunks that were lost or damaged and came from a slower source, each with the reason.
    rebuilt: list[str] = field(default_factory=list)
    #: Newer generations that could not be had, each with the reason.
    skipped: list[str] = field(default_factory=list)
    seconds: float = 0.0

    @property
    def source(self) -> str:
        """The sources that gave anything, joined by ``+``; ``"inline"`` if the manifest held everything."""
        order = ("local", "peers", "parity", "object")
        return "+".join(s for s in order if self.raw_bytes.get(s)) or "inline"

    def count(self, source: str, nbytes: int) -> None:
        """Note that a source gave raw bytes."""
        self.raw_bytes[source] = self.raw_bytes.get(source, 0) + nbytes


#: Gives the memory that a data chunk belongs into: uint8, as long as the chunk.
Region = Callable[[str], Bits]


class ChunkLoader:
    """Loads the chunks of one checkpoint into memory that the caller provides."""

    def __init__(
        self,
        manifest: Manifest,
        region: Region,
        *,
        record: CommitRecord | None,
        client: Callable[[str, str], PeerClient],
        folder: CheckpointFolder | None,
        report: LoadReport,
        newest: bool = True,
    ) -> None:
        self._newest = newest
        self._manifest = manifest
        self._region = region
        self._record = record
        self._client = client
        self._folder = folder
        self._report = report
        #: Chunks whose bits are in their region, verified.
        self._good: set[str] = set()
        #: Why each source did not give what it was asked for.
        self._causes: list[str] = []
        self._damaged_at: dict[int, set[str]] = {}
        #: Nodes that live and do not hold the generation.
        self._without: list[str] = []

    def take_local(self, keys: Iterable[str], slot_bits: Region) -> None:
        """Verify chunks that a slot of this host holds, and copy them unless they are in place already."""
        for key in keys:
            bits = slot_bits(key)
            if digest(bits) != self._manifest.digests[key]:
                self._lost(f"chunk {key} is damaged in shared memory")
                continue
            target = self._region(key)
            if target.ctypes.data != bits.ctypes.data:
                np.copyto(target, bits)
            self._good.add(key)
            self._report.count("local", bits.size)

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
        await self._repair()
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
            await self._from_parity([key for key in keys if key not in self._good])

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
                folder=None,
                report=self._report,
            )
            await loader._from_nodes(batch)
            await loader._repair()
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
            self._good.add(key)
            self._report.count("derived", self._manifest.sizes[key])

    def _cast_one(self, key: str, source_bits: Region) -> str:
        source, dtype = source_bits(self._manifest.sources[key]), self._manifest.chunks[key].dtype
        return digest(cast(source, dtype, out=self._region(key)))

    async def _from_peers(self, keys: list[str]) -> None:
        assert self._manifest.layout is not None
        by_shard: dict[int, list[str]] = {}
        for key in keys:
            by_shard.setdefault(self._manifest.layout.position[key][1], []).append(key)
        await asyncio.gather(
            *(
                self._from_shard(shard, of_shard, self._region, "peers")
                for shard, of_shard in by_shard.items()
            )
        )

    async def _from_shard(self, shard: int, keys: list[str], region: Region, source: str | None) -> set[str]:
        """Get chunks from one node; return those that came, and note why others did not."""
        assert self._record is not None
        name, address = self._record.nodes[shard], self._record.addresses[shard]
        identity = (self._manifest.run, self._manifest.generation, self._manifest.token)
        got: set[str] = set()
        damaged: list[str] = []
        client = self._client(name, address)
        try:
            for batch in batches_of(keys, self._manifest.nbytes_of, budget_bytes=_BATCH_BYTES):
                read = await client.read(*identity, keys=batch)
                for key in read.missing:
                    state = "a damaged copy of" if key in read.corrupt else "no"
                    self._lost(f"storage node {name} (shard {shard}) has {state} chunk {key}")
                    self._damaged_at.setdefault(shard, set()).add(key)
                results = await asyncio.gather(
                    *(asyncio.to_thread(self._decode, d, p, region(d.key), name) for d, p in read.chunks),
                    return_exceptions=True,
                )
                for (descriptor, payload), result in zip(read.chunks, results, strict=True):
                    self._report.received_bytes += payload.nbytes
                    if isinstance(result, FastCheckError):
                        self._lost(str(result))
                        damaged.append(descriptor.key)
                    elif isinstance(result, BaseException):
                        raise result
                    else:
                        got.add(descriptor.key)
                        if source is not None:
                            self._report.count(source, descriptor.raw_nbytes)
            # After the reading: a node that fails here has given already what it could.
            if damaged:
                self._damaged_at.setdefault(shard, set()).update(damaged)
                await client.quarantine(*identity, keys=damaged)
        except FastCheckError as error:
            self._unread(shard, name, error, f"{len(got)} of {len(keys)} chunks came")
        finally:
            await client.close()
        if source is not None:
            self._good |= got
        return got

    def _decode(self, descriptor: Descriptor, payload: Bits, target: Bits, where: str) -> None:
        """Verify and decode one payload into its place."""
        key, got = descriptor.key, checksum(payload)
        if got != descriptor.crc32c:
            raise ShardCorruptError(key, where, f"{descriptor.crc32c:#010x}", f"{got:#010x}")
        self._decode_bits(key, descriptor.dtype, payload, target, where=where)

    def _decode_bits(self, key: str, dtype: str, payload: Bits, target: Bits, *, where: str) -> None:
        try:
            # The digest below is the stronger check; the codec's own would read the bits once more.
            PrefixIndex(dtype=dtype, checksum=False).decode(payload, out=target)
        except CodecError as error:
            raise ShardCorruptError(key, where, self._manifest.digests[key], str(error)) from error
        found = digest(target)
        if found != self._manifest.digests[key]:
            raise ShardCorruptError(key, where, self._manifest.digests[key], found)

    async def _from_parity(self, keys: list[str]) -> None:
        """Rebuild chunks that are the only one missing in their stripe, a bounded number at a time."""
        layout = self._manifest.layout
        if not keys or layout is None or not layout.parity:
            return
        missing_in: dict[int, list[str]] = {}
        for key in keys:
            missing_in.setdefault(layout.position[key][0].id, []).append(key)
        group: list[tuple[Stripe, str]] = []
        size = 0
        for lost in missing_in.values():
            if len(lost) == 1:
                group.append((layout.position[lost[0]][0], lost[0]))
                size += parity_nbytes(group[-1][0], self._manifest.sizes)
            if size >= _PARITY_BYTES:
                await self._rebuild_group(group, layout.shards)
                group, size = [], 0
        if group:
            await self._rebuild_group(group, layout.shards)

    async def _rebuild_group(self, group: list[tuple[Stripe, str]], parity_shard: int) -> None:
        scratch: dict[str, Bits] = {}
        wanted: dict[int, list[str]] = {parity_shard: [stripe.parity_key for stripe, _ in group]}
        for stripe, lost in group:
            for shard, member in enumerate(stripe.members):
                # Only a partial load has not got the other members of a stripe already.
                if member is not None and member != lost and member not in self._good:
                    wanted.setdefault(shard, []).append(member)

        def room(key: str) -> Bits:
            return scratch.setdefault(key, np.empty(self._manifest.nbytes_of(key), np.uint8))

        fetched = await asyncio.gather(
            *(self._from_shard(shard, keys, room, None) for shard, keys in wanted.items())
        )
        came = set().union(*fetched)
        rebuilt = await asyncio.gather(
            *(asyncio.to_thread(self._rebuild, stripe, lost, came, scratch) for stripe, lost in group)
        )
        for (_, key), done in zip(group, rebuilt, strict=True):
            if done:
                self._good.add(key)
                self._report.count("parity", self._manifest.sizes[key])
                self._report.rebuilt.append(f"chunk {key} was rebuilt from parity")

    def _rebuild(self, stripe: Stripe, key: str, came: set[str], scratch: dict[str, Bits]) -> bool:
        others = [k for k in stripe.members if k is not None and k != key]
        if stripe.parity_key not in came or any(k not in self._good and k not in came for k in others):
            return False
        parts = [self._region(k) if k in self._good else scratch[k] for k in others]
        whole = combine([scratch[stripe.parity_key], *parts], np.empty_like(scratch[stripe.parity_key]))
        target = self._region(key)
        np.copyto(target, whole[: target.size])
        found = digest(target)
        if found != self._manifest.digests[key]:
            self._lost(f"chunk {key}: the parity of stripe {stripe.id} gives other bits ({found})")
            return False
        return True

    async def _from_objects(self, keys: list[str]) -> None:
        if self._folder is None or not keys:
            return
        directory = directory_name(self._manifest.generation, self._manifest.tag)
        readers = asyncio.Semaphore(_OBJECT_READERS)

        async def one(key: str) -> None:
            async with readers:
                try:
                    received = await asyncio.to_thread(self._read_object, directory, key)
                except FastCheckError as error:
                    self._causes.append(str(error))
                else:
                    self._report.received_bytes += received
                    self._good.add(key)
                    self._report.count("object", self._manifest.sizes[key])

        await asyncio.gather(*(one(key) for key in keys))
        if self._record is not None and self._record.nodes and not self._without:
            log.warning(
                "generation %d: %d chunks that the storage nodes could not give were asked of the object "
                "tier, %d came",
                self._manifest.generation,
                len(keys),
                sum(key in self._good for key in keys),
            )

    def _read_object(self, directory: str, key: str) -> int:
        assert self._folder is not None
        payload = self._folder.read_chunk(directory, key)
        dtype = codec_dtype(self._manifest.chunks[key].dtype)
        where = f"the object tier ({directory})"
        self._decode_bits(key, dtype, payload, self._region(key), where=where)
        return int(payload.nbytes)

    async def _repair(self) -> None:
        """Give nodes that live and lost single chunks a good copy again."""
        if self._record is None:
            return
        for shard, keys in self._damaged_at.items():
            good = [key for key in sorted(keys) if self._can_make(key)]
            if not good:
                continue
            client = self._client(self._record.nodes[shard], self._record.addresses[shard])
            try:
                for key in good:
                    descriptor, payload = await asyncio.to_thread(self._encoded, key)
                    await client.repair(
                        self._manifest.run,
                        self._manifest.generation,
                        self._manifest.token,
                        chunks=[descriptor],
                        frames=[payload],
                    )
                    log.warning("chunk %s on %s was repaired", key, self._record.nodes[shard])
            except FastCheckError as error:
                log.warning("chunk %s on %s was not repaired: %s", key, self._record.nodes[shard], error)
            finally:
                await client.close()

    def _can_make(self, key: str) -> bool:
        """Say whether the bits of a data or parity chunk are here, or can be made of what is."""
        if key in self._manifest.chunks:
            return key in self._good
        assert self._manifest.layout is not None
        stripe, _ = self._manifest.layout.position[key]
        return all(member in self._good for member in stripe.members if member is not None)

    def _encoded(self, key: str) -> tuple[Descriptor, Bits]:
        if key in self._manifest.chunks:
            bits, dtype = self._region(key), codec_dtype(self._manifest.chunks[key].dtype)
        else:
            assert self._manifest.layout is not None
            members = [m for m in self._manifest.layout.position[key][0].members if m is not None]
            bits = combine(map(self._region, members), np.empty(self._manifest.nbytes_of(key), np.uint8))
            dtype = parity_dtype(self._manifest.chunks[m].dtype for m in members)
        payload = PrefixIndex(dtype=dtype).encode(bits)
        crc = checksum(payload)
        return Descriptor(key, dtype, bits.size, self._manifest.digests[key], crc, payload.nbytes), payload
