"""The chunks that a storage node holds in memory; owned by the process, whatever becomes of Dask in it."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from fastcheck_codecs import CodecError

from fastcheck_dask.errors import (
    CorruptDataError,
    FencedError,
    NodeFullError,
    ShardCorruptError,
    ShardUnavailableError,
    StaleBaseError,
    TierError,
)
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.node.entries import Chain, Entry, Ledger, accept, accept_whole, is_intact, merge
from fastcheck_dask.node.generations import Generation, Name, Run, Staged
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.wire import Bits

#: Deltas that may wait on one chunk; a commit that would exceed it merges first.
PENDING_LIMIT = 2
#: Pinned generations of one run.
PIN_LIMIT = 2

logger = logging.getLogger(__name__)


class Found(NamedTuple):
    """What a read gives."""

    entries: list[Entry]
    missing: list[str]
    #: Those of `missing` that were damaged.
    corrupt: list[str]


class ShardStore:
    """Chunks of committed, pinned and staged generations, within a budget of bytes.

    Any thread may call any method. Methods block for as long as the bytes that they check or merge need;
    none does I/O. Arrays that are put in belong to the store afterwards and must not be changed.

    Parameters
    ----------
    name : str
        Of the node, for errors.
    limit_bytes : int
        What staged, committed and pinned payloads, waiting deltas and manifests may take together.
    on_pending : callable, optional
        Called with a run and a generation when its deltas begin to wait; must neither block nor call back.
    """

    def __init__(
        self, name: str, limit_bytes: int, on_pending: Callable[[str, int], None] | None = None
    ) -> None:
        self.name = name
        self.limit_bytes = limit_bytes
        self.on_pending = on_pending
        self._lock = threading.RLock()
        self._quiet = threading.Condition(self._lock)
        self._readers = 0
        self._stopped = False
        self._runs: dict[str, Run] = {}
        self._ledger = Ledger()
        #: Of the newest owner that began a save of each run; kept when a run is dropped.
        self._orders: dict[str, int] = {}

    # ---- what there is

    @property
    def used_bytes(self) -> int:
        """Bytes held now."""
        with self._lock:
            return self._ledger.used_bytes

    def status(self) -> dict[str, Any]:
        """Return what `ping` answers."""
        with self._lock:
            return {
                "name": self.name,
                "used_bytes": self._ledger.used_bytes,
                "limit_bytes": self.limit_bytes,
                "runs": {
                    name: None if run.committed is None else list(run.committed.name)
                    for name, run in self._runs.items()
                },
                "pending": sum(len(g.pending) for run in self._runs.values() for g in run.generations()),
            }

    def holds(self, run: str) -> dict[str, Any]:
        """Return the generations of a run: committed, staged and pinned."""
        with self._lock:
            return (self._runs.get(run) or Run()).holds()

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
    ) -> list[str]:
        """Stage a save and return those of `keys` that it has to send whole; see `PeerClient.begin`."""
        wanted = list(keys)
        with self._lock:
            self._require_order(run, order)
            state = self._runs.get(run) or Run()
            committed = state.committed
            if committed is not None and committed.name == (generation, token):
                return [key for key in wanted if key not in committed.chains]
            if base is not None:
                self._require_base(run, state, base)
            again = state.staged.get(token)
            for other in list(state.staged.values()):
                if other is not again:
                    self._drop_staged(run, state, other)
            staged = Staged(generation, token, shard, base, frozenset(wanted), reserve_bytes)
            if again is not None and again.begins_like(staged):
                again.reserve_bytes = reserve_bytes
                staged = again
            elif again is not None:
                self._drop_staged(run, state, again)
            self._require_room(staged.reserved_bytes, besides=staged)
            self._runs[run] = state
            state.staged[token] = staged
            present = {} if base is None or state.committed is None else state.committed.chains
            return [key for key in wanted if key not in present]

    def put(self, run: str, token: str, chunks: Sequence[tuple[Descriptor, Bits]]) -> None:
        """Stage encoded chunks. All or none; a key that is staged already is replaced if it differs."""
        if self._is_committed(run, token):
            return
        entries = [accept(descriptor, payload, self.name) for descriptor, payload in chunks]
        with self._lock:
            if self._is_committed(run, token):
                return
            state, staged = self._staged(run, token)
            fresh = [entry for entry in entries if self._is_new(state, staged, entry)]
            nbytes = sum(entry.payload.nbytes for entry in fresh)
            self._require_room(max(nbytes, staged.reserved_bytes), besides=staged)
            for entry in fresh:
                old = staged.entries.get(entry.descriptor.key)
                staged.entries[entry.descriptor.key] = entry
                self._ledger.hold([entry.payload])
                staged.staged_bytes += entry.payload.nbytes
                if old is not None:
                    self._ledger.let_go([old.payload])
                    staged.staged_bytes -= old.payload.nbytes

    def prepare(self, run: str, token: str, *, digest: str, manifest: Bits) -> None:
        """Vote for the commit of a staged save: every key is there, and it stays until it is decided."""
        got = digest_of_manifest(manifest.tobytes())
        if got != digest:
            raise ShardCorruptError("manifest", self.name, digest, got)
        with self._lock:
            if self._is_committed(run, token):
                return
            _, staged = self._staged(run, token)
            lacking = sorted(staged.keys - staged.entries.keys())
            if lacking:
                raise TierError(
                    f"node {self.name} cannot prepare generation {staged.number} of {run}: {len(lacking)} of "
                    f"{len(staged.keys)} chunks never came, among them {', '.join(lacking[:3])}"
                )
            old = staged.manifest
            if old is None or old.tobytes() != manifest.tobytes():
                # Another one comes when a node was replaced after this one had voted.
                self._require_room(manifest.nbytes, besides=staged)
                manifest.flags.writeable = False
                staged.manifest = manifest
                self._ledger.hold([manifest])
                self._ledger.let_go([] if old is None else [old])

    def commit(self, run: str, generation: int, token: str) -> None:
        """Make a prepared save the committed generation. Idempotent."""
        with self._lock:
            deep = (self._runs.get(run) or Run()).depth() >= PENDING_LIMIT
        if deep and not self._is_committed(run, token):
            self.drain(run)
        with self._lock:
            if self._is_committed(run, token):
                return
            state, staged = self._staged(run, token)
            if staged.number != generation or not staged.prepared:
                raise StaleBaseError(
                    f"node {self.name} cannot commit generation {generation} of {run} ({token}): "
                    f"it holds {state.described()}"
                )
            self._promote(run, state, staged)

    def abort(self, run: str, token: str) -> None:
        """Drop a staged save; nothing happens if there is none."""
        with self._lock:
            state = self._runs.get(run)
            if state is not None and token in state.staged:
                self._drop_staged(run, state, state.staged[token])

    # ---- reading

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Keep background merges from starting while a load is served."""
        with self._lock:
            self._readers += 1
        try:
            yield
        finally:
            with self._lock:
                self._readers -= 1
                self._quiet.notify_all()

    def manifest(self, run: str, generation: int, token: str) -> Bits:
        """Return the manifest of a readable or prepared generation."""
        with self._lock:
            state = self._runs.get(run) or Run()
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
        with self._lock:
            held = self._readable(run, name)
        self._drain(run, [held], keys, background=False)
        with self._lock:
            state = self._runs.get(run) or Run()
            if held not in state.generations():
                raise self._unavailable(run, state, name)
            found = {key: held.chains[key] for key in keys if key in held.chains}
        nbytes = sum(chain[0].payload.nbytes for chain in found.values())
        if limit_bytes is not None and nbytes > limit_bytes:
            raise TierError(f"{nbytes:,} bytes were asked for at once, at most {limit_bytes:,} are sent")
        entries, corrupt = [], []
        for key, chain in found.items():
            assert len(chain) == 1
            if is_intact(chain[0]):
                entries.append(chain[0])
            else:
                corrupt.append(key)
                self._swap(run, key, chain, None)
                self._log_loss(run, generation, key, "its payload fails its checksum")
        good = {entry.descriptor.key for entry in entries}
        return Found(entries, [key for key in keys if key not in good], corrupt)

    def repair(
        self, run: str, generation: int, token: str, chunks: Sequence[tuple[Descriptor, Bits]]
    ) -> None:
        """Put whole chunks back, if their bits are those that the generation was saved with."""
        entries = [accept_whole(descriptor, payload, self.name) for descriptor, payload in chunks]
        with self._lock:
            held = self._readable(run, (generation, token))
            for entry in entries:
                key, _, raw_nbytes, digest, _, _ = entry.descriptor
                if held.wanted.get(key) != (digest, raw_nbytes):
                    raise CorruptDataError(
                        f"chunk {key} does not belong to generation {generation} of {run} on node {self.name}"
                    )
            self._require_room(sum(entry.payload.nbytes for entry in entries))
            for entry in entries:
                self._set(held, entry.descriptor.key, (entry,))

    def quarantine(self, run: str, generation: int, token: str, keys: Iterable[str]) -> None:
        """Drop chunks that a reader found to decode to wrong bits."""
        with self._lock:
            held = self._readable(run, (generation, token))
            for key in keys:
                chain = held.chains.get(key)
                if chain is not None:
                    self._swap(run, key, chain, None)
                    self._log_loss(run, generation, key, "a reader found its bits to be wrong")

    def pin(self, run: str, generation: int, token: str) -> None:
        """Keep a generation readable whatever is committed later; its waiting deltas are merged now."""
        with self._lock:
            held, state = self._readable(run, (generation, token)), self._runs[run]
            if held not in state.pins:
                state.pins.append(held)
            if len(state.pins) > PIN_LIMIT:
                self._unpin(state, state.pins[0])
        self._drain(run, [held], None, background=False)

    def unpin(self, run: str, generation: int, token: str) -> None:
        """Undo :meth:`pin`; nothing happens if it is not pinned."""
        with self._lock:
            state = self._runs.get(run) or Run()
            for held in [g for g in state.pins if g.name == (generation, token)]:
                self._unpin(state, held)

    def drop(self, run: str) -> None:
        """Forget a run."""
        with self._lock:
            state = self._runs.pop(run, None)
            if state is not None:
                self._ledger.let_go(state.arrays())

    # ---- merging

    def drain(self, run: str, keys: Iterable[str] | None = None, *, background: bool = False) -> None:
        """Merge the waiting deltas of a run, or of some of its keys. Idempotent; several threads may call it.

        A chunk that cannot be merged to the digest its author gave is dropped, with an ERROR in the log. With
        `background`, waits before each chunk until no load is being served.
        """
        with self._lock:
            state = self._runs.get(run)
            helds = [] if state is None else state.generations()
        self._drain(run, helds, None if keys is None else list(keys), background=background)

    def stop_background(self) -> None:
        """End the drains that run in the background, after the chunk each is at; later ones do nothing."""
        with self._quiet:
            self._stopped = True
            self._quiet.notify_all()

    def _drain(
        self, run: str, helds: Iterable[Generation], keys: Sequence[str] | None, *, background: bool
    ) -> None:
        for held in helds:
            with self._lock:
                waiting = sorted(held.pending) if keys is None else [k for k in keys if k in held.pending]
            for key in waiting:
                if background:
                    with self._quiet:
                        self._quiet.wait_for(lambda: self._readers == 0 or self._stopped)
                        if self._stopped:
                            return
                self._merge_one(run, held, key)

    def _merge_one(self, run: str, held: Generation, key: str) -> None:
        with self._lock:
            state = self._runs.get(run)
        if state is None:
            return
        with state.merging:
            with self._lock:
                chain = held.chains.get(key)
            if chain is None or len(chain) == 1:
                return
            merged: Chain | None = None
            try:
                merged = (merge(chain),)
            except (CodecError, CorruptDataError) as error:
                self._log_loss(run, held.number, key, f"its deltas cannot be merged: {error}")
            self._swap(run, key, chain, merged)

    def _swap(self, run: str, key: str, old: Chain, new: Chain | None) -> None:
        """Replace `old` wherever it is a chunk, or what a chunk's later deltas stand on; None drops it."""
        with self._lock:
            state = self._runs.get(run) or Run()
            for held in state.generations():
                chain = held.chains.get(key)
                if chain is not None and chain[: len(old)] == old:
                    self._set(held, key, None if new is None else (*new, *chain[len(old) :]))

    def _set(self, held: Generation, key: str, chain: Chain | None) -> None:
        old = held.chains.get(key, ())
        self._ledger.hold(entry.payload for entry in chain or ())
        held.replace(key, chain)
        self._ledger.let_go(entry.payload for entry in old)

    def _is_committed(self, run: str, token: str) -> bool:
        with self._lock:
            committed = (self._runs.get(run) or Run()).committed
            return committed is not None and committed.token == token

    def _staged(self, run: str, token: str) -> tuple[Run, Staged]:
        state = self._runs.get(run) or Run()
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

    def _require_order(self, run: str, order: int) -> None:
        """Refuse an owner that a newer one followed: it would drop what the newer one has staged."""
        if order < self._orders.get(run, 0):
            raise FencedError(f"node {self.name}: run {run} has a newer owner; stop saving it")
        self._orders[run] = order

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
        self._promote(run, state, staged)

    def _require_room(self, wanted_bytes: int, besides: Staged | None = None) -> None:
        promised = sum(
            staged.reserved_bytes
            for run in self._runs.values()
            for staged in run.staged.values()
            if staged is not besides
        )
        free = self.limit_bytes - self._ledger.used_bytes - promised
        if wanted_bytes > free:
            raise NodeFullError(self.name, wanted_bytes, max(0, free))

    def _promote(self, run: str, state: Run, staged: Staged) -> None:
        base = state.committed
        if staged.base is not None and (base is None or base.name != staged.base):
            raise StaleBaseError(
                f"node {self.name} cannot commit generation {staged.number} of {run}: its base is generation "
                f"{staged.base[0]} ({staged.base[1]}), it holds {state.described()}"
            )
        new, lost = staged.on(base)
        for key in lost:
            self._log_loss(run, staged.number, key, "the base of its delta was lost meanwhile")
        self._ledger.hold(new.arrays())
        state.committed = new
        self._drop_staged(run, state, staged)
        if base is not None:
            self._let_go_unless_held(state, base)
        if new.pending and self.on_pending is not None:
            self.on_pending(run, new.number)

    def _drop_staged(self, run: str, state: Run, staged: Staged) -> None:
        del state.staged[staged.token]
        self._ledger.let_go(staged.arrays())
        if not state.staged and not state.generations():
            self._runs.pop(run, None)

    def _unpin(self, state: Run, held: Generation) -> None:
        state.pins.remove(held)
        self._let_go_unless_held(state, held)

    def _let_go_unless_held(self, state: Run, held: Generation) -> None:
        if held not in state.generations():
            self._ledger.let_go(held.arrays())

    def _readable(self, run: str, name: Name) -> Generation:
        """Return a committed or pinned generation; commits a prepared one, since the caller says it is."""
        state = self._runs.get(run) or Run()
        held = state.find(name)
        staged = state.staged.get(name[1])
        if held is None and staged is not None and staged.name == name and staged.prepared:
            try:
                self._promote(run, state, staged)
            except StaleBaseError as error:
                raise self._unavailable(run, state, name) from error
            held = state.committed
        if held is None:
            raise self._unavailable(run, state, name)
        return held

    def _unavailable(self, run: str, state: Run, name: Name) -> ShardUnavailableError:
        return ShardUnavailableError(
            f"node {self.name} does not hold generation {name[0]} ({name[1]}) of {run}; "
            f"it holds {state.described()}"
        )

    def _log_loss(self, run: str, generation: int, key: str, why: str) -> None:
        logger.error(
            "node %s lost a chunk: run %s, generation %d, key %s: %s", self.name, run, generation, key, why
        )
