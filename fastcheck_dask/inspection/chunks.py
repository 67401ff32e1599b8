"""Read chunks of committed checkpoints from the object tier; every one is verified before it counts."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import chain, islice
from typing import TypeVar

import numpy as np
from fastcheck_codecs import CodecError, PrefixIndex, is_delta

from fastcheck_dask.engine.encode import Bits, digest
from fastcheck_dask.errors import ShardCorruptError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec, Chunk
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")

#: Objects that are read at once: reading waits for the store, and decoding is done outside the GIL.
READERS = 4
#: What a reader takes at a time: handing over small objects one by one costs more than reading them.
_BATCH_ITEMS = 16
_BATCH_BYTES = 2**20


class ChunkReader:
    """Reads the chunks of one checkpoint; any thread may call it.

    With the marker, chunks that are stored against another checkpoint are found, too.
    """

    def __init__(
        self, folder: CheckpointFolder, manifest: Manifest, marker: CommitMarker | None = None
    ) -> None:
        self.folder, self.manifest = folder, manifest
        #: The same, if it is not whole.
        self.stored: StoredCheckpoint | None = None
        if marker is not None and marker.needs.links:
            self.stored = StoredCheckpoint(folder, marker, manifest)
        self.directory = directory_name(manifest.generation, manifest.tag)

    def read(self, chunk: Chunk, out: Bits | None = None) -> Bits:
        """Return the raw bits of a chunk.

        Parameters
        ----------
        chunk : Chunk
            Of the manifest.
        out : ndarray of uint8, shape (nbytes,), optional
            Receives them.

        Raises
        ------
        ShardUnavailableError
            If it is missing or empty.
        ShardCorruptError
            If it cannot be decoded, or decodes to other bits than were saved.
        """
        if self.stored is not None:
            return self.stored.read(chunk.key, out=out)[0]
        payload = self.folder.read_chunk(self.directory, chunk.key)
        return decoded(payload, chunk, want=self.manifest.digests[chunk.key], where=self.where, out=out)

    def before(self, chunk: Chunk, payload: Bits) -> Bits | None:
        """Return the bits against which a chunk is a delta; None if it is whole. Raises as :meth:`read`."""
        base = None if self.stored is None else self.stored.base
        return base.read(chunk.key)[0] if base is not None and is_delta(payload) else None

    @property
    def where(self) -> str:
        """The checkpoint, as errors name it."""
        return f"{self.directory} in {self.folder.store.location}"

    def read_range(self, spec: ArraySpec, start: int, stop: int) -> Bits:
        """Return bytes of an array; only the chunks that hold them are read.

        Parameters
        ----------
        spec : ArraySpec
            Of the manifest.
        start, stop : int
            Bytes within the array's bits, in C order.

        Returns
        -------
        ndarray of uint8, shape (stop - start,)
            Writable, and nobody else's.
        """
        out = np.empty(max(0, stop - start), np.uint8)
        wanted = [c for c in spec.chunks if c.offset < stop and c.offset + c.nbytes > start]

        def place(chunk: Chunk) -> None:
            first, last = max(start, chunk.offset), min(stop, chunk.offset + chunk.nbytes)
            target = out[first - start : last - start]
            if target.size == chunk.nbytes:
                self.read(chunk, target)
            else:
                np.copyto(target, self.read(chunk)[first - chunk.offset : last - chunk.offset])

        for _ in in_order(wanted, place, nbytes=lambda chunk: chunk.nbytes):
            pass
        return out


def decoded(payload: Bits, chunk: Chunk, *, want: str, where: str, out: Bits | None = None) -> Bits:
    """Return the bits of an encoded chunk, after comparing them with their digest.

    Parameters
    ----------
    payload : ndarray of uint8, shape (n,)
        The encoded chunk, whatever it may be.
    chunk : Chunk
        What it has to be.
    want : str
        Digest of its bits.
    where : str
        For the message of an error.
    out : ndarray of uint8, shape (nbytes,), optional
        Receives the bits.

    Raises
    ------
    ShardCorruptError
        If it is anything else.
    """
    if out is None:
        out = np.empty(chunk.nbytes, np.uint8)
    try:
        # The digest is the stronger check; the codec's own would read the bits once more.
        PrefixIndex(dtype=codec_dtype(chunk.dtype), checksum=False).decode(payload, out=out)
    except CodecError as error:
        raise ShardCorruptError(chunk.key, where, want, str(error)) from error
    if (got := digest(out)) != want:
        raise ShardCorruptError(chunk.key, where, want, got)
    return out


def in_order(
    items: Iterable[_Item],
    action: Callable[[_Item], _Result],
    *,
    nbytes: Callable[[_Item], int] = lambda _: _BATCH_BYTES,
) -> Iterator[_Result]:
    """Yield what an action returns for each item, in order, several being worked on at once.

    Parameters
    ----------
    items : iterable
        Whatever the action takes.
    action : callable
        Is called from several threads; what it raises is raised here.
    nbytes : callable
        Says how large an item is: small ones are handed over together.

    Notes
    -----
    No more results wait than the readers have under way: the memory does not grow with the number of items.
    """

    def work(batch: list[_Item]) -> list[_Result]:
        return [action(item) for item in batch]

    batches = _batches(items, nbytes)
    some = list(islice(batches, 2))
    if len(some) < 2:
        for batch in some:
            yield from map(action, batch)
        return
    queue: deque[Future[list[_Result]]] = deque()
    pool = ThreadPoolExecutor(READERS)
    try:
        for batch in chain(some, batches):
            queue.append(pool.submit(work, batch))
            if len(queue) > READERS:
                yield from queue.popleft().result()
        while queue:
            yield from queue.popleft().result()
    finally:
        pool.shutdown(cancel_futures=True)


def _batches(items: Iterable[_Item], nbytes: Callable[[_Item], int]) -> Iterator[list[_Item]]:
    batch: list[_Item] = []
    total = 0
    for item in items:
        batch.append(item)
        total += nbytes(item)
        if len(batch) == _BATCH_ITEMS or total >= _BATCH_BYTES:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch
