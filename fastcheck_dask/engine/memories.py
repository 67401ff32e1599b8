"""Where the chunks of a load go: fresh memory, a slot of the local tier, or the tensors of a live state."""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final

import numpy as np

from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.plan import Content
from fastcheck_dask.engine.snapshot import describe
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.layout.chunks import ArraySpec, place
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import refill, unflatten
from fastcheck_dask.layout.targets import Filling
from fastcheck_dask.tiers.local import LocalTier

log = logging.getLogger(__name__)

#: From here on numpy asks for huge pages.
_HUGE_FROM_BYTES = 4 * 2**20
#: Threads that copy a whole checkpoint into a slot.
_COPIERS: Final = 4


def slot_region(local: LocalTier, number: int, manifest: Manifest) -> Callable[[str], Bits]:
    """Return what gives the bits of a data chunk in a slot that holds the checkpoint."""
    data = local.slots[number].data
    content = Content(manifest.arrays, place(manifest.arrays), manifest.layout)

    def region(key: str) -> Bits:
        """See `Memory`."""
        offset, nbytes = content.piece(key)
        return data[offset : offset + nbytes]

    return region


class Memory:
    """Where the chunks of a load go, and what becomes of it."""

    def region(self, key: str) -> Bits:
        """Return the memory of a data chunk: to write to, or, once it is settled, to read."""
        raise NotImplementedError

    def settle(self, key: str) -> None:
        """Note that the region of a chunk holds its bits, verified."""

    def state(self, tree: Any, arrays: Iterable[ArraySpec]) -> Any:
        """Return the state once every chunk is settled."""
        return unflatten(tree, self.hand_over, arrays=arrays)

    def hand_over(self, spec: ArraySpec) -> Bits:
        """Return the bits of an array in memory that the state may keep."""
        raise NotImplementedError

    def keep(self, manifest: Manifest) -> int | None:  # noqa: ARG002
        """Note that everything is there; return the slot that holds it now, if it did not before."""
        return None

    def abandon(self) -> None:
        """Note that the load failed."""


class PlainMemory(Memory):
    """Memory of the process: the state wraps it without another copy."""

    def __init__(self, manifest: Manifest, arrays: list[ArraySpec]) -> None:
        self._manifest = manifest
        self._bits = {spec.path: _fresh(spec.nbytes) for spec in arrays}

    def region(self, key: str) -> Bits:
        """See `Memory`."""
        chunk = self._manifest.chunks[key]
        return self._bits[chunk.path][chunk.offset : chunk.offset + chunk.nbytes]

    def hand_over(self, spec: ArraySpec) -> Bits:
        """See `Memory`."""
        return self._bits.pop(spec.path)


class FilledSlot(PlainMemory):
    """Memory of the process; a free slot gets a copy of each chunk while others are on their way."""

    def __init__(self, local: LocalTier, number: int, manifest: Manifest) -> None:
        super().__init__(manifest, list(manifest.arrays))
        self._copy = _SlotCopy(local, number, manifest)

    def settle(self, key: str) -> None:
        """See `Memory`."""
        self._copy.write(key, self.region(key))

    def keep(self, manifest: Manifest) -> int | None:
        """See `Memory`."""
        return self._copy.finish(manifest)

    def abandon(self) -> None:
        """See `Memory`."""
        self._copy.abandon()


class LateFilledSlot(PlainMemory):
    """Memory of the process, copied into a slot once all is there: until then the slot's own stays."""

    def __init__(self, local: LocalTier, number: int, manifest: Manifest) -> None:
        super().__init__(manifest, list(manifest.arrays))
        self._local, self._number = local, number
        self._handed_over: dict[str, Bits] = {}

    def hand_over(self, spec: ArraySpec) -> Bits:
        """See `Memory`."""
        bits = self._handed_over[spec.path] = super().hand_over(spec)
        return bits

    def region(self, key: str) -> Bits:
        """See `Memory`."""
        chunk = self._manifest.chunks[key]
        bits = self._handed_over.get(chunk.path)
        return super().region(key) if bits is None else bits[chunk.offset : chunk.offset + chunk.nbytes]

    def keep(self, manifest: Manifest) -> int | None:
        """See `Memory`."""
        return _fill(self._local, self._number, manifest, self.region)


