"""What a storage node holds, counted: room for what comes, and what is given up for it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from fastcheck_dask.clock import Clock
from fastcheck_dask.errors import NodeFullError, StaleBaseError
from fastcheck_dask.node.entries import Chain, Entry, Step
from fastcheck_dask.node.generations import Generation, Name, Run, Staged, ring_generation
from fastcheck_dask.node.ledger import Ledger
from fastcheck_dask.tiers.wire import Bits

#: How long a save that was not prepared is kept when nothing is heard of it, in seconds.
STAGED_SECONDS = 600.0
#: The same, once its author's last connection is gone.
ORPHAN_SECONDS = 30.0
#: How long a run is kept after its last save if its owner asked for nothing else, in seconds.
LEASE_SECONDS = 3600.0
#: Share of the node's memory that rings may take.
RING_SHARE = 0.25
#: Commits that are remembered to be shown.
RECENT_COMMITS = 16

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Commit:
    """One that happened here lately."""

    run: str
    generation: int
    #: By the clock of the holdings.
    at: float
    #: What had come for it.
    received_bytes: int


class Holdings:
    """The runs of a node, and the bytes that they take. Shared by what serves, merges and scrubs them.

    All methods but :meth:`locked` are called with the lock held.

    Parameters
    ----------
    name : str
        Of the node.
    limit_bytes : int
        What everything may take together.
    ring : int
        Generations of each run that are kept besides the committed one, as long as there is room.
    clock : Clock
        For leases and deadlines.
    """

    def __init__(self, name: str, limit_bytes: int, *, ring: int, clock: Clock) -> None:
        self.name, self.limit_bytes = name, limit_bytes
        self.ring, self.ring_limit_bytes = ring, int(limit_bytes * RING_SHARE)
        self.clock = clock
        self.lock = threading.RLock()
        #: Notified when a reader leaves, and when background work shall end. Its own lock is never held for
        #: long: an event loop takes it.
        self.quiet = threading.Condition()
        self.readers = 0
        self.stopped = False
        self.runs: dict[str, Run] = {}
        self.ledger = Ledger()
        #: Counts what the rings hold once more.
        self.ring_ledger = Ledger()
        self.on_pending: Callable[[str, int], None] | None = None
        self.commits: deque[Commit] = deque(maxlen=RECENT_COMMITS)
        #: All of them, and chunks that a repair brought back.
        self.commit_count = 0
        self.repaired_count = 0
        self._depth = 0
        self._released: list[Bits] = []

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock. May be nested; when the outermost block ends, what was let go is freed."""
        released: list[Bits] = []
        try:
            with self.lock:
                self._depth += 1
                try:
                    yield
                finally:
                    self._depth -= 1
                    if self._depth == 0:
                        released, self._released = self._released, released
        finally:
            # The system takes its time to unmap: not under the lock, and one by one, so that others run.
            while released:
                released.pop()

    # ---- what there is

    def run(self, name: str) -> Run:
        """Return a run; an empty one, of which no note is taken, if there is none."""
        return self.runs.get(name) or Run()

    def reserved_bytes(self, besides: Staged | None = None) -> int:
        """Return what is promised to saves and has not come yet."""
        return sum(
            staged.reserved_bytes
            for run in self.runs.values()
            for staged in run.staged.values()
            if staged is not besides
        )

    def free_bytes(self, besides: Staged | None = None) -> int:
        """Return what is neither used nor promised; negative where a merge let something grow."""
        return self.limit_bytes - self.ledger.used_bytes - self.reserved_bytes(besides)

    # ---- room

    def require_room(self, name: str, wanted_bytes: int, *, besides: Staged | None = None) -> None:
        """Have so many bytes free for a run, or raise `NodeFullError`, which says how many could be had.

        What may be given up is given up, if that is enough: first saves that nobody goes on with, then rings,
        then runs, least recently used first, among those whose lease has ended and of which the object tier
        has what is held here, or something newer.
        """
        if wanted_bytes <= self.free_bytes(besides):
            return
        possible = self._reclaim(name, wanted_bytes, besides)
        if wanted_bytes > self.free_bytes(besides):
            raise NodeFullError(self.name, wanted_bytes, max(0, possible))

    def _reclaim(self, asking: str, wanted_bytes: int, besides: Staged | None) -> int:
        """Give up what it takes, or nothing if it is not enough; return what can be had."""
        self.expire(besides)
        evictable = [name for name in self._evictable() if name != asking]
        possible = self.free_bytes(besides) + self.ring_ledger.used_bytes
        possible += sum(held.nbytes for name in evictable for held in self.runs[name].generations())
        if wanted_bytes > possible:
            return possible
        while wanted_bytes > self.free_bytes(besides) and self._give_up_ring():
            pass
        for name in evictable:
            if wanted_bytes > self.free_bytes(besides):
                logger.info("node %s evicts run %s: %s", self.name, name, self.runs[name].described())
                self.drop(name)
        return self.free_bytes(besides)

    def make_room_in_rings(self, wanted_bytes: int) -> bool:
        """Have so many bytes free at the expense of rings alone; say whether they are."""
        while wanted_bytes > self.free_bytes():
            if not self._give_up_ring():
                return False
        return True

    def _evictable(self) -> list[str]:
        """Return the runs that may be evicted, least recently used first."""
        now = self.clock.now()
        return sorted(
            (
                name
                for name, run in self.runs.items()
                if not run.staged
                and run.committed is not None
                and run.committed.number <= run.persisted
                and run.lease_ends(LEASE_SECONDS) <= now
            ),
            key=lambda name: self.runs[name].used_at,
        )

    def expire(self, besides: Staged | None = None) -> None:
        """Drop saves that their authors left, and pins of runs whose lease has ended."""
        now = self.clock.now()
        for name, run in list(self.runs.items()):
            for staged in [s for s in run.staged.values() if s is not besides]:
                if not staged.prepared and staged.expires <= now:
                    logger.warning(
                        "node %s drops a save of run %s that nobody goes on with: generation %d, %d bytes",
                        self.name,
                        name,
                        staged.number,
                        staged.staged_bytes,
                    )
                    self.drop_staged(name, run, staged)
            if run.lease_ends(LEASE_SECONDS) <= now:
                for held in [g for g in run.pins if g is not run.committed]:
                    self.unpin(run, held)

    # ---- rings

    def _give_up_ring(self) -> bool:
        """Drop the oldest generation of the ring of the run that was used least recently."""
        candidates = [run for run in self.runs.values() if run.ring and run.ring[0] not in run.pins]
        if not candidates:
            return False
        self._shorten_ring(min(candidates, key=lambda run: run.used_at))
        return True

    def _shorten_ring(self, run: Run) -> None:
        oldest = run.ring.pop(0)
        self._release(self.ring_ledger, oldest.arrays())
        self._release(self.ledger, oldest.arrays())

    def trim_rings(self, run: Run) -> None:
        """Keep the ring of a run within its number, and all rings within their bytes; pinned ones stay."""
        while len(run.ring) > self.ring and run.ring[0] not in run.pins:
            self._shorten_ring(run)
        while self.ring_ledger.used_bytes > self.ring_limit_bytes and self._give_up_ring():
            pass

    # ---- changes

    def hold(self, arrays: Iterable[Bits]) -> None:
        """Count what is held from now on."""
        self.ledger.hold(arrays)

    def let_go(self, arrays: Iterable[Bits]) -> None:
        """Count what is not held any more."""
        self._release(self.ledger, arrays)

    def _release(self, ledger: Ledger, arrays: Iterable[Bits]) -> None:
        self._released += ledger.let_go(arrays)

    def set_chain(self, run: Run, held: Generation, key: str, *, chain: Chain | None) -> None:
        """Set or drop what a generation holds of a chunk; in the ring it then needs no step."""
        old = list(held.chains.get(key, ()))
        step = held.steps.get(key)
        if step is not None and step.delta is not None:
            old.append(step.delta)
        payloads = [entry.payload for entry in old]
        for ledger in self._ledgers(run, held):
            ledger.hold(entry.payload for entry in chain or ())
        held.replace(key, chain)
        held.set_step(key, None)
        for ledger in self._ledgers(run, held):
            self._release(ledger, payloads)

    def _ledgers(self, run: Run, held: Generation) -> list[Ledger]:
        return [self.ledger, self.ring_ledger] if held in run.ring else [self.ledger]

    def swap(self, run: Run, key: str, *, old: Chain, new: Chain) -> None:
        """Replace `old` wherever it is a chunk, or what a chunk's later deltas stand on."""
        for held in run.generations():
            chain = held.chains.get(key)
            if chain is not None and chain[: len(old)] == old:
                self.set_chain(run, held, key, chain=(*new, *chain[len(old) :]))

    def step_instead(
        self, name: str, older: Generation, newer: Generation, *, before: Chain, delta: Entry
    ) -> None:
        """Let a chunk of the ring come from the committed generation, if nothing has changed meanwhile."""
        run, key = self.run(name), delta.descriptor.key
        if not run.ring or run.ring[-1] is not older or run.committed is not newer:
            return
        if older.chains.get(key) != before:
            return
        self.set_chain(run, older, key, chain=None)
        older.set_step(key, Step(before[-1].descriptor, delta))
        for ledger in (self.ledger, self.ring_ledger):
            ledger.hold([delta.payload])

    def discard(self, name: str, key: str, entries: Iterable[Entry], why: str) -> None:
        """Drop damaged payloads of a chunk from every generation, and whatever stands on them."""
        bad = set(entries)
        run = self.run(name)
        for held in run.generations():
            step = held.steps.get(key)
            if not bad.isdisjoint(held.chains.get(key, ())) or (step is not None and step.delta in bad):
                self.set_chain(run, held, key, chain=None)
                self.log_loss(name, held.number, key, why)

    def promote(self, name: str, run: Run, staged: Staged) -> None:
        """Make a prepared save the committed generation."""
        base = run.committed
        if staged.base is not None and (base is None or base.name != staged.base):
            raise StaleBaseError(
                f"node {self.name} cannot commit generation {staged.number} of {name}: its base is "
                f"generation {staged.base[0]} ({staged.base[1]}), it holds {run.described()}"
            )
        new, lost = staged.on(base)
        for key in lost:
            self.log_loss(name, staged.number, key, "the base of its delta was lost meanwhile")
        self.hold(new.arrays())
        run.committed = new
        run.note_save(self.clock.now())
        self.commits.append(Commit(name, staged.number, self.clock.now(), staged.staged_bytes))
        self.commit_count += 1
        self.drop_staged(name, run, staged)
        if base is not None:
            self._to_ring(run, base, ring_generation(base, new, staged.entries))
        if self.on_pending is not None and (run.ring or new.pending):
            self.on_pending(name, new.number)

    def adopt(self, name: str, new: Generation) -> Generation:
        """Have a committed generation that came without a save; return it as it is held.

        What is wanted of it is added to what it has. An older committed generation goes to the ring.
        """
        run, held = self.readable(name, new.name)
        base = run.committed
        if held is None and (base is None or base.number < new.number):
            self.runs[name] = run
            run.committed = held = new
            self.hold(new.arrays())
            if base is not None:
                self._to_ring(run, base, ring_generation(base, new, {}))
        elif held is None or held is not run.committed:
            raise StaleBaseError(
                f"node {self.name} takes no part of generation {new.number} ({new.token}) of {name}: "
                f"it holds {run.described()}"
            )
        held.want(new.wanted)
        run.note_save(self.clock.now())
        return held

    def _to_ring(self, run: Run, old: Generation, older: Generation) -> None:
        """Count out a generation that was replaced, and keep what the ring may have of it."""
        if self.ring:
            run.ring.append(older)
            for ledger in (self.ledger, self.ring_ledger):
                ledger.hold(older.arrays())
        self.let_go_unless_held(run, old)
        self.trim_rings(run)

    def drop_staged(self, name: str, run: Run, staged: Staged) -> None:
        """Forget a save."""
        del run.staged[staged.token]
        self.let_go(staged.arrays())
        if not run.staged and not run.generations():
            self.runs.pop(name, None)

    def drop(self, name: str) -> None:
        """Forget a run; nothing happens if there is none."""
        run = self.runs.pop(name, None)
        if run is not None:
            self.let_go(run.arrays())
            for held in run.ring:
                self._release(self.ring_ledger, held.arrays())

    def unpin(self, run: Run, held: Generation) -> None:
        """Let a generation go unless something else holds it."""
        run.pins.remove(held)
        self.let_go_unless_held(run, held)
        self.trim_rings(run)

    def let_go_unless_held(self, run: Run, held: Generation) -> None:
        """Count a generation out that was replaced or unpinned."""
        if held not in run.generations():
            self.let_go(held.arrays())

    def readable(self, name: str, wanted: Name) -> tuple[Run, Generation | None]:
        """Find a generation; commits a prepared one of exactly that name, since the caller says it is."""
        run = self.run(name)
        held, staged = run.find(wanted), run.staged.get(wanted[1])
        if held is None and staged is not None and staged.name == wanted and staged.prepared:
            try:
                self.promote(name, run, staged)
            except StaleBaseError:
                return run, None
            held = run.committed
        return run, held

    def log_loss(self, run: str, generation: int, key: str, why: str) -> None:
        """Log that data were lost."""
        logger.error(
            "node %s lost a chunk: run %s, generation %d, key %s: %s", self.name, run, generation, key, why
        )
