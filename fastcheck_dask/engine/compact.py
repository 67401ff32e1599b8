"""Make a checkpoint that needs others whole, so that it needs nothing else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial

from distributed import Client
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.engine.plan import batches_of
from fastcheck_dask.errors import CheckpointNotFoundError, TierError
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

_THREADS = 4
#: Raw bytes of the chunks that one call makes whole.
_BATCH_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Compacted:
    """What became of one checkpoint."""

    generation: int
    tag: str
    #: Chunks that were written; 0 if it was whole already.
    chunks: int
    written_bytes: int


def compact(location: str, *, tag: str | None, scheduler: str | None = None) -> Iterator[Compacted]:
    """Make checkpoints whole, one after the other. Idempotent, also after it was cut short.

    Parameters
    ----------
    location : str
        Where they lie. The run may be going on.
    tag : str or None
        The newest checkpoint of that name; None: all, oldest first.
    scheduler : str, optional
        Address of a Dask scheduler whose workers do it, and reach the location under the same name. Without
        it, threads of this process do.

    Yields
    ------
    Compacted
        After each.

    Raises
    ------
    CheckpointNotFoundError
        If there is none at all, or none of that name.
    CorruptDataError, ShardUnavailableError
        If a checkpoint or one that it needs is damaged: it stays as it was.
    """
    folder = CheckpointFolder(open_store(location))
    committed = folder.committed()
    if not committed:
        raise CheckpointNotFoundError(f"{location} has no committed checkpoint")
    chosen = committed if tag is None else [m for m in committed if m.tag == tag][-1:]
    if not chosen:
        newest = ", ".join(marker.tag for marker in reversed(committed[-8:]))
        raise CheckpointNotFoundError(f"{location} has no checkpoint {tag!r}; the newest tags are: {newest}")
    yield from compact_chosen([(folder, marker) for marker in chosen], scheduler=scheduler)


def compact_chosen(
    chosen: Iterable[tuple[CheckpointFolder, CommitMarker]], *, scheduler: str | None = None
) -> Iterator[Compacted]:
    """Do the same with checkpoints of any locations; see :func:`compact`."""
    with contextlib.nullcontext() if scheduler is None else _client(scheduler) as client:
        for folder, marker in chosen:
            yield _compact(folder, marker, client)


def _client(scheduler: str) -> Client:
    try:
        return Client(scheduler, set_as_default=False)  # type: ignore[no-untyped-call]
    except OSError as error:
        raise TierError(f"the scheduler {scheduler} does not answer: {error}") from error


def _compact(folder: CheckpointFolder, marker: CommitMarker, client: Client | None) -> Compacted:
    stored = StoredCheckpoint(folder, marker)
    manifest = stored.manifest
    if not marker.needs.links:
        if not folder.is_shown_whole(marker, manifest):
            # Of two authors, the slower one may have described it in its own way.
            folder.make_whole(marker, manifest)
        return Compacted(marker.generation, marker.tag, 0, 0)
    batches = list(batches_of(manifest.chunks, manifest.nbytes_of, budget_bytes=_BATCH_BYTES))
    work = partial(write_whole, folder.store.location, marker.directory)
    results = _mapped(work, batches, client)
    folder.make_whole(marker, manifest)
    return Compacted(marker.generation, marker.tag, sum(r[0] for r in results), sum(r[1] for r in results))


def _mapped(
    work: partial[tuple[int, int]], batches: Sequence[list[str]], client: Client | None
) -> list[tuple[int, int]]:
    if client is not None:
        futures = client.map(work, batches, pure=False)
        return list(client.gather(futures))  # type: ignore[no-untyped-call]
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="fastcheck-compact") as threads:
        return list(threads.map(work, batches))


def write_whole(location: str, directory: str, keys: Iterable[str]) -> tuple[int, int]:
    """Write chunks of a checkpoint whole where they are not; return how many and their encoded bytes.

    Each is verified first, by the digests along its chain. A reader that comes meanwhile finds a delta or the
    whole chunk, and can tell which.
    """
    folder = CheckpointFolder(open_store(location))
    marker = folder.marker(directory)
    if marker is None:
        raise CheckpointNotFoundError(f"{directory} is not in {location} any more")
    stored = StoredCheckpoint(folder, marker)
    chunks = written = 0
    for key in keys:
        bits, _ = stored.read(key)
        if stored.is_whole_here(key):
            continue
        payload = PrefixIndex(dtype=codec_dtype(stored.manifest.chunks[key].dtype)).encode(bits)
        folder.write_chunk(directory, key, payload)
        chunks += 1
        written += payload.nbytes
    return chunks, written
