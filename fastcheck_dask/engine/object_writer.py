"""Write the chunks of a snapshot to the object tier, encoded or as they are, several at once."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace

from fastcheck_codecs import is_delta, raw_parts

from fastcheck_dask.engine.compression import Meter
from fastcheck_dask.engine.encode import look
from fastcheck_dask.engine.plan import batches_of, jobs_for_objects
from fastcheck_dask.engine.planning import Planned
from fastcheck_dask.engine.save import Base, Snapshot
from fastcheck_dask.engine.sending import JOB_BYTES, EncodedChunk, Encoder, in_thread, send_jobs, together
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import Slot
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.store import Parts, flat_view

#: Raw bytes that a thread writes before it waits for the disk, at least and at most; and how many threads do.
#: While one waits the others use the cores; more would only take the cache from each other.
_RAW_BYTES = 8 * 2**20
_RAW_BYTES_LIMIT = 64 * 2**20
_RAW_WRITERS = min(6, 1 + len(os.sched_getaffinity(0)))
#: The same for what goes over a network: it is held back in small pieces, and some wait while others send.
_SENT_BYTES = 8 * 2**20
_SENDERS = 6


@dataclass(frozen=True)
class ChunkWriter:
    """Writes chunks to a location, when their turn comes."""

    folder: CheckpointFolder
    #: Holds them back; None where nothing does.
    pacer: Pacer | None = None

    async def write(self, directory: str, chunks: Iterable[tuple[str, Parts]]) -> None:
        """Write chunks; when this returns or raises, their memory is not used any more.

        They are made by a thread: where nothing holds them back each is written as soon as it is made.
        """
        if self.pacer is None:
            await in_thread(self.folder.write_chunks, directory, chunks)
        else:
            made: list[tuple[str, Parts]] = await in_thread(list, chunks)
            await together(self._write_paced(self.pacer, directory, *chunk) for chunk in made)

    async def _write_paced(self, pacer: Pacer, directory: str, key: str, parts: Parts) -> None:
        await pacer.turn().wait(sum(flat_view(part).nbytes for part in parts))
        await in_thread(self.folder.write_chunk, directory, key, parts)


@dataclass
class Written:
    """A snapshot whose chunks are in the object tier."""

    #: How they lie there.
    planned: Planned
    digests: dict[str, str] = field(default_factory=dict)
    #: Keys of the chunks that hold a NaN or an infinity.
    nonfinite: set[str] = field(default_factory=set)
    #: How many went as deltas.
    deltas: int = 0
    #: Of the encoders, or of this process where nothing is compressed, and of the object tier.
    meter: Meter = field(default_factory=Meter)


def only_alike(before: Base, stored: Manifest) -> Base:
    """Return what a slot holds, confined to the arrays that are the same in the object tier.

    Of an older group the slot has other bits than are stored under the same token: no delta may be made
    against them.
    """
    digests = before.manifest.digests
    alike = tuple(
        spec
        for spec in before.content.arrays
        if all(digests[chunk.key] == stored.digests.get(chunk.key) for chunk in spec.chunks)
    )
    return replace(before, content=replace(before.content, arrays=alike, _chunks={}))


async def write_encoded(
    writer: ChunkWriter,
    directory: str,
    snapshot: Snapshot,
    *,
    encoder: Encoder,
    before: Base | None,
    elsewhere: Callable[[str, str], bool],
    written: Written,
) -> None:
    """Have the chunks encoded, and write them.

    Parameters
    ----------
    writer, directory : ChunkWriter, str
        Where to.
    snapshot : Snapshot
        What is written.
    encoder : Encoder
        Encodes it.
    before : Base or None
        The checkpoint in the other slot, if deltas against it are wanted.
    elsewhere : callable
        Says of the key and the digest of a chunk whether another checkpoint has it: then it is not written.
    written : Written
        Is told what was done.
    """

    async def write(chunks: list[EncodedChunk]) -> None:
        for chunk in chunks:
            written.meter.encoded(chunk.raw_nbytes, chunk.encode_seconds)
            written.digests[chunk.key] = chunk.digest
            if chunk.nonfinite:
                written.nonfinite.add(chunk.key)
        apart = [chunk for chunk in chunks if not elsewhere(chunk.key, chunk.digest)]
        await write_chunks(writer, directory, [(c.key, (c.payload,)) for c in apart], written.meter)
        written.deltas += sum(is_delta(chunk.payload) for chunk in apart)

    base = None if before is None else before.content
    jobs = list(jobs_for_objects(snapshot.content, base=base, budget_bytes=JOB_BYTES))
    await send_jobs(encoder, jobs, write, snapshot.slot, None if before is None else before.slot)


async def write_raw(
    writer: ChunkWriter,
    directory: str,
    snapshot: Snapshot,
    *,
    elsewhere: Callable[[str, str], bool],
    written: Written,
) -> None:
    """Write the chunks from where they lie in the slot: no encoder, and no copy. See `write_encoded`."""
    data = await asyncio.to_thread(lambda: (snapshot.opened or Slot(snapshot.slot)).data)
    content = snapshot.content

    def made(keys: list[str], done: _Done) -> Iterator[tuple[str, Parts]]:
        for key in keys:
            started = time.perf_counter()
            at, nbytes = content.piece(key)
            bits, dtype = data[at : at + nbytes], codec_dtype(content.chunks[key].dtype)
            found = look(bits, dtype)
            written.digests[key] = found.digest
            if found.nonfinite:
                written.nonfinite.add(key)
            parts = raw_parts(bits, dtype=dtype, crc=found.crc32c)
            done.raw_bytes += nbytes
            done.seconds += time.perf_counter() - started
            if not elsewhere(key, found.digest):
                done.sent_bytes += sum(part.nbytes for part in parts)
                yield key, parts

    sizes = {key: content.chunks[key].nbytes for key in content.chunks}
    lanes, turn_bytes = _SENDERS, _SENT_BYTES
    if writer.pacer is None:
        lanes, turn_bytes = _RAW_WRITERS, sum(sizes.values()) // _RAW_WRITERS
        turn_bytes = min(max(turn_bytes, _RAW_BYTES), _RAW_BYTES_LIMIT)
    batches = batches_of(sizes, sizes.__getitem__, budget_bytes=turn_bytes)

    async def lane() -> None:
        for keys in batches:
            done = _Done()
            with written.meter.sending(0):
                await writer.write(directory, made(keys, done))
            written.meter.sent_bytes += done.sent_bytes
            written.meter.encoded(done.raw_bytes, done.seconds)

    await together(lane() for _ in range(lanes))


@dataclass
class _Done:
    """What a thread did in its turn."""

    raw_bytes: int = 0
    sent_bytes: int = 0
    #: Without the writing.
    seconds: float = 0.0


async def write_chunks(
    writer: ChunkWriter, directory: str, chunks: Collection[tuple[str, Parts]], meter: Meter
) -> None:
    """Write chunks at once; when this returns or raises, their memory is not used any more."""
    with meter.sending(sum(flat_view(part).nbytes for _, parts in chunks for part in parts)):
        await writer.write(directory, chunks)
