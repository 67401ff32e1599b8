"""Which part of an array, as one range of elements in C order, an index needs. Pure."""

from __future__ import annotations

import math
import operator
from typing import Any, NamedTuple

import numpy as np


class Span(NamedTuple):
    """A contiguous range of elements, and how to get from it to what was asked for."""

    #: Elements, in C order.
    start: int
    stop: int
    #: Shape of the range.
    block: tuple[int, ...]
    #: Index into the block that gives what the whole index gives of the whole array.
    rest: tuple[Any, ...]


def span(shape: tuple[int, ...], key: Any) -> Span:
    """Return the range that an index needs.

    Whole numbers along the leading axes and one slice after them narrow it; everything else is left to numpy.

    Parameters
    ----------
    shape : tuple of int
        Of the array; at least one axis.
    key : object
        As given to ``array[...]``.

    Raises
    ------
    IndexError
        If a leading whole number is out of range.

    Examples
    --------
    >>> span((10, 4), (2, slice(1, 3)))
    Span(start=9, stop=11, block=(1, 2), rest=(0, slice(None, None, None)))
    """
    keys = key if isinstance(key, tuple) else (key,)
    start, block, rest = 0, list(shape), list(keys)
    for axis, item in enumerate(keys):
        if axis >= len(shape):
            break
        row = math.prod(shape[axis + 1 :])
        if isinstance(item, slice):
            chosen = range(*item.indices(shape[axis]))
            low, high = (min(chosen), max(chosen) + 1) if chosen else (0, 0)
            start += low * row
            block[axis] = high - low
            # The block begins and ends with elements that are chosen, whichever way the slice goes.
            rest[axis] = slice(None, None, item.step)
            break
        index = _whole_number(item)
        if index is None:
            break
        if not -shape[axis] <= index < shape[axis]:
            raise IndexError(f"index {index} is out of bounds for axis {axis} with size {shape[axis]}")
        start += index % shape[axis] * row
        block[axis] = 1
        rest[axis] = 0
    return Span(start, start + math.prod(block), tuple(block), tuple(rest))


def _whole_number(item: object) -> int | None:
    # numpy takes a bool for a mask, and an array for a list of indices.
    if isinstance(item, bool | np.bool_ | np.ndarray):
        return None
    try:
        return operator.index(item)  # type: ignore[arg-type]
    except TypeError:
        return None
