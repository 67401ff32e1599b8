"""Copy a state into a slot: the only part of a save that training waits for."""

from __future__ import annotations

import time

from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.ids import new_token
from fastcheck_dask.layout.chunks import place
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import FlatState
from fastcheck_dask.tiers.local import Slot, SlotState

_REUSABLE = (SlotState.EMPTY, SlotState.COMMITTED)


def take_snapshot(slot: Slot, flat: FlatState, tag: str) -> None:
    """Copy a state into a free slot; whatever is interrupted leaves the slot empty.

    Raises
    ------
    TierFullError
        If the local tier has no room.
    TierError
        If the slot's files cannot be written for another reason.
    """
    placement = place(flat.arrays)
    token = new_token()
    _make_ready(slot, placement.total_bytes)
    try:
        slot.begin(token, tag)
        data = slot.data
        for spec, source in zip(flat.arrays, flat.sources, strict=True):
            start = placement.offsets[spec.path]
            copy_bits(source, data[start : start + spec.nbytes])
        document = describe(
            token=token, tag=tag, created_unix=time.time(), tree=flat.tree, arrays=flat.arrays
        )
        slot.complete(document, placement.total_bytes, token=token)
    except BaseException:
        slot.clear()
        raise


def _make_ready(slot: Slot, total_bytes: int) -> None:
    try:
        reusable = slot.status.state in _REUSABLE
    except CorruptDataError:
        reusable = False
    if not reusable:
        slot.clear()
    slot.reserve(total_bytes)
