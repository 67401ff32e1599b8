"""Write the chunks of a snapshot to the object tier, encoded or as they are, several at once."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace

from fastcheck_codecs import is_delta, raw_parts

from fastcheck_dask.engine.compression import Meter
from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.plan import batches_of, jobs_for_objects
from fastcheck_dask.engine.planning import Planned
from fastcheck_dask.engine.save import Base, Snapshot
from fastcheck_dask.engine.sending import JOB_BYTES, EncodedChunk, Encoder, in_thread, send_jobs, together
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.nonfinite import has_nonfinite
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import Slot
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.store import Parts, flat_view

#: Raw bytes that one thread writes at a time, and how many do: while some wait for the disk others write.
_RAW_BYTES = 8 * 2**20
_RAW_WRITERS = 6


@dataclass(frozen=True)
class ChunkWriter:
    """Writes chunks to a location, each when its turn comes."""

    folder: CheckpointFolder
    #: Holds them back; None where nothing does.
    pacer: Pacer | None = None

    async def write(self, directory: str, key: str, parts: Parts) -> None:
        """Write one chunk; when this returns or raises, its memory is not used any more."""
        if self.pacer is not None:
            await self.pacer.turn().wait(sum(flat_view(part).nbytes for part in parts))
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
    # Mapped for this save only, and all at once: page by page it would take longer than the digests.
    data = await asyncio.to_thread(lambda: Slot(snapshot.slot).data)
    content = snapshot.content
    batches = batches_of(content.chunks, lambda key: content.chunks[key].nbytes, budget_bytes=_RAW_BYTES)

    def prepare(keys: list[str]) -> tuple[list[tuple[str, Parts]], float]:
        started = time.perf_counter()
        chunks: list[tuple[str, Parts]] = []
        for key in keys:
            at, nbytes = content.piece(key)
            bits, dtype = data[at : at + nbytes], codec_dtype(content.chunks[key].dtype)
            written.digests[key] = digest(bits)
            if has_nonfinite(bits, dtype):
                written.nonfinite.add(key)
            if not elsewhere(key, written.digests[key]):
                chunks.append((key, raw_parts(bits, dtype=dtype)))
        return chunks, time.perf_counter() - started

    async def lane() -> None:
        for keys in batches:
            chunks, seconds = await in_thread(prepare, keys)
            written.meter.encoded(sum(content.chunks[key].nbytes for key in keys), seconds)
            await write_chunks(writer, directory, chunks, written.meter)

    await together(lane() for _ in range(_RAW_WRITERS))


async def write_chunks(
    writer: ChunkWriter, directory: str, chunks: Collection[tuple[str, Parts]], meter: Meter
) -> None:
    """Write chunks at once; when this returns or raises, their memory is not used any more."""
    with meter.sending(sum(flat_view(part).nbytes for _, parts in chunks for part in parts)):
        await together(writer.write(directory, key, parts) for key, parts in chunks)
