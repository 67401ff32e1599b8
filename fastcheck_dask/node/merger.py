"""Merges waiting deltas, takes chunks back to older generations, and checks stored payloads.

Works on entries, which never change, outside of the lock; what came of it is swapped in under the lock.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from fastcheck_codecs import CodecError

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.node.entries import (
    Chain,
    Entry,
    Step,
    is_intact,
    merge,
    reverse_delta,
    rewind,
)
from fastcheck_dask.node.generations import Generation, Name
from fastcheck_dask.node.holdings import Holdings


class Checked(NamedTuple):
    """What a look at a stored chunk gave."""

    nbytes: int
    damaged: bool


class Merger:
    """Merges and checks what `holdings` holds. Any thread may call any method, without the lock."""

    def __init__(self, holdings: Holdings) -> None:
        self._holdings = holdings

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep background work from going on while a load is served."""
        holdings = self._holdings
        with holdings.quiet:
            holdings.readers += 1
        try:
            yield
        finally:
            with holdings.quiet:
                holdings.readers -= 1
                holdings.quiet.notify_all()

    def wait_until_quiet(self) -> bool:
        """Wait until no load is being served; False if background work shall end."""
        holdings = self._holdings
        with holdings.quiet:
            holdings.quiet.wait_for(lambda: holdings.readers == 0 or holdings.stopped)
            return not holdings.stopped

    def stop(self) -> None:
        """End background work, after the chunk that it is at; what begins later does nothing."""
        with self._holdings.quiet:
            self._holdings.stopped = True
            self._holdings.quiet.notify_all()

    def drain(self, run: str, keys: Sequence[str] | None = None, *, background: bool = False) -> None:
        """Merge the waiting deltas of a run, or of some of its keys."""
        with self._holdings.locked():
            helds = self._holdings.run(run).generations()
        self.drain_generations(run, helds, keys, background=background)
        if background:
            self._shorten_ring(run)

    def drain_generations(
        self, run: str, helds: Iterable[Generation], keys: Sequence[str] | None, *, background: bool
    ) -> None:
        """Merge the waiting deltas of some generations, oldest first."""
        for held in helds:
            with self._holdings.locked():
                waiting = sorted(held.pending) if keys is None else [k for k in keys if k in held.pending]
            for key in waiting:
                if background and not self.wait_until_quiet():
                    return
                self._merge_one(run, held, key)

    def _merge_one(self, run: str, held: Generation, key: str) -> None:
        holdings = self._holdings
        with holdings.locked():
            state = holdings.run(run)
        with state.merging:
            with holdings.locked():
                chain = held.chains.get(key)
            if chain is None or len(chain) == 1:
                return
            try:
                merged = merge(chain)
            except (CodecError, CorruptDataError) as error:
                self._discard_damaged(run, key, chain, why=f"its deltas cannot be merged: {error}")
                return
            with holdings.locked():
                holdings.swap(state, key, old=chain, new=(merged,))
                if not holdings.make_room_in_rings(0):
                    # A pin needs the old payload as well, and there is no room for both: it waits.
                    holdings.swap(state, key, old=(merged,), new=chain)

    def fetch(self, run: str, name: Name, key: str) -> tuple[Entry | None, bool]:
        """Return a chunk of a generation as a whole payload, and whether it was found damaged just now.

        A generation that is not held any more has no chunks.
        """
        holdings = self._holdings
        with holdings.locked():
            held = holdings.run(run).find(name)
        if held is not None and key in held.pending:
            self._merge_one(run, held, key)
        with holdings.locked():
            state = holdings.run(run)
            held = state.find(name)
            way = None if held is None else state.way_to(held, key)
        if way is None or held is None:
            return None, False
        chain, steps = way
        if len(chain) == 1 and not steps:
            if is_intact(chain[0]):
                return chain[0], False
            self._discard(run, key, chain, why="its payload fails its checksum")
            return None, True
        try:
            return rewind(chain, steps), False
        except (CodecError, CorruptDataError) as error:
            self._discard_way(run, held, key, way=way, why=f"it cannot be taken back: {error}")
            return None, True

    def check(self, run: str, name: Name, key: str) -> Checked:
        """Compare the checksums of all payloads of a chunk; what is damaged is dropped."""
        with self._holdings.locked():
            held = self._holdings.run(run).find(name)
            entries = [] if held is None else list(held.chains.get(key, ()))
            step = None if held is None else held.steps.get(key)
        if step is not None and step.delta is not None:
            entries.append(step.delta)
        bad = [entry for entry in entries if not is_intact(entry)]
        if bad:
            self._discard(run, key, bad, why="its payload fails its checksum")
        return Checked(sum(entry.payload.nbytes for entry in entries), bool(bad))

    def _discard(self, run: str, key: str, entries: Iterable[Entry], *, why: str) -> None:
        with self._holdings.locked():
            self._holdings.discard(run, key, entries, why)

    def _discard_damaged(self, run: str, key: str, chain: Chain, *, why: str) -> None:
        """Drop what is damaged of a chain; the whole of it if that cannot be told."""
        bad = [entry for entry in chain if not is_intact(entry)]
        self._discard(run, key, bad or chain[-1:], why=why)

    def _discard_way(
        self, run: str, held: Generation, key: str, *, way: tuple[Chain, list[Step]], why: str
    ) -> None:
        """Drop what is damaged of a chain and the steps from it; the last step if that cannot be told."""
        chain, steps = way
        entries = [*chain, *(step.delta for step in steps if step.delta is not None)]
        bad = [entry for entry in entries if not is_intact(entry)]
        if bad or not steps:
            self._discard(run, key, bad or chain, why=why)
            return
        with self._holdings.locked():
            state = self._holdings.run(run)
            if held in state.generations():
                self._holdings.set_chain(state, held, key, chain=None)
                self._holdings.log_loss(run, held.number, key, why)

    def _shorten_ring(self, run: str) -> None:
        """Keep deltas in the ring for chunks whose successor came raw: nobody looked for a delta then."""
        holdings = self._holdings
        with holdings.locked():
            state = holdings.run(run)
            newer = state.committed
            if not state.ring or newer is None:
                return
            older = state.ring[-1]
            todo = [key for key, chain in older.chains.items() if _came_raw(newer.chains.get(key), chain)]
        for key in todo:
            if not self.wait_until_quiet():
                return
            with holdings.locked():
                before, after = older.chains.get(key), newer.chains.get(key)
            if before is None or after is None:
                continue
            try:
                delta = reverse_delta(after, before)
            except (CodecError, CorruptDataError):
                # Whoever reads it finds out which of the two is damaged.
                continue
            if delta is not None:
                with holdings.locked():
                    holdings.step_instead(run, older, newer, before=before, delta=delta)


def _came_raw(newer: Chain | None, older: Chain) -> bool:
    if newer is None or len(newer) > 1 or len(older) > 1:
        return False
    after, before = newer[0].descriptor, older[0].descriptor
    return after.nbytes >= after.raw_nbytes >= before.raw_nbytes > 0
