"""Compute chunks of a checkpoint that are lost, or late, from the others of their stripes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Set
from itertools import chain

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
        read: Callable[[int, list[str], Region], Awaitable[set[str]]],
        take: Callable[[str, Bits], None],
        refuse: Callable[[str], None],
    ) -> None:
        self._manifest, self._region, self._good = manifest, region, good
        self._without, self._read = without, read
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
        """Compute lost chunks of some stripes; where a chunk cannot be read for it, others are."""
        layout = self._manifest.layout
        assert layout is not None
        came: dict[str, Bits] = {}
        failed = self._not_asked()
        while group:
            # Only a partial load has not got the other members of a stripe already.
            there = self._good | came.keys()
            plans = [(e, keys_to_read(layout, e, there=there, failed=failed)) for e in group]
            going = [(erasure, keys) for erasure, keys in plans if keys is not None]
            asked = [key for _, keys in going for key in keys]
            came.update(await self._fetched(asked))
            failed.update(key for key in asked if key not in came)
            ready = [erasure for erasure, keys in going if came.keys() >= set(keys)]
            short = [erasure for erasure, keys in going if not came.keys() >= set(keys)]
            wrong = await asyncio.gather(*(self._compute(erasure, came) for erasure in ready))
            for key in chain.from_iterable(wrong):
                failed.add(key)
                del came[key]
            group = short + [erasure for erasure, keys in zip(ready, wrong, strict=True) if keys]

    def _not_asked(self) -> set[str]:
        assert self._manifest.layout is not None
        return {key for shard in self._without for key in self._manifest.layout.keys_of(shard)}

    async def _fetched(self, keys: Iterable[str]) -> dict[str, Bits]:
        """Read chunks of all their shards at once; return those that came."""
        assert self._manifest.layout is not None
        by_shard: dict[int, list[str]] = {}
        for key in keys:
            by_shard.setdefault(self._manifest.layout.position[key][1], []).append(key)
        scratch: dict[str, Bits] = {}

        def room(key: str) -> Bits:
            return scratch.setdefault(key, np.empty(self._manifest.nbytes_of(key), np.uint8))

        came = await asyncio.gather(*(self._read(shard, of, room) for shard, of in by_shard.items()))
        return {key: scratch[key] for key in chain.from_iterable(came)}

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
