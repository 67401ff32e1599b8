"""What a node keeps and what it gives up: a model of both, and each rule of room apart."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from fastcheck_dask.errors import FencedError, NodeFullError, ShardUnavailableError, StaleBaseError
from fastcheck_dask.node.holdings import LEASE_SECONDS, ORPHAN_SECONDS, STAGED_SECONDS
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.clock import FakeClock

RING = 2


@dataclass
class History:
    """What one author has committed."""

    author: Any
    states: dict[tuple[str, int, str], dict[str, bytes]] = field(default_factory=dict)
    #: Names, oldest first.
    line: list[tuple[str, int, str]] = field(default_factory=list)
    persisted: int = -1
    lease_ends: float = 0.0
    pins: list[tuple[str, int, str]] = field(default_factory=list)


runs = st.sampled_from(["r1", "r2"])
changes = st.dictionaries(st.sampled_from("abc"), st.integers(0, 5), min_size=1)
seconds = st.sampled_from([0, 60, 4000])
how = st.sampled_from(["delta", "delta", "rebase", "raw"])


class StoreMachine(RuleBasedStateMachine):
    """Two runs on one node that is sometimes too small; what may be read is known at any moment."""

    make_author: Any = None
    chunks: Any = None

    @initialize(limit=st.sampled_from([6_000, 12_000, 2**20]))
    def start(self, limit: int) -> None:
        self.clock = FakeClock()
        self.limit = limit
        self.store = ShardStore("node-1", limit, ring=RING, clock=self.clock)
        self.runs = {name: History(self.make_author(self.store, run=name)) for name in ("r1", "r2")}
        self.seed = 0

    @rule(run=runs, saves=st.lists(st.tuples(changes, how), min_size=1, max_size=4), read=st.booleans())
    def save(self, run: str, saves: list[tuple[dict[str, int], str]], read: bool) -> None:
        for changes, how in saves:
            self.save_one(run, changes, how)
        if read:
            for back in range(RING + 2):
                self.read(run, back)

    def save_one(self, run: str, changes: dict[str, int], how: str) -> None:
        history = self.runs[run]
        author, state = history.author, {}
        for key, change in changes.items():
            self.seed += 1
            old = author.state.get(key)
            if old is None or change == 0:
                state[key] = self.chunks.bits(self.seed, 400 + 100 * change + self.seed % 7)
            elif change == 1:
                state[key] = old
            elif change in (2, 3):
                # Longer or shorter, as parity chunks may become.
                state[key] = np.resize(old, max(1, old.size + self.seed % 41 - 20))
            else:
                state[key] = self.chunks.nudged(old, self.seed)
        author.raw = how == "raw"
        try:
            author.save(state, rebase=how == "rebase" or author.generation not in self.held_numbers(run))
        except NodeFullError:
            self.store.abort(run, f"token-{author.generation + 1}")
            return
        history.states[author.name] = author.saved()
        history.line.append(author.name)
        history.lease_ends = self.clock.now() + LEASE_SECONDS

    def held_numbers(self, run: str) -> set[int]:
        committed = self.store.holds(run)["committed"]
        return {committed[0]} if committed else set()

    @rule(run=runs, background=st.booleans())
    def drain(self, run: str, background: bool) -> None:
        self.store.drain(run, background=background)

    def read(self, run: str, back: int) -> None:
        history = self.runs[run]
        if back >= len(history.line):
            return
        name = history.line[-1 - back]
        wanted = history.states[name]
        try:
            found = self.store.read(*name, keys=list(wanted))
        except ShardUnavailableError:
            # Room may have run out: then only the newest has to be there.
            assert back > 0
            assert back > RING or self.limit < 2**20
            assert name not in history.pins
            return
        assert found.missing == []
        assert self.chunks.decoded(found.entries) == wanted

    @rule(run=runs, back=st.integers(0, 2))
    def pin(self, run: str, back: int) -> None:
        history = self.runs[run]
        if back >= len(history.line):
            return
        name = history.line[-1 - back]
        try:
            self.store.pin(*name)
        except ShardUnavailableError:
            assert back > 0
            return
        history.pins = [pin for pin in history.pins if pin != name] + [name]
        history.pins = history.pins[-2:] if name not in history.pins[:-1] else history.pins

    @rule(run=runs, keys=st.sets(st.sampled_from("abc"), min_size=1))
    def lose_and_repair(self, run: str, keys: set[str]) -> None:
        """A reader finds chunks of the newest to be wrong, and brings them back."""
        history = self.runs[run]
        lost = sorted(keys & history.author.state.keys())
        if not history.line or not self.held_numbers(run):
            return
        name = history.line[-1]
        self.store.quarantine(*name, lost)
        assert self.store.read(*name, keys=lost).missing == lost
        self.what_is_counted_is_what_counting_gives()
        whole = [self.chunks.whole(key, history.author.state[key]) for key in lost]
        for chunk in whole:
            try:
                self.store.repair(*name, [chunk])
            except NodeFullError:
                # No more than was there fits unless others go: the run is begun anew.
                self.store.drop(run)
                history.line.clear()
                history.pins.clear()
                history.persisted = -1
                return
        # What was taken back over them is lost, too: older ones cannot be vouched for.
        history.line = history.line[-1:]
        history.pins = [pin for pin in history.pins if pin == name]
        for older in [held.name for held in self.store._runs[run].pins if held.name != name[1:]]:
            self.store.unpin(run, *older)

    @rule(run=runs)
    def unpin(self, run: str) -> None:
        history = self.runs[run]
        if history.pins:
            self.store.unpin(*history.pins.pop(0))

    @rule(run=runs, persist=st.booleans(), lease=st.sampled_from([None, 0, 10, 10_000]), then=seconds)
    def leave(self, run: str, persist: bool, lease: int | None, then: int) -> None:
        history = self.runs[run]
        if history.line and persist:
            name = history.line[-1]
            self.store.persisted(*name)
            history.persisted = name[1]
        if lease is not None and self.store.lease(run, lease):
            history.lease_ends = self.clock.now() + lease
        self.clock.advance(then)
        if any(history.lease_ends <= self.clock.now() for history in self.runs.values()):
            for history in self.runs.values():
                if history.lease_ends <= self.clock.now():
                    history.pins.clear()

    @invariant()
    def bytes_are_counted_and_within_the_limit(self) -> None:
        if not hasattr(self, "store"):
            return
        runs = self.store._runs.values()
        assert self.store.used_bytes == self.chunks.recounted(array for run in runs for array in run.arrays())
        report = self.store.report()
        assert report["used_bytes"] + report["reserved_bytes"] <= self.limit
        rings = [held for run in runs for held in run.ring]
        assert report["ring"]["used_bytes"] == self.chunks.recounted(
            a for held in rings for a in held.arrays()
        )

    @invariant()
    def what_is_counted_is_what_counting_gives(self) -> None:
        if not hasattr(self, "store"):
            return
        for name, run in self.store._runs.items():
            for held in run.generations():
                assert held.nbytes == sum(array.nbytes for array in held.arrays())
                assert held.lost == held.wanted.keys() - held.chains.keys() - held.steps.keys()
                assert held.pending == {key for key, chain in held.chains.items() if len(chain) > 1}
            said = self.store.report()["runs"][name]
            assert {(d["generation"], d["token"]): d["keys"] for d in said["damaged"]} == {
                held.name: sorted(held.lost) for held in run.generations() if held.lost
            }

    @invariant()
    def newest_is_held_unless_it_could_be_evicted(self) -> None:
        for run, history in getattr(self, "runs", {}).items():
            if not history.line or self.store.holds(run)["committed"] is not None:
                continue
            assert history.persisted >= history.line[-1][1]
            assert history.lease_ends <= self.clock.now()
            history.line.clear()
            history.pins.clear()
            history.persisted = -1

    def teardown(self) -> None:
        for run in list(getattr(self, "runs", {})):
            self.store.drop(run)
            assert self.store.holds(run)["committed"] is None
        if hasattr(self, "store"):
            assert (self.store.used_bytes, self.store.report()["ring"]["used_bytes"]) == (0, 0)


def test_any_sequence_keeps_what_it_must_within_the_limit(make_author: Any, chunks: Any) -> None:
    class Machine(StoreMachine):
        pass

    Machine.make_author, Machine.chunks = make_author, chunks
    Machine.TestCase.settings = settings(max_examples=100, stateful_step_count=20, deadline=None)
    Machine.TestCase().runTest()


# ---- pins


def test_merge_that_has_no_room_beside_a_pin_waits_and_is_read_all_the_same(
    make_author: Any, chunks: Any
) -> None:
    base = chunks.bits(1, 8192)
    one = chunks.whole("a", base)[0].nbytes
    store = ShardStore("node-1", one + 3000)
    author = make_author(store)
    author.save({"a": base})
    store.pin(*author.name)
    author.save({"a": chunks.nudged(base, 1)})
    store.drain("run")
    assert store.status()["pending"] == 1
    assert store.used_bytes <= one + 3000
    assert author.loaded() == author.saved()
    store.unpin("run", 1, "token-1")
    store.drain("run")
    assert store.status()["pending"] == 0


# ---- leases and eviction


@pytest.fixture
def full(clock: FakeClock, make_author: Any, chunks: Any) -> tuple[ShardStore, Any, Any]:
    """Return a store that is full of two runs, of which the first was used less recently."""
    store = ShardStore("node-1", 16_000, clock=clock)
    authors = [make_author(store, run=name) for name in ("old", "young")]
    for author in authors:
        author.save({"a": chunks.bits(1, 7000)})
        clock.advance(1)
    return store, authors[0], authors[1]


def wants_room(store: ShardStore, nbytes: int = 5000) -> None:
    store.begin("new", 1, "t", shard=0, base=None, keys=["k"], reserve_bytes=nbytes)


def test_evicted_is_the_run_used_least_recently(full: Any, clock: FakeClock) -> None:
    store, old, young = full
    for author in (old, young):
        store.persisted(*author.name)
    clock.advance(LEASE_SECONDS)
    # Reading is using.
    assert old.loaded() == old.saved()
    clock.advance(1)
    wants_room(store)
    assert store.holds("young")["committed"] is None
    assert old.loaded() == old.saved()


@pytest.mark.parametrize("lacking", ["lease", "persisted", "renewed", "newer"])
def test_run_whose_lease_lasts_or_that_is_in_memory_alone_is_never_evicted(
    full: Any, clock: FakeClock, chunks: Any, lacking: str
) -> None:
    store, old, young = full
    if lacking != "persisted":
        store.persisted(*old.name)
        store.persisted(*young.name)
    if lacking == "newer":
        for author in (old, young):
            author.save({"a": author.state["a"]})
    if lacking == "renewed":
        assert store.lease("old", 2 * LEASE_SECONDS)
        assert store.lease("young", 2 * LEASE_SECONDS)
    clock.advance(LEASE_SECONDS - 10 if lacking == "lease" else LEASE_SECONDS)
    with pytest.raises(NodeFullError) as told:
        wants_room(store)
    assert (told.value.node, told.value.wanted_bytes) == ("node-1", 5000)
    assert told.value.free_bytes == 16_000 - store.used_bytes
    for author in (old, young):
        assert author.loaded() == author.saved()


def test_run_that_asks_for_room_does_not_lose_its_own_base(full: Any, clock: FakeClock) -> None:
    store, old, _young = full
    store.persisted(*old.name)
    clock.advance(LEASE_SECONDS)
    with pytest.raises(NodeFullError):
        store.begin("old", 2, "t", shard=0, base=old.name[1:], keys=["a"], reserve_bytes=5000)
    assert old.loaded() == old.saved()
    # It was about to be saved: its lease counts from now.
    with pytest.raises(NodeFullError):
        wants_room(store)


def test_run_with_a_prepared_save_is_not_evicted(full: Any, clock: FakeClock, chunks: Any) -> None:
    store, old, _ = full
    store.persisted(*old.name)
    generation, token = old.stage({"a": old.state["a"]})
    old.prepare(token)
    clock.advance(10 * LEASE_SECONDS)
    with pytest.raises(NodeFullError):
        wants_room(store)
    # The coordinator may have its commit.
    assert store.read("old", generation, token, keys=["a"]).missing == []


def test_repair_never_evicts_the_run_that_it_repairs(full: Any, clock: FakeClock, chunks: Any) -> None:
    store, old, _ = full
    store.persisted(*old.name)
    store.quarantine(*old.name, ["a"])
    wants_room(store, store.report()["limit_bytes"] - store.used_bytes)
    assert store.lease("old", 0)
    with pytest.raises(NodeFullError):
        store.repair(*old.name, [chunks.whole("a", old.state["a"])])
    assert store.holds("old")["committed"] is not None


def test_persisted_by_another_author_of_the_number_says_nothing(full: Any, clock: FakeClock) -> None:
    store, _old, _ = full
    store.persisted("old", 1, "another")
    clock.advance(LEASE_SECONDS)
    with pytest.raises(NodeFullError):
        wants_room(store)
    # What is newer than all that is here is known only where it lies; older ones are not needed any more.
    store.persisted("old", 2, "elsewhere")
    wants_room(store)
    assert store.holds("old")["committed"] is None


def test_lease_that_ended_counts_anew_from_the_next_save(full: Any, clock: FakeClock, chunks: Any) -> None:
    store, old, _ = full
    assert store.lease("old", 0)
    clock.advance(1)
    old.save({"a": old.state["a"]})
    store.persisted(*old.name)
    with pytest.raises(NodeFullError):
        wants_room(store)
    clock.advance(LEASE_SECONDS)
    wants_room(store)


def test_evicted_run_is_saved_whole_again(full: Any, clock: FakeClock, chunks: Any) -> None:
    store, old, _ = full
    store.persisted(*old.name)
    assert store.lease("old", 0)
    wants_room(store)
    assert not store.lease("old", 10)
    store.abort("new", "t")
    with pytest.raises(StaleBaseError):
        store.begin("old", 2, "t2", shard=0, base=old.name[1:], keys=["a"], reserve_bytes=0)
    old.save({"a": chunks.bits(3, 5000)}, rebase=True)
    assert old.loaded() == old.saved()


# ---- reservations


def test_reservation_of_a_silent_author_expires_and_a_prepared_save_does_not(
    keeper: ShardStore, clock: FakeClock, make_author: Any, chunks: Any
) -> None:
    half = 2**19
    keeper.begin("silent", 1, "t", shard=0, base=None, keys=["a"], reserve_bytes=half)
    author = make_author(keeper, run="prepared")
    author.stage({"a": chunks.bits(1)}, token="p")
    author.prepare("p")
    with pytest.raises(NodeFullError):
        wants_room(keeper, half)
    clock.advance(STAGED_SECONDS - 1)
    keeper.put("silent", "t", [chunks.whole("a", chunks.bits(1))])
    clock.advance(2)
    with pytest.raises(NodeFullError):
        wants_room(keeper, half)
    clock.advance(STAGED_SECONDS)
    wants_room(keeper, half)
    assert keeper.holds("silent")["staged"] == []
    assert keeper.holds("prepared")["staged"] == [[1, "p", True]]


def test_orphaned_save_expires_soon_unless_its_author_comes_back(
    keeper: ShardStore, clock: FakeClock, chunks: Any
) -> None:
    for token, run in (("gone", "r1"), ("back", "r2")):
        keeper.begin(run, 1, token, shard=0, base=None, keys=["a", "b"], reserve_bytes=1000)
        keeper.orphan(run, token)
    clock.advance(ORPHAN_SECONDS - 1)
    keeper.put("r2", "back", [chunks.whole("a", chunks.bits(1))])
    clock.advance(2)
    keeper.expire()
    assert keeper.holds("r1")["staged"] == []
    assert keeper.holds("r2")["staged"] == [[1, "back", False]]


def test_reservation_shrinks_to_what_came_once_prepared(
    keeper: ShardStore, make_author: Any, chunks: Any
) -> None:
    author = make_author(keeper)
    keeper.begin("run", 1, "t", shard=0, base=None, keys=["a"], reserve_bytes=500_000)
    keeper.put("run", "t", [chunks.whole("a", chunks.bits(1))])
    assert keeper.report()["reserved_bytes"] == 500_000 - keeper.used_bytes
    author.prepare("t")
    assert keeper.report()["reserved_bytes"] == 0


def test_two_owners_of_one_run_never_mix(keeper: ShardStore, make_author: Any, chunks: Any) -> None:
    first, second = make_author(keeper, order=1), make_author(keeper, order=2)
    first.save({"a": chunks.bits(1)})
    second.generation, second.token, second.state = first.generation, first.token, dict(first.state)
    first.stage({"a": chunks.bits(2)}, token="first")
    second.stage({"a": chunks.bits(3)}, token="second")
    with pytest.raises(StaleBaseError, match="no save first"):
        keeper.put("run", "first", [chunks.whole("a", chunks.bits(2))])
    with pytest.raises(StaleBaseError, match="no save first"):
        first.prepare("first")
    with pytest.raises(FencedError):
        first.stage({"a": chunks.bits(2)}, token="again")
    second.prepare("second")
    keeper.commit("run", 2, "second")
    found = keeper.read("run", 2, "second", keys=["a"])
    assert chunks.decoded(found.entries) == {"a": chunks.bits(3).tobytes()}
