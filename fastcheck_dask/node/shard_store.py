"""The chunks that a storage node holds in memory; owned by the process, whatever becomes of Dask in it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock
from fastcheck_dask.errors import (
    CorruptDataError,
    FencedError,
    ShardCorruptError,
    ShardUnavailableError,
    StaleBaseError,
    TierError,
)
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.node.entries import Entry, accept, accept_whole
from fastcheck_dask.node.generations import Found, Generation, Name, Run, Staged, Undecided
from fastcheck_dask.node.holdings import LEASE_SECONDS, ORPHAN_SECONDS, STAGED_SECONDS, Holdings
from fastcheck_dask.node.merger import Checked, Merger
from fastcheck_dask.node.status import report_of, summary_of
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.wire import Bits

#: Deltas that may wait on one chunk; a commit that would exceed it merges first.
PENDING_LIMIT = 2
#: Pinned generations of one run.
PIN_LIMIT = 2
#: Chunks below this size, on an average, are checked by one thread at a time.
SMALL_CHUNK_BYTES = 64 * 2**10


class ShardStore:
    """Chunks of committed, older, pinned and staged generations, within a budget of bytes.

    Any thread may call any method. Methods block for as long as the bytes that they check or merge need;
    none does I/O. Arrays that are put in belong to the store afterwards and must not be changed.

    Parameters
    ----------
    name : str
        Of the node, for errors.
    limit_bytes : int
        What staged, committed, older and pinned payloads, waiting deltas and manifests may take together.
    on_pending : callable, optional
        Called with a run and a generation when there is something to merge; must neither block nor call back.
    ring : int
        Older generations of each run that can be read, too, as long as there is room for them.
    clock : Clock
        For leases, and for saves whose author is gone.
    """

    def __init__(
        self,
        name: str,
        limit_bytes: int,
        on_pending: Callable[[str, int], None] | None = None,
        *,
        ring: int = 0,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self.name = name
        self._holdings = Holdings(name, limit_bytes, ring=ring, clock=clock)
        self._merger = Merger(self._holdings)
        self._clock = clock
        self._runs = self._holdings.runs
        #: Newest owner that began a save of each run, and its newest attempt; kept when a run is dropped.
        self._turns: dict[str, tuple[int, int]] = {}
        self._checking_small = threading.Lock()
        self.on_pending = on_pending

    @property
    def on_pending(self) -> Callable[[str, int], None] | None:
        """What is called when there is something to merge."""
        return self._holdings.on_pending

    @on_pending.setter
    def on_pending(self, call: Callable[[str, int], None] | None) -> None:
        self._holdings.on_pending = call

    # ---- what there is

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        with self._holdings.locked():
            return self._holdings.ledger.used_bytes

    def status(self) -> dict[str, Any]:
        """Return what `ping` answers. Does not block; what another thread is changing shows in part."""
        return summary_of(self._holdings)

    def report(self) -> dict[str, Any]:
        """Return what `status` answers: bytes, and of each run what is held, its lease and its damage."""
        with self._holdings.locked():
            return report_of(self._holdings)

    def holds(self, run: str) -> dict[str, Any]:
        """Return the generations of a run: committed, staged, pinned and older ones."""
        with self._holdings.locked():
            return self._holdings.run(run).holds()

    # ---- saving

    def begin(
        self,
        run: str,
        generation: int,
        token: str,
        *,
        shard: int,
        base: Name | None,
        keys: Iterable[str],
        reserve_bytes: int,
        order: int = 0,
        attempt: int = 0,
    ) -> list[str]:
        """Stage a save and return those of `keys` that it has to send whole; see `PeerClient.begin`."""
        wanted = list(keys)
        with self._holdings.locked():
            self._require_turn(run, order, attempt=attempt)
            state = self._holdings.run(run)
            committed = state.committed
            if committed is not None and committed.name == (generation, token):
                return [key for key in wanted if key not in committed.chains]
            if base is not None:
                self._require_base(run, state, base)
            again = state.staged.get(token)
            for other in list(state.staged.values()):
                if other is not again:
                    self._holdings.drop_staged(run, state, other)
            staged = Staged(generation, token, shard, base, frozenset(wanted), reserve_bytes, attempt)
            if again is not None and again.begins_like(staged):
                again.reserve_bytes, again.attempt = reserve_bytes, attempt
                staged = again
            elif again is not None:
                self._holdings.drop_staged(run, state, again)
            state.note_save(self._clock.now())
            staged.expires = self._clock.now() + STAGED_SECONDS
            self._holdings.require_room(run, staged.reserved_bytes, besides=staged)
            self._runs[run] = state
            state.staged[token] = staged
            present = {} if base is None or state.committed is None else state.committed.chains
            return [key for key in wanted if key not in present]

    def put(self, run: str, token: str, chunks: Sequence[tuple[Descriptor, Bits]]) -> None:
        """Stage encoded chunks. All or none; a key that is staged already is replaced if it differs."""
        if self._is_committed(run, token):
            return
        # With small ones only the interpreter has work: several threads would keep the loop from it.
        small = sum(payload.nbytes for _, payload in chunks) < len(chunks) * SMALL_CHUNK_BYTES
        with self._checking_small if small else nullcontext():
            entries = [accept(descriptor, payload, self.name) for descriptor, payload in chunks]
        with self._holdings.locked():
            if self._is_committed(run, token):
                return
            state, staged = self._staged(run, token)
            fresh = [entry for entry in entries if self._is_new(state, staged, entry)]
            nbytes = sum(entry.payload.nbytes for entry in fresh)
            self._holdings.require_room(run, max(nbytes, staged.reserved_bytes), besides=staged)
            staged.expires = self._clock.now() + STAGED_SECONDS
            for entry in fresh:
                old = staged.entries.get(entry.descriptor.key)
                staged.entries[entry.descriptor.key] = entry
                self._holdings.hold([entry.payload])
                staged.staged_bytes += entry.payload.nbytes
                if old is not None:
                    self._holdings.let_go([old.payload])
                    staged.staged_bytes -= old.payload.nbytes

    def prepare(self, run: str, token: str, *, digest: str, manifest: Bits, attempt: int = 0) -> None:
        """Vote for the commit of a staged save: every key is there, and it stays until it is decided."""
        got = digest_of_manifest(manifest.tobytes())
        if got != digest:
            raise ShardCorruptError("manifest", self.name, digest, got)
        with self._holdings.locked():
            if self._is_committed(run, token):
                return
            _, staged = self._staged(run, token)
            if attempt < staged.attempt:
                raise self._late(run, token)
            lacking = sorted(staged.keys - staged.entries.keys())
            if lacking:
                raise TierError(
                    f"node {self.name} cannot prepare generation {staged.number} of {run}: {len(lacking)} of "
                    f"{len(staged.keys)} chunks never came, among them {', '.join(lacking[:3])}"
                )
            old = staged.manifest
            if old is None or old.tobytes() != manifest.tobytes():
                # Another one comes when a node was replaced after this one had voted.
                self._holdings.require_room(run, manifest.nbytes, besides=staged)
                manifest.flags.writeable = False
                staged.manifest = manifest
                self._holdings.hold([manifest])
                self._holdings.let_go([] if old is None else [old])

    def commit(self, run: str, generation: int, token: str) -> None:
        """Make a prepared save the committed generation. Idempotent."""
        with self._holdings.locked():
            deep = self._holdings.run(run).depth() >= PENDING_LIMIT
        if deep and not self._is_committed(run, token):
            self.drain(run)
        with self._holdings.locked():
            if self._is_committed(run, token):
                return
            state, staged = self._staged(run, token)
            if staged.number != generation or not staged.prepared:
                raise StaleBaseError(
                    f"node {self.name} cannot commit generation {generation} of {run} ({token}): "
                    f"it holds {state.described()}"
                )
            self._holdings.promote(run, state, staged)

    def abort(self, run: str, token: str, *, attempt: int | None = None) -> None:
        """Drop a staged save; nothing happens if there is none, or it was begun anew after that `attempt`."""
        with self._holdings.locked():
            state = self._runs.get(run)
            staged = None if state is None else state.staged.get(token)
            if state is not None and staged is not None and (attempt is None or attempt >= staged.attempt):
                self._holdings.drop_staged(run, state, staged)

    def orphan(self, run: str, token: str) -> None:
        """Note that the last connection of a save's author is gone: the save expires unless it comes back."""
        with self._holdings.locked():
            staged = self._holdings.run(run).staged.get(token)
            if staged is not None:
                staged.expires = min(staged.expires, self._clock.now() + ORPHAN_SECONDS)

    def expire(self) -> None:
        """Drop the staged saves whose time is over; called now and then."""
        with self._holdings.locked():
            self._holdings.expire()

    def undecided(self) -> list[Undecided]:
        """Return the runs that nobody saves now, and whose saves or persisting are not known of."""
        now = self._clock.now()
        with self._holdings.locked():
            return [
                Undecided(name, prepared)
                for name, run in self._runs.items()
                if all(staged.expires <= now for staged in run.staged.values())
                and (
                    (prepared := [staged.name for staged in run.staged.values() if staged.prepared])
                    or (
                        run.committed is not None
                        and run.committed.number > run.persisted
                        and run.lease_ends(LEASE_SECONDS) <= now
                    )
                )
            ]

    # ---- what may be evicted

    def lease(self, run: str, seconds: float) -> bool:
        """Keep a run for so long from now; say whether anything of it is here."""
        with self._holdings.locked():
            state = self._runs.get(run)
            if state is None:
                return False
            state.leased_until = self._clock.now() + seconds
            return True

    def persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation: what is held here up to it may be evicted some day."""
        with self._holdings.locked():
            state, held = self._holdings.readable(run, (generation, token))
            committed = state.committed
            # Another author's generation of that number says nothing of ours.
            if held is not None or (committed is not None and committed.number < generation):
                state.persisted = max(state.persisted, generation)

    # ---- reading

    def reading(self) -> AbstractContextManager[None]:
        """Keep background work from starting while a load is served."""
        return self._merger.reading()

    def manifest(self, run: str, generation: int, token: str) -> Bits:
        """Return the manifest of a readable or prepared generation."""
        with self._holdings.locked():
            state = self._holdings.run(run)
            found: Generation | Staged | None = state.find((generation, token)) or state.staged.get(token)
            if found is None or found.manifest is None or found.number != generation:
                raise self._unavailable(run, state, (generation, token))
            return found.manifest

    def read(
        self, run: str, generation: int, token: str, *, keys: Sequence[str], limit_bytes: int | None = None
    ) -> Found:
        """Return whole chunks whose checksums are good; their waiting deltas are merged first.

        Raises
        ------
        ShardUnavailableError
            If the generation is not held, or was replaced meanwhile.
        TierError
            If the chunks have more than `limit_bytes`.
        """
        name = (generation, token)
        with self._holdings.locked():
            self._readable(run, name)
        entries, corrupt, nbytes = [], [], 0
        for key in keys:
            entry, damaged = self._merger.fetch(run, name, key)
            if damaged:
                corrupt.append(key)
            if entry is not None:
                entries.append(entry)
                nbytes += entry.payload.nbytes
            if limit_bytes is not None and nbytes > limit_bytes:
                raise TierError(
                    f"more than {limit_bytes:,} bytes were asked for at once, and no more are sent"
                )
        with self._holdings.locked():
            # Had it been replaced meanwhile, what is missing would not be missing.
            self._readable(run, name)
        good = {entry.descriptor.key for entry in entries}
        return Found(entries, [key for key in keys if key not in good], corrupt)

    def repair(
        self, run: str, generation: int, token: str, chunks: Sequence[tuple[Descriptor, Bits]]
    ) -> None:
        """Put whole chunks back, if their bits are those that the generation was saved with."""
        entries = [accept_whole(descriptor, payload, self.name) for descriptor, payload in chunks]
        with self._holdings.locked():
            held, state = self._readable(run, (generation, token)), self._runs[run]
            for entry in entries:
                key, _, raw_nbytes, digest, _, _ = entry.descriptor
                if held.wanted.get(key) != (digest, raw_nbytes):
                    raise CorruptDataError(
                        f"chunk {key} does not belong to generation {generation} of {run} on node {self.name}"
                    )
            self._holdings.require_room(run, sum(entry.payload.nbytes for entry in entries))
            for entry in entries:
                self._holdings.set_chain(state, held, entry.descriptor.key, chain=(entry,))
            self._holdings.repaired_count += len(entries)

    def adopt(
        self,
        run: str,
        generation: int,
        token: str,
        *,
        manifest: Bits,
        wanted: Mapping[str, tuple[str, int]],
        reserve_bytes: int,
    ) -> list[str]:
        """Hold a shard of a committed generation; return which of its chunks are not here yet.

        They are put in by :meth:`repair`, and count as damaged until then; see `PeerClient.adopt`.
        """
        manifest.flags.writeable = False
        new = Generation(generation, token, manifest, dict(wanted))
        with self._holdings.locked():
            if self._holdings.run(run).find((generation, token)) is None:
                self._holdings.require_room(run, manifest.nbytes + reserve_bytes)
            held = self._holdings.adopt(run, new)
            return [key for key in wanted if key not in held.chains]

    def quarantine(self, run: str, generation: int, token: str, keys: Iterable[str]) -> None:
        """Drop chunks that a reader found to decode to wrong bits."""
        why = "a reader found its bits to be wrong"
        with self._holdings.locked():
            held, state = self._readable(run, (generation, token)), self._runs[run]
            for key in keys:
                if key in held.chains:
                    self._holdings.discard(run, key, held.chains[key][-1:], why)
                elif key in held.steps:
                    self._holdings.set_chain(state, held, key, chain=None)
                    self._holdings.log_loss(run, generation, key, why)

    def pin(self, run: str, generation: int, token: str) -> None:
        """Keep a generation readable whatever is committed later; its waiting deltas are merged now."""
        with self._holdings.locked():
            held, state = self._readable(run, (generation, token)), self._runs[run]
            if held not in state.pins:
                state.pins.append(held)
            if len(state.pins) > PIN_LIMIT:
                self._holdings.unpin(state, state.pins[0])
        self._merger.drain_generations(run, [held], None, background=False)

    def unpin(self, run: str, generation: int, token: str) -> None:
        """Undo :meth:`pin`; nothing happens if it is not pinned."""
        with self._holdings.locked():
            state = self._holdings.run(run)
            for held in [g for g in state.pins if g.name == (generation, token)]:
                self._holdings.unpin(state, held)

    def drop(self, run: str) -> None:
        """Forget a run."""
        with self._holdings.locked():
            self._holdings.drop(run)

    # ---- merging

    def drain(self, run: str, keys: Iterable[str] | None = None, *, background: bool = False) -> None:
        """Merge the waiting deltas of a run, or of some of its keys. Idempotent; several threads may call it.

        A chunk that cannot be merged to the digest its author gave is dropped, with an ERROR in the log. With
        `background`, waits before each chunk until no load is being served.
        """
        self._merger.drain(run, None if keys is None else list(keys), background=background)

    def stop_background(self) -> None:
        """End the work in the background, after the chunk that it is at; what begins later does nothing."""
        self._merger.stop()

    # ---- scrubbing

    def chunks(self) -> Iterator[tuple[str, Name, str]]:
        """Yield every chunk that can be read, a generation at a time: run, generation and key."""
        with self._holdings.locked():
            found = [(name, held) for name, run in self._runs.items() for held in run.generations()]
        for name, held in found:
            with self._holdings.locked():
                keys = [*held.chains, *held.steps]
            for key in keys:
                yield name, held.name, key

    def check(self, run: str, name: Name, key: str) -> Checked | None:
        """Compare the checksums of a chunk's payloads, once no load is served; a damaged one counts as lost.

        None if background work shall end.
        """
        return self._merger.check(run, name, key) if self._merger.wait_until_quiet() else None

    def _is_committed(self, run: str, token: str) -> bool:
        with self._holdings.locked():
            committed = self._holdings.run(run).committed
            return committed is not None and committed.token == token

    def _staged(self, run: str, token: str) -> tuple[Run, Staged]:
        state = self._holdings.run(run)
        if token not in state.staged:
            raise StaleBaseError(
                f"node {self.name} knows no save {token} of {run}; it holds {state.described()}; begin again"
            )
        return state, state.staged[token]

    def _is_new(self, state: Run, staged: Staged, entry: Entry) -> bool:
        """Say whether an entry has to be staged; raise if it cannot be."""
        key = entry.descriptor.key
        if key not in staged.keys:
            raise TierError(f"chunk {key} is not among the keys that the save {staged.token} began with")
        old = staged.entries.get(key)
        if old is not None and old.descriptor == entry.descriptor:
            return False
        if staged.prepared:
            raise TierError(f"chunk {key} came after the save {staged.token} was prepared")
        if entry.is_delta:
            base = state.committed if state.committed and state.committed.name == staged.base else None
            chain = base.chains.get(key) if base is not None else None
            if chain is None or not entry.stands_on(chain[-1]):
                # Other bits: the author's copy of the base was damaged. Found now, nothing is lost yet.
                raise StaleBaseError(f"node {self.name} has no such base for chunk {key}; send it whole")
        return True

    def _require_turn(self, run: str, order: int, *, attempt: int) -> None:
        """Refuse an owner, or an attempt, that a newer one followed: it would drop what that has staged."""
        newest = self._turns.get(run, (0, 0))
        if order < newest[0]:
            raise FencedError(f"node {self.name}: run {run} has a newer owner; stop saving it")
        if (order, attempt) < newest:
            raise self._late(run, f"of attempt {attempt}")
        self._turns[run] = order, attempt

    def _late(self, run: str, save: str) -> StaleBaseError:
        return StaleBaseError(
            f"node {self.name}: a message came late, the author of the save {save} of {run} has "
            "begun anew since"
        )

    def _require_base(self, run: str, state: Run, base: Name) -> None:
        """Have `base` as the committed generation, or raise `StaleBaseError`."""
        if state.committed is not None and state.committed.name == base:
            return
        staged = state.staged.get(base[1])
        if staged is None or staged.name != base or not staged.prepared:
            raise StaleBaseError(
                f"node {self.name} does not hold generation {base[0]} ({base[1]}) of {run} as a base; "
                f"it holds {state.described()}"
            )
        self._holdings.promote(run, state, staged)

    def _readable(self, run: str, name: Name) -> Generation:
        """Return a readable generation; commits a prepared one, since the caller says it is."""
        state, held = self._holdings.readable(run, name)
        if held is None:
            raise self._unavailable(run, state, name)
        state.used_at = self._clock.now()
        return held

    def _unavailable(self, run: str, state: Run, name: Name) -> ShardUnavailableError:
        return ShardUnavailableError(
            f"node {self.name} does not hold generation {name[0]} ({name[1]}) of {run}; "
            f"it holds {state.described()}"
        )
