"""Compute chunks of a checkpoint that are lost, or late, from the others of their stripes.

What is read for it may be late, too: where there is more parity than needed, the next one is asked then.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Coroutine, Iterable, Mapping, Set
from functools import partial
from itertools import chain
from typing import Any

import numpy as np

from fastcheck_dask.engine.encode import Bits, Region, digest
from fastcheck_dask.engine.erasures import Erasure, computed, erasures_of, keys_to_read
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.stripes import parity_nbytes

#: Raw bytes of the chunks that are computed at once; what they are computed from is beside them.
PARITY_BYTES = 32 * 2**20


class ParitySource:
    """Reads parity chunks, and members that nobody has read, and computes chunks from them.

    Belongs to one event loop.

    Parameters
    ----------
    manifest : Manifest
        Of the checkpoint.
    region : Region
        Gives the memory of the good chunks.
    good : set of str
        Chunks whose bits are in their region, verified; grows meanwhile.
    without : collection of int
        Shards that are not asked for anything.
    read : callable
        Reads chunks of a shard into scratch, verifies them, and returns the keys of those that came.
    patience : callable
        Returns how many seconds so many bytes of one shard may take; then others are read instead, if that
        helps, and what comes first counts.
    take : callable
        Gets each chunk that was computed, verified by its digest.
    refuse : callable
        Is told why what was computed cannot be taken.
    """

    def __init__(
        self,
        manifest: Manifest,
        region: Region,
        *,
        good: Set[str],
        without: Collection[int],
        read: Callable[[int, list[str], Region], Coroutine[Any, Any, set[str]]],
        patience: Callable[[int], float],
        take: Callable[[str, Bits], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._manifest, self._region, self._good = manifest, region, good
        self._without, self._read, self._patience = without, read, patience
        self._take, self._refuse = take, refuse

    async def rebuild_all(self, keys: Iterable[str]) -> None:
        """Compute the chunks for which there is enough parity, a bounded number at a time."""
        layout = self._manifest.layout
        assert layout is not None
        group: list[Erasure] = []
        size = 0
        not_asked = self._not_asked()
        for erasure in erasures_of(layout, keys):
            if keys_to_read(layout, erasure, there=self._good, failed=not_asked) is None:
                continue
            group.append(erasure)
            size += len(erasure.lost) * parity_nbytes(erasure.stripe, self._manifest.sizes)
            if size >= PARITY_BYTES:
                await self.rebuild(group)
                group, size = [], 0
        if group:
            await self.rebuild(group)

    async def rebuild(self, group: list[Erasure]) -> None:
        """Compute lost chunks of some stripes; where a chunk is late or cannot be read, others are."""
        reads = _Reads(self._manifest, self._read, self._patience, failed=self._not_asked())
        try:
            while group:
                plans = self._plans(group, reads)
                ready = [erasure for erasure, keys in plans if keys == []]
                group = [erasure for erasure, keys in plans if keys]
                wrong = await asyncio.gather(*(self._compute(erasure, reads.came) for erasure in ready))
                reads.refuse(chain.from_iterable(wrong))
                group += [erasure for erasure, keys in zip(ready, wrong, strict=True) if keys]
                if not ready and group:
                    await reads.go_on(key for _, keys in plans for key in keys or ())
        finally:
            await reads.close()

    def _plans(self, group: list[Erasure], reads: _Reads) -> list[tuple[Erasure, list[str] | None]]:
        """Return what each stripe needs and has not got; what is late only where nothing else would do."""
        assert self._manifest.layout is not None
        # Only a partial load has not got the other members of a stripe already.
        there = self._good | reads.came.keys()
        to_read = partial(keys_to_read, self._manifest.layout, there=there)
        not_now = reads.failed | reads.late
        plans = []
        for erasure in group:
            keys = to_read(erasure, failed=not_now)
            plans.append((erasure, to_read(erasure, failed=reads.failed) if keys is None else keys))
        return plans

    def _not_asked(self) -> set[str]:
        assert self._manifest.layout is not None
        return {key for shard in self._without for key in self._manifest.layout.keys_of(shard)}

    async def _compute(self, erasure: Erasure, came: Mapping[str, Bits]) -> tuple[str, ...]:
        """Compute the lost chunks of one stripe; return the parity chunks that gave other bits, if so."""
        found, used = await asyncio.to_thread(self._computed, erasure, came)
        wrong: tuple[str, ...] = ()
        for key, (bits, got) in found.items():
            if got == self._manifest.digests[key]:
                self._take(key, bits)
            elif key not in self._good:
                why = f"the parity of stripe {erasure.stripe.id} gives other bits ({got})"
                self._refuse(f"chunk {key}: {why}")
                wrong = used
        return wrong

    def _computed(
        self, erasure: Erasure, came: Mapping[str, Bits]
    ) -> tuple[dict[str, tuple[Bits, str]], tuple[str, ...]]:
        """Return the bits and the digests of lost chunks, and the parity chunks that they come from."""
        assert self._manifest.layout is not None
        layout, stripe = self._manifest.layout, erasure.stripe
        good = {key: self._region(key) for key in stripe.members if key is not None and key in self._good}
        keys = (*filter(None, stripe.members), *stripe.parity_keys(layout.parity))
        there = {**{key: came[key] for key in keys if key in came}, **good}
        found, used = computed(layout, erasure, there=there)
        bits = {key: found[key][: self._manifest.sizes[key]] for key in erasure.lost if key in found}
        return {key: (of_key, digest(of_key)) for key, of_key in bits.items()}, used


class _Reads:
    """Chunks that are read into scratch, each once, by as many readers at a time as there are shards to ask.

    Belongs to one event loop.
    """

    def __init__(
        self,
        manifest: Manifest,
        read: Callable[[int, list[str], Region], Coroutine[Any, Any, set[str]]],
        patience: Callable[[int], float],
        *,
        failed: set[str],
    ) -> None:
        self._manifest, self._read, self._patience = manifest, read, patience
        #: What came, verified by its digest, and what does not come.
        self.came: dict[str, Bits] = {}
        self.failed = failed
        #: What its reader has been at for too long.
        self.late: set[str] = set()
        self._scratch: dict[str, Bits] = {}
        #: The chunks that a reader was sent for, and when.
        self._readers: dict[asyncio.Task[set[str]], tuple[list[str], float]] = {}

    async def go_on(self, keys: Iterable[str]) -> None:
        """Have chunks read, and wait until some reader is back or another one is late."""
        assert self._manifest.layout is not None
        by_shard: dict[int, list[str]] = {}
        for key in keys:
            if key not in self._scratch:
                self._scratch[key] = np.empty(self._manifest.nbytes_of(key), np.uint8)
                by_shard.setdefault(self._manifest.layout.position[key][1], []).append(key)
        for shard, of_shard in by_shard.items():
            reader = asyncio.create_task(self._read(shard, of_shard, self._scratch.__getitem__))
            self._readers[reader] = of_shard, time.monotonic()
        now = time.monotonic()
        punctual = {r: self._until(r) for r, (of, _) in self._readers.items() if of[0] not in self.late}
        timeout = max(0.0, min(punctual.values()) - now) if punctual else None
        done, _ = await asyncio.wait(self._readers, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        for reader in done:
            sent_for, _ = self._readers.pop(reader)
            got = reader.result()
            self.late.difference_update(sent_for)
            self.came.update((key, self._scratch[key]) for key in sent_for if key in got)
            self.failed.update(key for key in sent_for if key not in got)
        now = time.monotonic()
        for reader in punctual.keys() - done:
            if self._until(reader) <= now:
                self.late.update(self._readers[reader][0])

    def _until(self, reader: asyncio.Task[set[str]]) -> float:
        sent_for, began = self._readers[reader]
        return began + self._patience(sum(map(self._manifest.nbytes_of, sent_for)))

    def refuse(self, keys: Iterable[str]) -> None:
        """Take no more of chunks that came and are wrong."""
        for key in keys:
            self.failed.add(key)
            self.came.pop(key, None)

    async def close(self) -> None:
        """End the readers that are not needed any more."""
        for reader in self._readers:
            reader.cancel()
        await asyncio.gather(*self._readers, return_exceptions=True)
