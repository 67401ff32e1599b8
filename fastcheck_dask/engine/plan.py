"""What has to be encoded for a save, and from which bytes of the slots. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastcheck_dask.layout.chunks import ArraySpec, Chunk, Placement
from fastcheck_dask.layout.dtypes import codec_dtype, itemsize_of
from fastcheck_dask.layout.stripes import Layout, Stripe, parity_nbytes

#: Chunks that a message to one node carries or names: their descriptors have to fit its header.
MESSAGE_CHUNKS = 512
#: A range of a slot's data: offset and length in bytes.
Piece = tuple[int, int]


@dataclass(frozen=True)
class Content:
    """The arrays of one checkpoint and where their bits lie in a slot."""

    arrays: tuple[ArraySpec, ...]
    placement: Placement
    layout: Layout | None
    _chunks: dict[str, Chunk] = field(default_factory=dict, repr=False, compare=False)

    @property
    def sizes_at_peers(self) -> dict[str, int]:
        """Raw bytes of each data chunk that the storage nodes hold: derived arrays are made of others."""
        return {c.key: c.nbytes for spec in self.arrays if spec.source is None for c in spec.chunks}

    @property
    def chunks(self) -> Mapping[str, Chunk]:
        """The data chunks by key."""
        if not self._chunks:
            self._chunks.update((chunk.key, chunk) for spec in self.arrays for chunk in spec.chunks)
        return self._chunks

    def piece(self, key: str) -> Piece:
        """Return where a data chunk lies."""
        chunk = self.chunks[key]
        return self.placement.offsets[chunk.path] + chunk.offset, chunk.nbytes


@dataclass(frozen=True)
class Task:
    """One chunk to encode: the XOR of `current` pieces, as it is or against the XOR of `base` pieces."""

    key: str
    #: Shard number; the parity shard comes after the data shards. 0 without a peer tier.
    shard: int
    dtype: str
    nbytes: int
    current: tuple[Piece, ...]
    #: None: the chunk goes whole.
    base: tuple[Piece, ...] | None


@dataclass(frozen=True)
class Job:
    """Tasks that are encoded together and sent together: a run of stripes."""

    tasks: tuple[Task, ...]
    #: False: the chunks are stored as they are, whole.
    compress: bool = True

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of all tasks."""
        return sum(task.nbytes for task in self.tasks)


@dataclass(frozen=True)
class CastCheck:
    """One chunk to compare with the cast of another one of the same slot."""

    key: str
    #: Of the chunk that may be the cast.
    dtype: str
    #: Where the float32 chunk lies.
    source: Piece
    #: Where the chunk that may be its cast lies.
    narrow: Piece


def jobs_for_peers(
    content: Content,
    base: Content | None,
    whole: Collection[str],
    *,
    budget_bytes: int,
    only: Collection[str] | None = None,
) -> Iterator[Job]:
    """Plan the encoding of a checkpoint for its shards, stripe by stripe.

    Parameters
    ----------
    content : Content
        What is saved; has a layout.
    base : Content or None
        The committed checkpoint in the other slot, if the nodes hold the very same one.
    whole : collection of str
        Keys that their node has no base for.
    budget_bytes : int
        Most raw bytes of a job, unless a single stripe has more.
    only : collection of str, optional
        Keys to which it is confined.

    Yields
    ------
    Job
        Together they hold every chunk and every parity chunk exactly once; a job has at most
        `MESSAGE_CHUNKS` of a shard.
    """
    assert content.layout is not None
    groups: Iterable[list[Task]] = _stripe_tasks(content, base, whole)
    if only is not None:
        groups = filter(None, ([task for task in group if task.key in only] for group in groups))
    yield from _batched(groups, budget_bytes)


def jobs_for_objects(
    content: Content, keys: Iterable[str] | None = None, *, base: Content | None = None, budget_bytes: int
) -> Iterator[Job]:
    """Plan the encoding of data chunks, all of them or those named: whole, or against a base."""
    chosen = content.chunks if keys is None else keys
    yield from _batched(([_data_task(content, key, 0, base)] for key in chosen), budget_bytes)


