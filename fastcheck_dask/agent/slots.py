"""The two slots as the agent sees them: who uses each, and which holds the delta base."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Literal

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.save import Base
from fastcheck_dask.engine.snapshot import as_base
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.local import LocalTier, Slot, SlotState, SlotStatus

log = logging.getLogger(__name__)

#: A snapshot waits to be saved; the checkpoint is the delta base; it is being persisted.
Use = Literal["snapshot", "base", "persist"]


class SlotUse:
    """Which slot is in use, and why: one that no use holds is free for the next snapshot.

    Two slots and these uses bound everything that can queue up between trainer and tiers.
    """

    def __init__(self, local: LocalTier, freed: Callable[[int], None]) -> None:
        self._local = local
        self._freed = freed
        self._uses: dict[int, set[Use]] = {0: set(), 1: set()}
        self.base: Base | None = None

    def __getitem__(self, number: int) -> Slot:
        return self._local.slots[number]

    @property
    def free(self) -> list[int]:
        """Numbers of the free slots."""
        return [number for number, uses in self._uses.items() if not uses]

    @property
    def base_number(self) -> int | None:
        """Number of the slot that holds the delta base."""
        return next((number for number, uses in self._uses.items() if "base" in uses), None)

    def hold(self, number: int, use: Use) -> None:
        """Note that a slot is in use."""
        self._uses[number].add(use)

    def release(self, number: int, use: Use) -> None:
        """Note that a use is over; tells when the slot became free."""
        if use in self._uses[number]:
            self._uses[number].discard(use)
            if not self._uses[number]:
                self._freed(number)

    def rebase(self, number: int | None, base: Base | None) -> None:
        """Make the checkpoint in a slot the delta base, or give up the present one."""
        before = self.base_number
        if number is not None:
            self.hold(number, "base")
        if before is not None and before != number:
            self.release(before, "base")
        self.base = base

    def status(self, number: int) -> SlotStatus:
        """Return what a slot says of itself; a damaged one is emptied."""
        try:
            return self[number].status
        except FastCheckError as error:
            log.warning("%s; it is emptied", error)
            self[number].clear()
            return self[number].status

    def empty(self, number: int) -> None:
        """Give up what is in a slot; what cannot be emptied now is when it is used again."""
        try:
            self[number].clear()
        except (FastCheckError, OSError) as error:
            log.warning("slot %d could not be emptied: %s", number, error)

    def recognise(self, by_token: Mapping[str, CommitRecord]) -> None:
        """Take the last step of a commit that an agent did not live to take."""
        for number in self._uses:
            status = self.status(number)
            if status.state is SlotState.SEALED and status.token in by_token:
                self[number].commit(by_token[status.token].generation)

    def adopt(self, number: int, latest: CommitRecord) -> bool:
        """Take a slot as delta base if it holds the newest committed generation."""
        status = self.status(number)
        if status.state is not SlotState.COMMITTED or status.token != latest.token:
            return False
        try:
            manifest = Manifest.from_bytes(self[number].read_manifest(), where=str(self[number].path))
        except FastCheckError as error:
            log.warning("slot %d is not used as a base: %s", number, error)
            return False
        self.rebase(number, as_base(self[number].path, manifest))
        return True

    def generations(self) -> list[int]:
        """Return the generations of the committed checkpoints that the slots hold."""
        found = [self.status(number).generation for number in self._uses]
        return [generation for generation in found if generation is not None]

    def drop_unfinished(self, keep: int | None) -> None:
        """Empty the slots whose save did not come to its end under an agent before this one.

        Their handles have said so, or nobody is left who waits for them. Were they kept, the end of a later
        trainer would make an older state the newest checkpoint (`orphans`). `keep` is the slot that the
        trainer is copying into, or about to hand over.
        """
        for number in self._uses:
            state = self.status(number).state
            if number != keep and state not in (SlotState.EMPTY, SlotState.COMMITTED):
                log.warning(
                    "slot %d: a snapshot (%s) that was never committed is dropped", number, state.name
                )
                self[number].clear()

    def orphans(self) -> list[int]:
        """Return the slots with a complete snapshot that the trainer did not live to hand over."""
        return [number for number in self.free if self.status(number).state is SlotState.SNAPSHOT]
