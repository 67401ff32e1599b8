"""Copy a state into a slot, and hand it over: the only part of a save that training waits for."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager

from fastcheck_dask.config import OnBusy
from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.errors import (
    ClosedError,
    CorruptDataError,
    FastCheckError,
    FencedError,
    RunInUseError,
    SaveBusyError,
    TierError,
)
from fastcheck_dask.ids import new_token
from fastcheck_dask.layout.chunks import place
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import FlatState
from fastcheck_dask.manager.agents import Agents
from fastcheck_dask.manager.handle import SaveHandle
from fastcheck_dask.tiers.local import Slot, SlotState

log = logging.getLogger(__name__)

_REUSABLE = (SlotState.EMPTY, SlotState.COMMITTED)


class Snapshots:
    """Takes snapshots into the slots that the agent leaves free. One thread at a time.

    Parameters
    ----------
    slots : sequence of Slot
        The two slots.
    agents : Agents
        Encodes and sends what is in them.
    on_busy : {"wait", "skip", "raise"}
        What to do while no slot is free.
    closed : callable
        Says whether the manager was closed meanwhile.
    """

    def __init__(
        self, slots: Sequence[Slot], agents: Agents, on_busy: OnBusy, closed: Callable[[], bool]
    ) -> None:
        self._slots, self._agents, self._on_busy, self._closed = slots, agents, on_busy, closed
        self._room_made = False

    def save(
        self, flat: FlatState, handle: SaveHandle, *, started: float, metrics: Mapping[str, float]
    ) -> None:
        """Take a snapshot and hand it over; `started` is when the save began, on the monotonic clock.

        Raises
        ------
        SaveBusyError
            If no slot is free and `on_busy` is ``"raise"``.
        RunInUseError, FencedError
            If the run has another owner now.
        ClosedError
            If the manager was closed meanwhile. Any other error is told on the handle.
        """
        try:
            self._save(flat, handle, started=started, metrics=metrics)
        except (ClosedError, FencedError, RunInUseError, SaveBusyError):
            raise
        except FastCheckError as error:
            self._fail(handle, error)
        except OSError as error:
            self._fail(handle, TierError(f"save {handle.tag!r}: {type(error).__name__}: {error}"))
        finally:
            self._agents.at_work = None

    def make_room_ahead(self, turn: AbstractContextManager[object]) -> None:
        """After the first save, make the other slot ready in the background, before the second one needs it.

        Getting and clearing its memory takes some seconds a gigabyte. `turn` is held meanwhile, so that a
        save that comes before it is done waits as long as it would have taken itself.
        """
        if self._room_made:
            return
        wanted = max(slot.status.capacity_bytes for slot in self._slots)
        if not wanted:
            return
        self._room_made = True

        def reserve() -> None:
            with turn:
                for slot in self._slots:
                    # One that is there already, filled by a load, is as it is.
                    capacity = slot.status.capacity_bytes or wanted
                    if not self._closed():
                        try:
                            slot.reserve(capacity)
                        except FastCheckError as error:
                            log.warning("the next save will fail: %s", error)

        threading.Thread(target=reserve, name="fastcheck-reserve", daemon=True).start()

    def _save(
        self, flat: FlatState, handle: SaveHandle, *, started: float, metrics: Mapping[str, float]
    ) -> None:
        waiting = time.monotonic()
        number = self._free_slot(handle)
        if number is None:
            return
        handle.stats["busy_seconds"] = time.monotonic() - waiting
        self._agents.at_work = number
        take_snapshot(self._slots[number], flat, handle.tag, metrics=metrics)
        handle.stats["stall_seconds"] = time.monotonic() - started
        handle._reach("local")
        # A new one, if the agent died during the copy: it finds the snapshot.
        self._agents.link().save(number, handle)

    def _free_slot(self, handle: SaveHandle) -> int | None:
        """Wait for a free slot as `on_busy` says; None (and the handle says so) when the save is skipped."""
        while True:
            link = self._agents.link()
            number = link.free_slot(self._closed if self._on_busy == "wait" else None)
            if number is not None:
                return number
            if self._closed():
                raise ClosedError(f"the manager was closed while save {handle.tag!r} waited; it is not taken")
            if not link.lost:
                break
            # Otherwise a new agent finds the slots as they are.
        error = SaveBusyError(
            f"save {handle.tag!r}: both slots are in use by earlier saves; wait for one, save less often, or "
            "use on_busy='wait'"
        )
        if self._on_busy == "raise":
            raise error
        handle.skipped = True
        handle._fall_short("local", "peers", "object", error=error)
        self._agents.gave_up(handle.tag, str(error))
        log.warning("%s", error)
        return None

    def _fail(self, handle: SaveHandle, error: FastCheckError) -> None:
        log.error("save %r failed: %s", handle.tag, error)
        self._agents.on_failure(error)
        self._agents.gave_up(handle.tag, str(error))
        handle._fall_short("local", "peers", "object", error=error)


def take_snapshot(
    slot: Slot, flat: FlatState, tag: str, *, metrics: Mapping[str, float] | None = None
) -> None:
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
            token=token,
            tag=tag,
            created_unix=time.time(),
            tree=flat.tree,
            arrays=flat.arrays,
            metrics=metrics,
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
