"""What has to be encoded for a save, and from which bytes of the slots. Pure."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from fastcheck_dask.layout.chunks import ArraySpec, Chunk, Placement
from fastcheck_dask.layout.dtypes import codec_dtype, itemsize_of
from fastcheck_dask.layout.stripes import MAX_PARITY, Layout, Stripe, parity_nbytes

#: Chunks that a message to one node carries or names: their descriptors have to fit its header.
MESSAGE_CHUNKS = 512
#: The first job of a save for storage nodes has this part of the bytes of one, and each one after it twice as
#: many: the links have something to do while a larger one is being encoded.
FIRST_PART = 8
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
    #: Shard number; the parity shards come after the data shards. 0 without a peer tier.
    shard: int
    dtype: str
    nbytes: int
    current: tuple[Piece, ...]
    #: None: the chunk goes whole.
    base: tuple[Piece, ...] | None
    #: Piece number i counts times 2 to the power of ``exponent * i``, see `layout.parity`: 1 for the second
    #: parity chunk of a stripe, whose pieces are those of all shards, 0 for every other chunk.
    exponent: int = 0


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
        Most raw bytes of a job, unless a single stripe has more. The first ones have less.
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
    yield from _batched(groups, budget_bytes, first_bytes=max(1, budget_bytes // FIRST_PART))


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


def _batched(
    groups: Iterable[Sequence[Task]], budget_bytes: int, *, first_bytes: int | None = None
) -> Iterator[Job]:
    waiting: list[Task] = []
    size = count = 0
    limit = budget_bytes if first_bytes is None else first_bytes
    for group in groups:
        group_size = sum(task.nbytes for task in group)
        if waiting and (size + group_size > limit or count == MESSAGE_CHUNKS):
            yield Job(tuple(waiting))
            waiting, size, count = [], 0, 0
            limit = min(2 * limit, budget_bytes)
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
        nbytes = parity_nbytes(stripe, sizes)
        for number, key in enumerate(stripe.parity_keys(content.layout.parity)):
            before = None if key in whole else old.get(stripe.id)
            tasks.append(_parity_task(content, stripe, nbytes, base, before, number=number))
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
    content: Content, stripe: Stripe, nbytes: int, base: Content | None, before: Stripe | None, *, number: int
) -> Task:
    pieces: tuple[Piece, ...] | None = None
    if base is not None and before is not None:
        # Beyond the new parity's end the old one does not matter: what was there has vanished.
        pieces = tuple((at, min(length, nbytes)) for at, length in _pieces(base, before, number))
    assert content.layout is not None
    return Task(
        stripe.parity_keys(MAX_PARITY)[number],
        content.layout.shards + number,
        parity_dtype(content.chunks[key].dtype for key in stripe.members if key is not None),
        nbytes,
        tuple(_pieces(content, stripe, number)),
        pieces,
        exponent=number,
    )


def _pieces(content: Content, stripe: Stripe, number: int) -> Iterator[Piece]:
    """Yield where the members of a stripe lie; for the second parity also that a hole is empty."""
    for key in stripe.members:
        if key is not None:
            yield content.piece(key)
        elif number:
            yield 0, 0


def parity_dtype(dtypes: Iterable[str]) -> str:
    """Return the dtype by which the codecs split a parity chunk: words as wide as all members have."""
    widths = {itemsize_of(dtype) for dtype in dtypes}
    width = widths.pop() if len(widths) == 1 else 1
    return f"uint{8 * width}" if width in (1, 2, 4, 8) else "uint8"
