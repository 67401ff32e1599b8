"""Committed generations on their way into the object tier, one at a time; what failed is tried again."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.agent.slots import SlotUse
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.save import Saved
from fastcheck_dask.errors import FastCheckError, to_wire

log = logging.getLogger(__name__)

#: Seconds between two attempts; after the last of them it is left to a newer generation, or to the end.
PAUSES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0)

Notify = Callable[[dict[str, Any]], None]
IsPersisted = Callable[[Saved, int, bool, dict[str, Any]], Awaitable[None]]
IsDelayed = Callable[[Saved, Exception], Awaitable[None]]


@dataclass(frozen=True)
class Delayed:
    """A generation that could not be persisted, and that nobody waits for any more."""

    saved: Saved
    seq: int
    error: Exception


class Persisting:
    """Persists in the background. Belongs to the agent's event loop.

    Parameters
    ----------
    persister : Persister
        Does it.
    slots : SlotUse
        A slot with the checkpoint is in use as long as an attempt may read it, and not in the pauses:
        training goes on meanwhile.
    notify : callable
        Is told what happens, as the training process hears it.
    persisted : callable
        Is awaited when the object tier has a generation, with it, the number of its save, whether the
        coordinator knows, and what the handle shows.
    delayed : callable
        Is awaited when an attempt failed, with the generation and the error.
    pauses : sequence of float
        Seconds between attempts.
    """

    def __init__(
        self,
        persister: Persister,
        slots: SlotUse,
        notify: Notify,
        *,
        persisted: IsPersisted,
        delayed: IsDelayed,
        pauses: Sequence[float] = PAUSES,
    ) -> None:
        self._persister, self._slots, self._notify = persister, slots, notify
        self._persisted, self._is_delayed, self._pauses = persisted, delayed, pauses
        self._task: asyncio.Task[None] | None = None
        #: Set while somebody waits for the end of what is being persisted.
        self._hurry = asyncio.Event()
        self._delayed: Delayed | None = None

    @property
    def busy(self) -> bool:
        """Whether a generation is being persisted, or waits to be tried again."""
        return self._task is not None and not self._task.done()

    async def begin(self, saved: Saved, number: int, seq: int) -> None:
        """Persist a generation that is in a slot, as soon as no attempt for an older one is under way.

        An older one that waits to be tried again is given up, and told as failed: the newer one replaces it.
        """
        self._slots.hold(number, "persist")
        await self._drain()
        self._give_up()
        self._task = asyncio.create_task(self._persist(saved, number, seq, pauses=self._pauses))

    async def finish(self, newest: tuple[Saved, int] | None) -> None:
        """Before the process ends: end what is under way, and try the newest generation a last time.

        Parameters
        ----------
        newest : (Saved, int) or None
            The newest generation and the number of its save, if the object tier is to have it and does not.
        """
        await self._drain()
        if newest is None:
            self._give_up()
            return
        if self._delayed is not None and self._delayed.saved is newest[0]:
            # The last attempt says how it ended.
            self._delayed = None
        self._give_up()
        await self._persist(newest[0], None, newest[1], pauses=())

    async def _drain(self) -> None:
        if self._task is None:
            return
        self._hurry.set()
        try:
            await self._task
        finally:
            self._task = None
            self._hurry.clear()

    def _give_up(self) -> None:
        delayed, self._delayed = self._delayed, None
        if delayed is not None:
            self._failed(delayed.saved, delayed.seq, delayed.error)

    def _failed(self, saved: Saved, seq: int, error: Exception) -> None:
        # The checkpoint is in force; only this tier lacks it, and that is told.
        log.warning(
            "generation %d could not be persisted: %s",
            saved.record.generation,
            error,
            exc_info=not isinstance(error, FastCheckError),
        )
        self._notify({"event": "persist_failed", "seq": seq, "error": to_wire(error)})

    async def _persist(self, saved: Saved, number: int | None, seq: int, *, pauses: Sequence[float]) -> None:
        for attempt, pause in enumerate((*pauses, None), 1):
            error = await self._attempt(saved, number, seq, attempt=attempt)
            if error is None:
                return
            await self._is_delayed(saved, error)
            if pause is None or not (isinstance(error, FastCheckError) and error.retryable):
                self._failed(saved, seq, error)
                return
            # Not all at once, where many agents write to one store.
            seconds = pause * random.uniform(0.75, 1.25)
            self._tell_delay(saved, seq, error, attempts=attempt, seconds=seconds)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._hurry.wait(), seconds)
                self._delayed = Delayed(saved, seq, error)
                return
            number = self._held(saved)

    def _tell_delay(self, saved: Saved, seq: int, error: Exception, *, attempts: int, seconds: float) -> None:
        log.warning(
            "generation %d could not be persisted in attempt %d, the next is in %.1f s: %s",
            saved.record.generation,
            attempts,
            seconds,
            error,
        )
        stats = {"persist_attempts": attempts, "persist_error": str(error)}
        self._notify({"event": "persist_delayed", "seq": seq, "stats": stats})

    def _held(self, saved: Saved) -> int | None:
        """Hold the slot in which the checkpoint still is, for one more attempt."""
        base, number = self._slots.base, self._slots.base_number
        if base is None or number is None or base.manifest.token != saved.record.token:
            return None
        self._slots.hold(number, "persist")
        return number

    async def _attempt(self, saved: Saved, number: int | None, seq: int, *, attempt: int) -> Exception | None:
        """Persist once; return why not, None if the object tier has it."""
        started = time.monotonic()
        base = self._slots.base
        source = base if base is not None and base.manifest.token == saved.record.token else None
        try:
            moved = await self._persister.persist(
                saved.manifest, saved.manifest_bytes, record=saved.record, source=source
            )
        except Exception as error:  # whatever it was, training goes on
            return error
        else:
            stats: dict[str, Any] = {
                "persisted_bytes": moved.by_nodes_bytes + moved.by_host_bytes,
                "persist_seconds": time.monotonic() - started,
                "persist_attempts": attempt,
                "persist_error": None,
            }
            await self._persisted(saved, seq, moved.noted, stats)
            return None
        finally:
            if number is not None:
                self._slots.release(number, "persist")
