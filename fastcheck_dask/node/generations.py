"""What a storage node holds of one run: generations, staged saves and pins. No locks, no I/O.

The *ring* has the generations before the committed one. Of each it keeps, chunk by chunk, the way back from
the next generation: the delta that led there, to be undone; nothing where the chunk did not change; or the
chunk as it was, where the next one came whole or not at all, or where it takes less.
"""

from __future__ import annotations

import itertools
import math
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from fastcheck_dask.node.entries import Chain, Entry, Step, extend
from fastcheck_dask.node.untracked import untrack
from fastcheck_dask.tiers.wire import Bits

Name = tuple[int, str]


@dataclass(eq=False)
class Generation:
    """A generation that can be read, as far as it lies on this node.

    What it holds is changed by its methods alone: they count, so that nobody has to go through all keys to
    say how much is held and what was lost.
    """

    number: int
    token: str
    manifest: Bits
    #: Digest and raw bytes that each key must have, also of those that were lost.
    wanted: dict[str, tuple[str, int]]
    chains: dict[str, Chain] = field(default_factory=dict, init=False)
    #: Keys with deltas that wait to be merged.
    pending: set[str] = field(default_factory=set, init=False)
    #: Of a generation in the ring: the chunks that come from the next generation.
    steps: dict[str, Step] = field(default_factory=dict, init=False)
    #: Wanted keys with neither a chain nor a step.
    lost: set[str] = field(init=False)
    #: Bytes of all that it holds, what it shares with others included.
    nbytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.lost = set(self.wanted)
        self.nbytes = self.manifest.nbytes

    @property
    def name(self) -> Name:
        """Number and token."""
        return self.number, self.token

    def arrays(self) -> Iterator[Bits]:
        """Yield every array that it holds."""
        yield self.manifest
        for chain in self.chains.values():
            for entry in chain:
                yield entry.payload
        for step in self.steps.values():
            if step.delta is not None:
                yield step.delta.payload

    def want(self, wanted: Mapping[str, tuple[str, int]]) -> None:
        """Say what more keys must have."""
        self.wanted.update(wanted)
        self.lost.update(key for key in wanted if key not in self.chains and key not in self.steps)

    def replace(self, key: str, chain: Chain | None) -> None:
        """Set or drop what is held of a key."""
        self.nbytes -= sum(entry.payload.nbytes for entry in self.chains.get(key, ()))
        if chain is None:
            self.chains.pop(key, None)
        else:
            untrack(chain)
            self.chains[key] = chain
            self.nbytes += sum(entry.payload.nbytes for entry in chain)
        if chain is not None and len(chain) > 1:
            self.pending.add(key)
        else:
            self.pending.discard(key)
        self._note(key)

    def set_step(self, key: str, step: Step | None) -> None:
        """Set or drop how a key comes from the next generation."""
        old = self.steps.pop(key, None)
        if old is not None and old.delta is not None:
            self.nbytes -= old.delta.payload.nbytes
        if step is not None:
            untrack(step)
            self.steps[key] = step
            if step.delta is not None:
                self.nbytes += step.delta.payload.nbytes
        self._note(key)

    def _note(self, key: str) -> None:
        if key in self.chains or key in self.steps:
            self.lost.discard(key)
        elif key in self.wanted:
            self.lost.add(key)


@dataclass(eq=False)
class Staged:
    """A save that is not committed."""

    number: int
    token: str
    shard: int
    base: Name | None
    keys: frozenset[str]
    reserve_bytes: int
    #: Of its author: how often it had begun a save of this run when it began this one.
    attempt: int = 0
    #: When it is given up unless its author comes back, by the clock of the store.
    expires: float = math.inf
    entries: dict[str, Entry] = field(default_factory=dict)
    staged_bytes: int = 0
    manifest: Bits | None = None

    @property
    def name(self) -> Name:
        """Number and token."""
        return self.number, self.token

    @property
    def prepared(self) -> bool:
        """Whether this node voted for the commit."""
        return self.manifest is not None

    @property
    def reserved_bytes(self) -> int:
        """What is promised to it and has not come yet."""
        return 0 if self.prepared else max(0, self.reserve_bytes - self.staged_bytes)

    def begins_like(self, other: Staged) -> bool:
        """Say whether two announcements are of the same save."""
        return (self.number, self.base, self.keys) == (other.number, other.base, other.keys)

    def arrays(self) -> Iterator[Bits]:
        """Yield every array that it holds."""
        if self.manifest is not None:
            yield self.manifest
        for entry in self.entries.values():
            yield entry.payload

    def on(self, base: Generation | None) -> tuple[Generation, list[str]]:
        """Return the generation that this becomes when committed, and the keys whose base was lost."""
        assert self.manifest is not None
        descriptors = (entry.descriptor for entry in self.entries.values())
        wanted = {of.key: (of.digest, of.raw_nbytes) for of in descriptors}
        new = Generation(self.number, self.token, self.manifest, wanted)
        lost = []
        for key, entry in self.entries.items():
            chain = extend(None if base is None else base.chains.get(key), entry)
            new.replace(key, chain)
            if chain is None:
                lost.append(key)
        return new, lost


