"""What a storage node holds of one run: the committed generation, staged saves and pins. No locks, no I/O."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fastcheck_dask.node.entries import Chain, Entry, extend
from fastcheck_dask.tiers.wire import Bits

Name = tuple[int, str]


@dataclass(eq=False)
class Generation:
    """A generation that can be read, as far as it lies on this node."""

    number: int
    token: str
    manifest: Bits
    #: Digest and raw bytes that each key must have, also of those that were lost.
    wanted: dict[str, tuple[str, int]]
    chains: dict[str, Chain]
    #: Keys with deltas that wait to be merged.
    pending: set[str]

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

    def replace(self, key: str, chain: Chain | None) -> None:
        """Set or drop what is held of a key."""
        if chain is None:
            self.chains.pop(key, None)
        else:
            self.chains[key] = chain
        if chain is not None and len(chain) > 1:
            self.pending.add(key)
        else:
            self.pending.discard(key)


@dataclass(eq=False)
class Staged:
    """A save that is not committed."""

    number: int
    token: str
    shard: int
    base: Name | None
    keys: frozenset[str]
    reserve_bytes: int
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
        new = Generation(self.number, self.token, self.manifest, {}, {}, set())
        lost = []
        for key, entry in self.entries.items():
            new.wanted[key] = (entry.descriptor.digest, entry.descriptor.raw_nbytes)
            chain = extend(None if base is None else base.chains.get(key), entry)
            new.replace(key, chain)
            if chain is None:
                lost.append(key)
        return new, lost


@dataclass(eq=False)
class Run:
    """One run."""

    committed: Generation | None = None
    #: By token.
    staged: dict[str, Staged] = field(default_factory=dict)
    #: Oldest first; may contain the committed generation.
    pins: list[Generation] = field(default_factory=list)
    #: Held while one chunk is merged.
    merging: threading.Lock = field(default_factory=threading.Lock)

    def generations(self) -> list[Generation]:
        """Return everything that can be read, oldest first, each once."""
        found = list(self.pins)
        if self.committed is not None and self.committed not in found:
            found.append(self.committed)
        return found

    def find(self, name: Name) -> Generation | None:
        """Return the readable generation of that number and token."""
        return next((g for g in self.generations() if g.name == name), None)

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
        }

    def described(self) -> str:
        """Say in words what is held, for error messages."""
        held = [f"generation {g.number} ({g.token})" for g in self.generations()]
        held += [
            f"{'prepared' if s.prepared else 'staged'} generation {s.number} ({s.token})"
            for s in self.staged.values()
        ]
        return ", ".join(held) or "nothing"
