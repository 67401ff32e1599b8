"""Arrays and their chunks: contiguous byte ranges that are zarr chunks at the same time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.dtypes import itemsize_of

#: Unless the settings say otherwise.
CHUNK_BYTES = 8 * 2**20
#: Where each array begins in a slot: a cache line.
ALIGNMENT = 64
#: As many axes as numpy and torch have.
MAX_DIMENSIONS = 64


@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous range of one array, in C order."""

    #: ``<array path>/c/<i>/<j>...``: the zarr v3 chunk key.
    key: str
    path: str
    dtype: str
    #: First byte within the array's bits.
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ArraySpec:
    """One stored array: where it stands in the zarr hierarchy, its true dtype, shape and chunk shape."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    chunk_shape: tuple[int, ...]
    #: Path of the float32 array of which this one is the cast (see `layout.casts`): it has that one's shape
    #: and chunk shape, and the storage nodes do not hold it. None for an array that stands by itself.
    source: str | None = None

    @cached_property
    def itemsize(self) -> int:
        """Bytes of one element."""
        return itemsize_of(self.dtype)

    @cached_property
    def nbytes(self) -> int:
        """Bytes of the whole array."""
        return math.prod(self.shape) * self.itemsize

    @cached_property
    def chunk_count(self) -> int:
        """Number of chunks, without making them."""
        if self.nbytes == 0:
            return 0
        return math.prod(-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True))

    @cached_property
    def chunks(self) -> tuple[Chunk, ...]:
        """The chunks in C order; none for an array without elements."""
        if self.nbytes == 0:
            return ()
        counts = [-(-n // c) for n, c in zip(self.shape, self.chunk_shape, strict=True)]
        full = math.prod(self.chunk_shape) * self.itemsize
        found, offset = [], 0
        split_axis = _split_axis(self.chunk_shape)
        row = math.prod(self.shape[split_axis + 1 :]) * self.itemsize if self.shape else self.itemsize
        for index in itertools.product(*(range(n) for n in counts)):
            nbytes = full
            if index:
                rows_left = self.shape[split_axis] - index[split_axis] * self.chunk_shape[split_axis]
                nbytes = min(self.chunk_shape[split_axis], rows_left) * row
            key = "/".join([self.path, "c", *map(str, index)])
            found.append(Chunk(key, self.path, self.dtype, offset, nbytes))
            offset += nbytes
        return tuple(found)

    def index_of(self, chunk: Chunk) -> tuple[slice, ...]:
        """Return where a chunk lies in the array: a slice of each axis."""
        numbers = map(int, chunk.key[len(self.path) + len("/c/") :].split("/"))
        return tuple(
            slice(number * step, min(length, (number + 1) * step))
            for number, step, length in zip(numbers, self.chunk_shape, self.shape, strict=True)
        )


def _split_axis(chunk_shape: tuple[int, ...]) -> int:
    """Return the axis along which chunks are runs: the first whose chunk is longer than 1, else the last."""
    for axis, length in enumerate(chunk_shape):
        if length > 1:
            return axis
    return max(0, len(chunk_shape) - 1)


def is_contiguous(shape: tuple[int, ...], chunk_shape: tuple[int, ...]) -> bool:
    """Say whether chunks of that shape are contiguous byte ranges: a run of one axis, then whole axes."""
    if len(shape) != len(chunk_shape) or 0 in chunk_shape:
        return False
    after = _split_axis(chunk_shape) + 1
    return chunk_shape[after:] == tuple(max(1, n) for n in shape[after:])


def chunk_shape_for(shape: tuple[int, ...], itemsize: int, chunk_bytes: int = CHUNK_BYTES) -> tuple[int, ...]:
    """Choose a chunk shape whose chunks are contiguous byte ranges of at most `chunk_bytes`.

    Size 1 along the leading axes where a row is too large, then a run of one axis (as even as possible),
    then whole axes. An element larger than `chunk_bytes` is a chunk of its own.

    Returns
    -------
    tuple of int
        As long as `shape`, every entry at least 1 and at most ``max(1, n)``.
    """
    if chunk_bytes < 1:
        raise LayoutError(f"chunk_bytes must be at least 1, got {chunk_bytes}")
    chosen = [1] * len(shape)
    row = math.prod(shape) * itemsize
    for axis, length in enumerate(shape):
        row = row // length if length else 0
        if length and row <= chunk_bytes:
            run_at_most = max(1, min(length, chunk_bytes // row if row else length))
            pieces = -(-length // run_at_most)
            chosen[axis:] = [-(-length // pieces), *(max(1, n) for n in shape[axis + 1 :])]
            return tuple(chosen)
    return tuple(max(1, n) for n in shape) if math.prod(shape) == 0 else tuple(chosen)


@dataclass(frozen=True)
class Placement:
    """Where each array begins in a slot."""

    offsets: dict[str, int]
    total_bytes: int


def place(arrays: Iterable[ArraySpec]) -> Placement:
    """Lay arrays one after the other, each at a multiple of `ALIGNMENT`."""
    offsets: dict[str, int] = {}
    end = 0
    for spec in arrays:
        offsets[spec.path] = end
        end += -(-spec.nbytes // ALIGNMENT) * ALIGNMENT
    return Placement(offsets, end)