class StateMemory(Memory):
    """The tensors of a live state; a chunk that is not one piece of theirs has a passing place of its own.

    Parameters
    ----------
    filling : Filling
        What goes where.
    manifest : Manifest
        Of the checkpoint.
    local, number : LocalTier, int or None
        A slot that gets a copy in the end, if it has the room already.
    """

    def __init__(self, filling: Filling, manifest: Manifest, local: LocalTier, number: int | None) -> None:
        self._filling, self._manifest = filling, manifest
        self._local, self._number = local, number
        #: Chunks that are on their way to their tensors.
        self._passing: dict[str, Bits] = {}
        self._settled: set[str] = set()

    def region(self, key: str) -> Bits:
        """See `Memory`."""
        chunk = self._manifest.chunks[key]
        target = self._filling.targets[chunk.path]
        bits = target.region(chunk)
        if bits is not None:
            return bits
        if key in self._settled:
            return target.get(chunk)
        return self._passing.setdefault(key, np.empty(chunk.nbytes, np.uint8))

    def settle(self, key: str) -> None:
        """See `Memory`."""
        chunk = self._manifest.chunks[key]
        self._filling.targets[chunk.path].put(chunk, self.region(key))
        self._settled.add(key)
        self._passing.pop(key, None)

    def state(self, tree: Any, arrays: Iterable[ArraySpec]) -> Any:  # noqa: ARG002
        """See `Memory`."""
        self._filling.put_inline()
        return refill(tree, self._filling.live)

    def keep(self, manifest: Manifest) -> int | None:
        """See `Memory`."""
        if self._number is None or len(self._filling.arrays) < len(manifest.arrays):
            return None
        room = self._local.slots[self._number].status.capacity_bytes
        if room < place(manifest.arrays).total_bytes:
            log.info("the checkpoint is not kept in shared memory: that would take room besides the state")
            return None
        return _fill(self._local, self._number, manifest, self.region)


def _fresh(nbytes: int) -> Bits:
    """Return memory of the process in small pages where there is much of it.

    numpy asks for huge pages: on a host whose memory is full of cached files, a load then waits for the
    kernel to make them, several times as long as for the bits.
    """
    if nbytes < _HUGE_FROM_BYTES:
        return np.empty(nbytes, np.uint8)
    return np.frombuffer(mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS), np.uint8)


class _SlotCopy:
    """A free slot on its way to hold a checkpoint: written, never mapped, which takes half as long.

    Any thread may write. A copy that fails is told when it is to be finished: the load goes on without.
    """

    def __init__(self, local: LocalTier, number: int, manifest: Manifest) -> None:
        self._slot, self._number = local.slots[number], number
        self._content = Content(manifest.arrays, place(manifest.arrays), manifest.layout)
        self._failure: FastCheckError | None = None
        self._slot.clear()
        self._slot.reserve(self._content.placement.total_bytes, mapped=False)
        self._slot.begin(manifest.token, manifest.tag)

    def write(self, key: str, bits: Bits) -> None:
        if self._failure is None:
            try:
                self._slot.write(self._content.piece(key)[0], bits)
            except FastCheckError as error:
                self._failure = error

    def finish(self, manifest: Manifest) -> int:
        document = describe(
            token=manifest.token,
            tag=manifest.tag,
            created_unix=manifest.created_unix,
            tree=manifest.tree,
            arrays=manifest.arrays,
        )
        try:
            if self._failure is not None:
                raise self._failure
            self._slot.complete(document, self._content.placement.total_bytes)
            self._slot.seal(manifest.to_bytes())
            self._slot.commit(manifest.generation)
        except BaseException:
            self._slot.clear()
            raise
        return self._number

    def abandon(self) -> None:
        self._slot.clear()


def _fill(local: LocalTier, number: int, manifest: Manifest, region: Callable[[str], Bits]) -> int:
    copy = _SlotCopy(local, number, manifest)
    with ThreadPoolExecutor(_COPIERS) as copiers:
        # The results are nothing; what was raised is.
        list(copiers.map(lambda key: copy.write(key, region(key)), manifest.chunks))
    return copy.finish(manifest)