def batches_of(
    keys: Iterable[str], nbytes_of: Callable[[str], int], *, budget_bytes: int
) -> Iterator[list[str]]:
    """Split keys, in their order, into what one message to a node may name.

    Each has at most `budget_bytes` raw bytes (or one chunk that has more) and `MESSAGE_CHUNKS` keys.
    """
    batch: list[str] = []
    size = 0
    for key in keys:
        nbytes = nbytes_of(key)
        if batch and (size + nbytes > budget_bytes or len(batch) == MESSAGE_CHUNKS):
            yield batch
            batch, size = [], 0
        batch.append(key)
        size += nbytes
    if batch:
        yield batch


def _batched(groups: Iterable[Sequence[Task]], budget_bytes: int) -> Iterator[Job]:
    waiting: list[Task] = []
    size = count = 0
    for group in groups:
        group_size = sum(task.nbytes for task in group)
        if waiting and (size + group_size > budget_bytes or count == MESSAGE_CHUNKS):
            yield Job(tuple(waiting))
            waiting, size, count = [], 0, 0
        waiting += group
        size += group_size
        count += 1
    if waiting:
        yield Job(tuple(waiting))


def _stripe_tasks(content: Content, base: Content | None, whole: Collection[str]) -> Iterator[list[Task]]:
    assert content.layout is not None
    old: dict[int, Stripe] = {}
    if base is not None and base.layout is not None:
        old = {stripe.id: stripe for stripe in base.layout.stripes}
    sizes = {key: chunk.nbytes for key, chunk in content.chunks.items()}
    for stripe in content.layout.stripes:
        tasks = [
            _data_task(content, key, shard, None if key in whole else base)
            for shard, key in enumerate(stripe.members)
            if key is not None
        ]
        if content.layout.parity:
            before = None if stripe.parity_key in whole else old.get(stripe.id)
            tasks.append(_parity_task(content, stripe, parity_nbytes(stripe, sizes), base, before))
        yield tasks


def _data_task(content: Content, key: str, shard: int, base: Content | None) -> Task:
    chunk = content.chunks[key]
    pieces: tuple[Piece, ...] | None = None
    if base is not None:
        before = base.chunks.get(key)
        if before is not None and (before.dtype, before.nbytes) == (chunk.dtype, chunk.nbytes):
            pieces = (base.piece(key),)
    return Task(key, shard, codec_dtype(chunk.dtype), chunk.nbytes, (content.piece(key),), pieces)


def _parity_task(
    content: Content, stripe: Stripe, nbytes: int, base: Content | None, before: Stripe | None
) -> Task:
    members = [key for key in stripe.members if key is not None]
    pieces: tuple[Piece, ...] | None = None
    if base is not None and before is not None:
        # Beyond the new parity's end the old one does not matter: what was there has vanished.
        pieces = tuple(
            (offset, min(length, nbytes))
            for offset, length in (base.piece(key) for key in before.members if key is not None)
        )
    assert content.layout is not None
    return Task(
        stripe.parity_key,
        content.layout.shards,
        parity_dtype(content.chunks[key].dtype for key in members),
        nbytes,
        tuple(content.piece(key) for key in members),
        pieces,
    )


def parity_dtype(dtypes: Iterable[str]) -> str:
    """Return the dtype by which the codecs split a parity chunk: words as wide as all members have."""
    widths = {itemsize_of(dtype) for dtype in dtypes}
    width = widths.pop() if len(widths) == 1 else 1
    return f"uint{8 * width}" if width in (1, 2, 4, 8) else "uint8"


def stripes_to_rebuild(
    layout: Layout,
    keys: Iterable[str],
    sizes: Mapping[str, int],
    *,
    awaited: Collection[str],
    budget_bytes: int,
) -> list[tuple[Stripe, str]]:
    """Choose data chunks that can be rebuilt from parity now.

    Parameters
    ----------
    layout : Layout
        Of the checkpoint.
    keys : iterable of str
        The chunks that are missed.
    sizes : mapping of str to int
        Raw bytes of the data chunks.
    awaited : collection of str
        Chunks that are still on their way: a stripe that needs another one of them has to wait.
    budget_bytes : int
        Most raw bytes of the parity chunks, unless a single one has more.

    Returns
    -------
    list of (Stripe, str)
        Each chunk with its stripe; empty without parity.
    """
    group: list[tuple[Stripe, str]] = []
    size = 0
    for key in keys if layout.parity else ():
        stripe = layout.position[key][0]
        if any(member in awaited for member in stripe.members if member != key):
            continue
        size += parity_nbytes(stripe, sizes)
        if group and size > budget_bytes:
            break
        group.append((stripe, key))
    return group
