"""Cuts the buffers of a message into what crosses at once: parts of large ones, many small ones together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Final

from fastcheck_dask.tiers.pacing import PIECE_BYTES

#: Buffers up to this cross together, up to such a cost: a call of the system for each would take longer than
#: copying them, and thousands of them would keep a loop to themselves.
_SMALL_BYTES: Final = 16 * 2**10
_JOINED_COST: Final = 512 * 2**10
#: What a buffer costs besides its bytes, told in bytes.
_BUFFER_COST: Final = 4 * 2**10


def pieces_of(views: Iterable[memoryview]) -> Iterator[list[memoryview]]:
    """Yield what crosses at once: a part of one buffer, or several whole ones; nothing is ever empty.

    Parameters
    ----------
    views : iterable of memoryview
        Of bytes, in the order in which they cross. They are taken as they are needed.
    """
    joined: list[memoryview] = []
    cost = 0
    for view in views:
        if joined and (view.nbytes > _SMALL_BYTES or cost + cost_of([view]) > _JOINED_COST):
            yield joined
            joined, cost = [], 0
        if view.nbytes > _SMALL_BYTES:
            for start in range(0, view.nbytes, PIECE_BYTES):
                yield [view[start : start + PIECE_BYTES]]
        elif view.nbytes:
            joined.append(view)
            cost += cost_of([view])
    if joined:
        yield joined


def cost_of(piece: list[memoryview]) -> int:
    """Return what a piece takes of its loop's time, told in bytes."""
    return sum(view.nbytes + _BUFFER_COST for view in piece)
