"""Compare two checkpoints: which tensors changed, and by how much."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.inspection.checkpoint import Checkpoint
from fastcheck_dask.inspection.chunks import in_order
from fastcheck_dask.inspection.contents import ArrayEntry, entries, plain_values
from fastcheck_dask.inspection.numbers import as_numbers
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.dtypes import itemsize_of


@dataclass
class Change:
    """How one tensor differs; the figures are of finite values."""

    path: str
    dtype: str
    shape: tuple[int, ...]
    elements: int
    #: Whose bits differ.
    changed_elements: int = 0
    max_abs: float = 0.0
    #: NaNs and infinities before and after.
    nan: tuple[int, int] = (0, 0)
    inf: tuple[int, int] = (0, 0)
    #: Sums of squares: of the difference, and of what was before. None where the elements are no numbers.
    difference_squares: float | None = 0.0
    before_squares: float = 0.0

    @property
    def changed_share(self) -> float:
        """Elements whose bits differ, of all."""
        return self.changed_elements / self.elements if self.elements else 0.0

    @property
    def relative_l2(self) -> float | None:
        """Length of the difference by the length of what was before; infinite if that was zero."""
        if self.difference_squares is None:
            return None
        if self.difference_squares == 0.0:
            return 0.0
        return math.sqrt(self.difference_squares / self.before_squares) if self.before_squares else math.inf


@dataclass(frozen=True)
class Difference:
    """What differs between two checkpoints."""

    before: str
    after: str
    changed: tuple[Change, ...]
    unchanged: tuple[str, ...]
    new: tuple[str, ...]
    removed: tuple[str, ...]
    #: Of another dtype or shape, each with both.
    other_form: dict[str, str] = field(default_factory=dict)
    #: Plain values that differ, each with both.
    values: dict[str, tuple[Any, Any]] = field(default_factory=dict)

    @property
    def equal(self) -> bool:
        """Whether the two hold the same."""
        return not (self.changed or self.new or self.removed or self.other_form or self.values)


def compare(
    before: Checkpoint, after: Checkpoint, *, advance: Callable[[int], None] = lambda _: None
) -> Difference:
    """Compare two checkpoints, of one location or of two.

    Parameters
    ----------
    before, after : Checkpoint
        Opened.
    advance : callable
        Is called with the bytes of each tensor after it was compared.

    Raises
    ------
    ShardUnavailableError, ShardCorruptError
        If a chunk that has to be read is missing or damaged.

    Notes
    -----
    Tensors whose chunks have the same digests are equal, and are not read. Of the others a few chunks are in
    memory at once.
    """
    old = {entry.path: entry for entry in entries(before.manifest)}
    new = {entry.path: entry for entry in entries(after.manifest)}
    changed, unchanged, other_form = [], [], {}
    for path in old.keys() & new.keys():
        first, second = old[path], new[path]
        if (first.spec.dtype, first.shape, first.spec.shape) != (
            second.spec.dtype,
            second.shape,
            second.spec.shape,
        ):
            other_form[path] = f"{first.spec.dtype} {first.shape} became {second.spec.dtype} {second.shape}"
        elif is_equal(before, after, (first, second)):
            unchanged.append(path)
        else:
            found = change_of(before, after, (first, second))
            # Digests of other chunks may stand for the same bits.
            (changed.append(found) if found.changed_elements else unchanged.append(path))
        advance(second.nbytes)
    order = {path: number for number, path in enumerate([*old, *new])}
    return Difference(
        f"{before.reader.where}",
        f"{after.reader.where}",
        tuple(sorted(changed, key=lambda change: order[change.path])),
        tuple(sorted(unchanged, key=order.__getitem__)),
        tuple(path for path in new if path not in old),
        tuple(path for path in old if path not in new),
        dict(sorted(other_form.items(), key=lambda item: order[item[0]])),
        _different_values(plain_values(before.manifest), plain_values(after.manifest)),
    )


def is_equal(before: Checkpoint, after: Checkpoint, pair: tuple[ArrayEntry, ArrayEntry]) -> bool:
    """Say whether two arrays of one form are sure to be equal, without reading them."""
    first, second = pair
    if first.bits is not None or second.bits is not None:
        return first.bits == second.bits
    return first.spec.chunk_shape == second.spec.chunk_shape and all(
        before.manifest.digests[one.key] == after.manifest.digests[other.key]
        for one, other in zip(first.spec.chunks, second.spec.chunks, strict=True)
    )


def change_of(before: Checkpoint, after: Checkpoint, pair: tuple[ArrayEntry, ArrayEntry]) -> Change:
    """Read two arrays of one form, and say how they differ."""
    first, second = pair
    spec = second.spec
    found = Change(second.path, spec.dtype, second.shape, math.prod(spec.shape))

    def read(span: tuple[int, int]) -> tuple[Bits, Bits]:
        return _range(before, first, *span), _range(after, second, *span)

    for one, other in in_order(_spans(spec), read, nbytes=lambda span: span[1] - span[0]):
        _add(found, one, other)
    return found


def _range(checkpoint: Checkpoint, entry: ArrayEntry, start: int, stop: int) -> Bits:
    if entry.bits is not None:
        return np.frombuffer(entry.bits, np.uint8)[start:stop]
    return checkpoint.reader.read_range(entry.spec, start, stop)


def _spans(spec: ArraySpec) -> list[tuple[int, int]]:
    """Cut an array where its chunks begin; one that lies in the manifest is a chunk by itself."""
    return [(chunk.offset, chunk.offset + chunk.nbytes) for chunk in spec.chunks]


def _add(change: Change, before: Bits, after: Bits) -> None:
    """Add a range of elements to what is known of a tensor."""
    width = itemsize_of(change.dtype)
    differ = (before.reshape(-1, width) != after.reshape(-1, width)).any(axis=1)
    change.changed_elements += int(differ.sum())
    old, new = as_numbers(before, change.dtype), as_numbers(after, change.dtype)
    if old is None or new is None:
        change.difference_squares = None
        return
    change.nan = (change.nan[0] + _sum(np.isnan(old)), change.nan[1] + _sum(np.isnan(new)))
    change.inf = (change.inf[0] + _sum(np.isinf(old)), change.inf[1] + _sum(np.isinf(new)))
    finite = np.isfinite(old) & np.isfinite(new)
    if not finite.all():
        old, new = old[finite], new[finite]
    if old.size:
        change.before_squares += float(np.dot(old, old))
        new -= old
        assert change.difference_squares is not None
        change.difference_squares += float(np.dot(new, new))
        change.max_abs = max(change.max_abs, float(np.abs(new).max()))


def _sum(mask: npt.NDArray[np.bool_]) -> int:
    return int(np.count_nonzero(mask))


def _different_values(before: dict[str, Any], after: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    paths = dict.fromkeys([*before, *after])
    pairs = {path: (before.get(path), after.get(path)) for path in paths}
    return {
        path: pair
        for path, pair in pairs.items()
        # NaN differs from itself, and True is not 1.
        if (path in before) != (path in after) or repr(pair[0]) != repr(pair[1])
    }