def ring_generation(old: Generation, new: Generation, fresh: Mapping[str, Entry]) -> Generation:
    """Return what the ring keeps of a generation that another one follows.

    Parameters
    ----------
    old, new : Generation
        The committed generation, and the next one.
    fresh : mapping of str to Entry
        What was sent for the next one.
    """
    kept = Generation(old.number, old.token, old.manifest, old.wanted)
    for key, chain in old.chains.items():
        step = _step(chain, fresh[key]) if key in fresh and key in new.chains else None
        if step is not None:
            kept.set_step(key, step)
        else:
            kept.replace(key, chain)
    return kept


def _step(chain: Chain, entry: Entry) -> Step | None:
    """Return the step back over `entry`; None if the chunk has to be kept as it was."""
    old, new = chain[-1].descriptor, entry.descriptor
    if (old.raw_nbytes, old.digest, old.dtype) == (new.raw_nbytes, new.digest, new.dtype):
        return Step(old, None)
    # What a shorter parity chunk cut off is not in its delta.
    if not entry.is_delta or new.raw_nbytes < old.raw_nbytes:
        return None
    smaller = entry.payload.nbytes <= sum(part.payload.nbytes for part in chain)
    return Step(old, entry) if smaller else None


@dataclass(eq=False)
class Run:
    """One run."""

    committed: Generation | None = None
    #: By token.
    staged: dict[str, Staged] = field(default_factory=dict)
    #: Oldest first; each but the last is followed by the next one, the last by the committed generation.
    ring: list[Generation] = field(default_factory=list)
    #: Oldest first; may contain the committed generation and some of the ring.
    pins: list[Generation] = field(default_factory=list)
    #: Number of the newest generation that the object tier is known to have; -1 if none is.
    persisted: int = -1
    #: When it was last saved or read, when it was last saved, and until when its owner asked to keep it.
    used_at: float = -math.inf
    saved_at: float = -math.inf
    leased_until: float | None = None
    #: Held while one chunk is merged.
    merging: threading.Lock = field(default_factory=threading.Lock)

    def generations(self) -> list[Generation]:
        """Return everything that can be read, oldest first, each once."""
        found = [*self.ring, *self.pins, *([self.committed] if self.committed is not None else [])]
        return list(dict.fromkeys(found))

    def find(self, name: Name) -> Generation | None:
        """Return the readable generation of that number and token; one that is held whole if there is."""
        return next((g for g in reversed(self.generations()) if g.name == name), None)

    def way_to(self, held: Generation, key: str) -> tuple[Chain, list[Step]] | None:
        """Return a chain, and the steps from it to a chunk of a generation; None if the chunk is lost."""
        line = [held]
        if held in self.ring:
            line = [*itertools.dropwhile(lambda g: g is not held, self.ring)]
            line += [self.committed] if self.committed is not None else []
        steps: list[Step] = []
        for generation in line:
            if key in generation.chains:
                return generation.chains[key], steps[::-1]
            if key not in generation.steps:
                return None
            steps.append(generation.steps[key])
        return None

    def note_save(self, now: float) -> None:
        """Note that the run is saved: a lease that its owner let end counts anew."""
        self.used_at = self.saved_at = now
        if self.leased_until is not None and self.leased_until <= now:
            self.leased_until = None

    def lease_ends(self, default_seconds: float) -> float:
        """Return until when the run is kept: what its owner asked for, or some time after its last save."""
        return self.saved_at + default_seconds if self.leased_until is None else self.leased_until

    def depth(self) -> int:
        """Return how many deltas wait on the chunk that has most."""
        if self.committed is None:
            return 0
        return max((len(self.committed.chains[key]) - 1 for key in self.committed.pending), default=0)

    def arrays(self) -> Iterator[Bits]:
        """Yield every array that is held, once for each generation and save that holds it."""
        for held in self.generations():
            yield from held.arrays()
        for staged in self.staged.values():
            yield from staged.arrays()

    def holds(self) -> dict[str, Any]:
        """Return the names of everything that is held, as plain values."""
        return {
            "committed": None if self.committed is None else list(self.committed.name),
            "staged": [[*s.name, s.prepared] for s in self.staged.values()],
            "pins": [list(g.name) for g in self.pins],
            "ring": [list(g.name) for g in self.ring],
        }

    def described(self) -> str:
        """Say in words what is held, for error messages."""
        held = [f"generation {g.number} ({g.token})" for g in self.generations()]
        held += [
            f"{'prepared' if s.prepared else 'staged'} generation {s.number} ({s.token})"
            for s in self.staged.values()
        ]
        return ", ".join(held) or "nothing"


class Found(NamedTuple):
    """What a read gives."""

    entries: list[Entry]
    missing: list[str]
    #: Those of `missing` that were damaged.
    corrupt: list[str]


class Undecided(NamedTuple):
    """A run of which the coordinator knows more."""

    run: str
    #: Saves that this node voted for, and whose author has not been heard of for long.
    prepared: list[Name]
