"""The store: always what was committed, within its budget, and never a wrong byte."""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.errors import (
    CorruptDataError,
    FencedError,
    ShardCorruptError,
    ShardUnavailableError,
    StaleBaseError,
    TierError,
    TierFullError,
)
from fastcheck_dask.node.shard_store import PENDING_LIMIT, ShardStore


def flip(payload: Any, at: int = -1) -> None:
    """Damage a stored payload as failing memory does."""
    payload.flags.writeable = True
    payload[at] ^= 4
    payload.flags.writeable = False


def newest(store: ShardStore, author: Any) -> Any:
    return store._runs[author.run].committed


def held_bytes(store: ShardStore) -> int:
    """Count anew what the ledger should say."""
    arrays = {}
    for run in store._runs.values():
        arrays |= {id(array): array.nbytes for array in run.arrays()}
    return sum(arrays.values())


keys = st.sampled_from("abcd")
step = st.one_of(
    st.tuples(st.just("save"), st.dictionaries(keys, st.integers(0, 5), max_size=4), st.booleans()),
    st.tuples(st.just("drain"), st.lists(keys, max_size=2, unique=True), st.none()),
    st.tuples(st.just("pin"), st.none(), st.none()),
    st.tuples(st.just("unpin"), st.none(), st.none()),
    st.tuples(st.just("failed save"), st.dictionaries(keys, st.integers(0, 5), max_size=4), st.booleans()),
    st.tuples(st.just("read"), st.lists(keys, max_size=4, unique=True), st.none()),
)


@settings(max_examples=60, deadline=None)
@given(steps=st.lists(step, max_size=12))
def test_store_after_any_sequence_gives_what_was_committed(
    make_author: Any, steps: list[tuple[str, Any, Any]]
) -> None:
    store = ShardStore("node-1", 2**30)
    author = make_author(store)
    pins: list[tuple[tuple[str, int, str], dict[str, bytes]]] = []
    for number, (what, argument, rebase) in enumerate(steps):
        if what in ("save", "failed save"):
            # Sizes change, too; an even seed changes nothing, an odd one a little.
            state = {}
            for key, seed in argument.items():
                old = author.state.get(key)
                if old is None or seed > 3:
                    state[key] = np.random.default_rng(number).integers(0, 256, 50 + seed, dtype=np.uint8)
                else:
                    state[key] = old ^ np.uint8(seed % 2)
            if what == "save":
                author.save(state, rebase=rebase)
            else:
                author.stage(state, rebase=rebase, token=f"failed-{number}")
        elif what == "drain":
            store.drain(author.run, argument)
        elif author.generation and what == "pin":
            store.pin(*author.name)
            pins = [p for p in pins if p[0] != author.name] + [(author.name, author.saved())]
            pins = pins[-2:]
        elif author.generation and what == "unpin" and pins:
            store.unpin(*pins.pop(0)[0])
        elif author.generation and what == "read":
            wanted = [key for key in argument if key in author.state]
            assert set(store.read(*author.name, keys=wanted).missing) == set()
        assert store.used_bytes == held_bytes(store)
    if author.generation:
        assert author.loaded() == author.saved()
    for name, saved in pins:
        found = store.read(*name, keys=list(saved))
        assert author.decoded(found.entries) == saved
    store.drop(author.run)
    assert store.used_bytes == 0


def test_hundred_deltas_leave_one_checkpoint(store: ShardStore, author: Any, chunks: Any) -> None:
    state = {"a": chunks.bits(1), "b": chunks.bits(2, 999)}
    author.save(state)
    one = store.used_bytes
    for number in range(100):
        state = {key: chunks.nudged(raw, number) for key, raw in state.items()}
        author.save(state)
        assert store._runs["run"].depth() <= PENDING_LIMIT
    assert author.loaded() == author.saved()
    assert store.status()["pending"] == 0
    assert abs(store.used_bytes - one) < one // 10


def test_used_bytes_after_merge_is_the_whole_payloads_and_the_manifest(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    base = chunks.bits(1)
    author.save({"a": base})
    author.save({"a": chunks.nudged(base, 1)})
    assert store.status()["pending"] == 1
    store.drain("run")
    payload = store.read(*author.name, keys=["a"]).entries[0].payload
    assert store.used_bytes == payload.nbytes + len(b"{}")
    assert store.status()["pending"] == 0


def test_identity_delta_keeps_the_payload(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    before = store.read(*author.name, keys=["a"]).entries[0].payload
    author.save({"a": chunks.bits(1)})
    assert store.status()["pending"] == 0
    assert store.read(*author.name, keys=["a"]).entries[0].payload is before


# ---- two phases


def test_staged_save_is_invisible_until_committed(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.bits(2)})
    with pytest.raises(ShardUnavailableError, match="token-1"):
        store.read("run", generation, token, keys=["a"])
    with pytest.raises(StaleBaseError):
        store.commit("run", generation, token)
    assert author.loaded() == author.saved()


def test_abort_leaves_what_was_committed_and_its_bytes(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    used = store.used_bytes
    _, token = author.stage({"a": chunks.bits(2), "b": chunks.bits(3)})
    assert store.used_bytes > used
    store.abort("run", token)
    store.abort("run", token)
    assert store.used_bytes == used
    assert author.loaded() == author.saved()


@pytest.mark.parametrize("by", ["read", "pin", "begin"])
def test_prepared_save_is_promoted_by_who_names_it(
    store: ShardStore, author: Any, chunks: Any, by: str
) -> None:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.bits(2)})
    author.prepare(token)
    if by == "read":
        store.read("run", generation, token, keys=[])
    elif by == "pin":
        store.pin("run", generation, token)
    else:
        absent = store.begin(
            "run", 3, "t3", shard=0, base=(generation, token), keys=["a", "b"], reserve_bytes=0
        )
        assert absent == ["b"]
    assert store.holds("run")["committed"] == [generation, token]
    found = store.read("run", generation, token, keys=["a"])
    assert chunks.decoded(found.entries) == {"a": chunks.bits(2).tobytes()}


def test_prepared_save_with_another_token_is_not_promoted(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.bits(2)})
    author.prepare(token)
    with pytest.raises(ShardUnavailableError):
        store.read("run", generation, "other", keys=["a"])
    with pytest.raises(StaleBaseError):
        store.begin("run", 3, "t3", shard=0, base=(generation, "other"), keys=[], reserve_bytes=0)
    assert store.holds("run")["staged"] == [[generation, token, True]]


def test_begin_drops_staged_saves_of_the_run_only(
    store: ShardStore, author: Any, make_author: Any, chunks: Any
) -> None:
    other = make_author(store, run="other")
    other.stage({"z": chunks.bits(9)}, token="other-1")
    author.stage({"a": chunks.bits(1)}, token="dead")
    author.save({"a": chunks.bits(2)})
    with pytest.raises(StaleBaseError, match="dead"):
        store.put("run", "dead", [chunks.whole("a", chunks.bits(1))])
    assert store.holds("other")["staged"] == [[1, "other-1", False]]


def test_commit_again_with_the_same_token_does_nothing(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    store.commit(*author.name)
    store.put("run", author.token, [chunks.whole("a", chunks.bits(5))])
    assert author.loaded() == author.saved()


def test_prepare_without_every_chunk_names_the_missing(store: ShardStore, author: Any, chunks: Any) -> None:
    store.begin("run", 1, "t", shard=0, base=None, keys=["a", "b", "c"], reserve_bytes=0)
    store.put("run", "t", [chunks.whole("b", chunks.bits(1))])
    with pytest.raises(TierError, match="2 of 3 chunks never came, among them a, c"):
        author.prepare("t")


def test_prepare_with_another_digest_raises(store: ShardStore, author: Any, chunks: Any) -> None:
    author.stage({"a": chunks.bits(1)})
    with pytest.raises(ShardCorruptError, match="manifest"):
        store.prepare("run", "token-1", digest="0" * 64, manifest=np.zeros(3, np.uint8))


def test_manifest_of_prepared_save_can_be_read_without_promoting_it(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    generation, token = author.stage({"a": chunks.bits(1)})
    with pytest.raises(ShardUnavailableError):
        store.manifest("run", generation, token)
    author.prepare(token, b"manifest")
    assert store.manifest("run", generation, token).tobytes() == b"manifest"
    assert store.holds("run")["committed"] is None


def test_prepare_again_with_another_manifest_replaces_it(store: ShardStore, author: Any, chunks: Any) -> None:
    generation, token = author.stage({"a": chunks.bits(1)})
    author.prepare(token, b"names a node that has died since")
    used = store.used_bytes
    author.prepare(token, b"names another")
    assert store.used_bytes == used - 32 + 13
    store.commit("run", generation, token)
    assert store.manifest("run", generation, token).tobytes() == b"names another"
    store.drop("run")
    assert store.used_bytes == 0


def test_begin_on_base_that_is_not_held_is_stale(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    for base in [(1, "x"), (2, author.token), (7, "x")]:
        with pytest.raises(StaleBaseError, match="it holds generation 1"):
            store.begin("run", 9, "t", shard=0, base=base, keys=["a"], reserve_bytes=0)


def test_delta_without_base_is_refused_when_put(store: ShardStore, chunks: Any) -> None:
    store.begin("run", 1, "t", shard=0, base=None, keys=["a"], reserve_bytes=0)
    base = chunks.bits(1)
    with pytest.raises(StaleBaseError, match="send it whole"):
        store.put("run", "t", [chunks.delta("a", chunks.nudged(base, 1), base)])


def test_put_of_damaged_or_unknown_chunk_stages_nothing(store: ShardStore, author: Any, chunks: Any) -> None:
    store.begin("run", 1, "t", shard=0, base=None, keys=["a", "b"], reserve_bytes=0)
    good = chunks.whole("a", chunks.bits(1))
    descriptor, payload = chunks.whole("b", chunks.bits(2))
    payload[-1] ^= 1
    with pytest.raises(ShardCorruptError, match="chunk b"):
        store.put("run", "t", [good, (descriptor, payload)])
    with pytest.raises(TierError, match="not among the keys"):
        store.put("run", "t", [good, chunks.whole("c", chunks.bits(2))])
    assert store.used_bytes == 0


# ---- room


def test_begin_that_does_not_fit_says_how_much_is_free(store: ShardStore) -> None:
    with pytest.raises(TierFullError, match="node-1") as caught:
        store.begin("run", 1, "t", shard=0, base=None, keys=[], reserve_bytes=11 * 2**20)
    assert (caught.value.wanted_bytes, caught.value.free_bytes) == (11 * 2**20, 10 * 2**20)


def test_reservations_of_two_runs_are_added_up_and_given_back(store: ShardStore) -> None:
    def begin(run: str) -> None:
        store.begin(run, 1, f"t-{run}", shard=0, base=None, keys=["k"], reserve_bytes=6 * 2**20)

    begin("one")
    begin("one")
    with pytest.raises(TierFullError):
        begin("two")
    store.abort("one", "t-one")
    begin("two")


def test_put_beyond_the_limit_is_refused(author: Any, chunks: Any) -> None:
    author.store = ShardStore("small", 5000)
    author.store.begin("run", 1, "t", shard=0, base=None, keys=["a", "b"], reserve_bytes=0)
    author.store.put("run", "t", [chunks.whole("a", chunks.bits(1))])
    author.store.put("run", "t", [chunks.whole("a", chunks.bits(1))])
    with pytest.raises(TierFullError):
        author.store.put("run", "t", [chunks.whole("b", chunks.bits(2))])
    author.store.drop("run")
    assert author.store.used_bytes == 0


# ---- damage


def test_flipped_bit_is_reported_and_never_served(
    store: ShardStore, author: Any, chunks: Any, caplog: pytest.LogCaptureFixture
) -> None:
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    flip(newest(store, author).chains["a"][0].payload)
    found = store.read(*author.name, keys=["a", "b"])
    assert (found.missing, found.corrupt) == (["a"], ["a"])
    assert chunks.decoded(found.entries) == {"b": chunks.bits(2).tobytes()}
    assert store.read(*author.name, keys=["a"]) == ([], ["a"], [])
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert "key a" in caplog.text
    assert store.used_bytes == held_bytes(store)


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("at", [4, 20, 60])
def test_flipped_bit_in_base_or_delta_loses_the_chunk_in_the_merge(
    store: ShardStore, author: Any, chunks: Any, caplog: pytest.LogCaptureFixture, which: int, at: int
) -> None:
    base = chunks.bits(1)
    author.save({"a": base})
    author.save({"a": chunks.nudged(base, 1)})
    flip(newest(store, author).chains["a"][which].payload, at)
    store.drain("run")
    assert store.read(*author.name, keys=["a"]).missing == ["a"]
    assert "run run, generation 2, key a" in caplog.text
    assert store.used_bytes == held_bytes(store)


def test_lost_base_makes_the_next_save_send_the_chunk_whole(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    store.quarantine(*author.name, ["a"])
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    assert author.loaded() == author.saved()


def test_base_lost_between_put_and_commit_makes_the_chunk_missing(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.nudged(chunks.bits(1), 1)})
    store.quarantine(*author.name, ["a"])
    author.prepare(token)
    store.commit("run", generation, token)
    assert store.read("run", generation, token, keys=["a"]).missing == ["a"]


def test_repair_brings_a_lost_chunk_back(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    store.quarantine(*author.name, ["a"])
    store.repair(*author.name, [chunks.whole("a", chunks.bits(1))])
    assert author.loaded() == author.saved()


def test_repair_with_other_bits_or_keys_is_refused(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    for chunk in [chunks.whole("a", chunks.bits(2)), chunks.whole("b", chunks.bits(1))]:
        with pytest.raises(CorruptDataError, match="does not belong"):
            store.repair(*author.name, [chunk])
    assert author.loaded() == author.saved()


# ---- shards that come from others


def adopt(
    store: ShardStore, state: dict[str, Any], generation: int, chunks: Any, **options: Any
) -> list[str]:
    wanted = {key: (chunks.whole(key, raw)[0].digest, raw.size) for key, raw in state.items()}
    return store.adopt(
        "run",
        generation,
        f"token-{generation}",
        manifest=np.frombuffer(b"{}", np.uint8).copy(),
        wanted=wanted,
        **{"reserve_bytes": 0, **options},
    )


def test_adopted_shard_is_filled_read_and_takes_deltas(author: Any, chunks: Any) -> None:
    other = ShardStore("node-2", 10 * 2**20)
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    assert adopt(other, author.state, 1, chunks) == ["a", "b"]
    assert other.report()["runs"]["run"]["damaged"][0]["keys"] == ["a", "b"]
    other.repair(*author.name, [chunks.whole("a", chunks.bits(1))])
    assert adopt(other, author.state, 1, chunks) == ["b"]
    other.repair(*author.name, [chunks.whole("b", chunks.bits(2))])
    assert adopt(other, author.state, 1, chunks) == []
    author.store = other
    assert author.loaded() == author.saved()
    assert other.begin("run", 2, "t", shard=0, base=author.name[1:], keys=["a", "b"], reserve_bytes=0) == []
    author.save({key: chunks.nudged(raw, 1) for key, raw in author.state.items()})
    assert author.loaded() == author.saved()
    assert other.used_bytes == held_bytes(other)


def test_adopted_half_then_saved_what_never_came_goes_whole(author: Any, chunks: Any) -> None:
    other = ShardStore("node-2", 10 * 2**20)
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    adopt(other, author.state, 1, chunks)
    other.repair(*author.name, [chunks.whole("a", chunks.bits(1))])
    author.store = other
    author.save({key: chunks.nudged(raw, 1) for key, raw in author.state.items()})
    assert author.loaded() == author.saved()


@pytest.mark.parametrize("ring", [0, 2])
def test_adopted_over_an_older_generation_which_the_ring_keeps(
    make_author: Any, chunks: Any, ring: int
) -> None:
    store = ShardStore("node-1", 10 * 2**20, ring=ring)
    author = make_author(store)
    for seed in (1, 2):
        author.save({"a": chunks.bits(seed)})
    old, saved = author.name, author.saved()
    adopt(store, {"b": chunks.bits(5)}, 7, chunks)
    assert store.holds("run")["committed"] == [7, "token-7"]
    if ring:
        assert chunks.decoded(store.read(*old, keys=["a"]).entries) == saved
    else:
        with pytest.raises(ShardUnavailableError):
            store.read(*old, keys=["a"])
    assert store.used_bytes == held_bytes(store)


def test_adopted_older_than_what_is_committed_is_refused(store: ShardStore, author: Any, chunks: Any) -> None:
    for seed in (1, 2):
        author.save({"a": chunks.bits(seed)})
    store.pin(*author.name)
    author.save({"a": chunks.bits(3)})
    for generation in (1, 2):
        with pytest.raises(StaleBaseError, match="it holds generation"):
            adopt(store, author.state, generation, chunks)
    assert author.loaded() == author.saved()


def test_adopting_needs_room_and_changes_no_save_in_flight(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    with pytest.raises(TierFullError):
        adopt(store, {"a": chunks.bits(1)}, 1, chunks, reserve_bytes=2**30)
    assert store.holds("run")["committed"] is None
    _, token = author.stage({"a": chunks.bits(9)}, token="token-2")
    author.generation = 1
    adopt(store, {"a": chunks.bits(1)}, 1, chunks)
    author.prepare(token)
    store.commit("run", 1, token)
    assert store.used_bytes == held_bytes(store)


def test_adopting_what_was_prepared_here_commits_it(store: ShardStore, author: Any, chunks: Any) -> None:
    state = {"a": chunks.bits(1)}
    generation, token = author.stage(state)
    author.prepare(token)
    assert adopt(store, state, generation, chunks) == []
    assert store.holds("run")["committed"] == [generation, token]


# ---- pins, reads, drains


def test_pinned_generation_stays_readable_until_unpinned(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    pinned, saved = author.name, author.saved()
    store.pin(*pinned)
    used = store.used_bytes
    author.save({"b": chunks.bits(7)})
    author.save({"b": chunks.bits(8)})
    assert chunks.decoded(store.read(*pinned, keys=["a"]).entries) == saved
    assert store.used_bytes > used
    store.unpin(*pinned)
    with pytest.raises(ShardUnavailableError, match="it holds generation 4"):
        store.read(*pinned, keys=["a"])
    assert store.used_bytes == held_bytes(store)


def test_third_pin_drops_the_oldest(store: ShardStore, author: Any, chunks: Any) -> None:
    for seed in range(4):
        author.save({"a": chunks.bits(seed)})
        store.pin(*author.name)
    assert store.holds("run")["pins"] == [[3, "token-3"], [4, "token-4"]]


def test_read_of_more_than_the_limit_is_refused(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    with pytest.raises(TierError, match="at once"):
        store.read(*author.name, keys=["a"], limit_bytes=100)


def test_read_drains_only_the_keys_it_needs(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    author.save({k: chunks.nudged(raw, 1) for k, raw in author.state.items()})
    store.read(*author.name, keys=["a"])
    assert newest(store, author).pending == {"b"}


def test_background_drain_waits_for_readers(store: ShardStore, author: Any, chunks: Any) -> None:
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    began = threading.Event()

    def drain() -> None:
        began.set()
        store.drain("run", background=True)

    with store.reading():
        thread = threading.Thread(target=drain)
        thread.start()
        assert began.wait(10)
        thread.join(0.1)
        assert thread.is_alive()
        assert store.status()["pending"] == 1
    thread.join(10)
    assert not thread.is_alive()
    assert store.status()["pending"] == 0


def test_drains_and_reads_of_many_threads_agree(store: ShardStore, author: Any, chunks: Any) -> None:
    state = {key: chunks.bits(i, 20_000) for i, key in enumerate("abcdef")}
    author.save(state)
    for number in range(2):
        state = {key: chunks.nudged(raw, number) for key, raw in state.items()}
        author.save(state)
    results: list[dict[str, bytes]] = []
    threads = [threading.Thread(target=lambda: results.append(author.loaded())) for _ in range(4)]
    threads += [threading.Thread(target=store.drain, args=("run",)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert results == [author.saved()] * 4
    assert store.used_bytes == held_bytes(store)


def test_begin_by_deposed_owner_is_refused_and_drops_nothing(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})

    def begin(token: str, order: int) -> None:
        base = (1, author.token)
        store.begin("run", 2, token, shard=0, base=base, keys=["a"], reserve_bytes=0, order=order)

    begin("new", 7)
    with pytest.raises(FencedError, match="newer owner"):
        begin("old", 6)
    assert store.holds("run")["staged"] == [[2, "new", False]]
    begin("newer", 8)
    assert store.holds("run")["staged"] == [[2, "newer", False]]


@pytest.mark.parametrize("again", ["same snapshot", "next save"])
def test_late_message_of_an_earlier_attempt_takes_no_promise_back(
    store: ShardStore, author: Any, chunks: Any, again: str
) -> None:
    author.save({"a": chunks.bits(1)})
    state = {"a": chunks.bits(2)}
    old = "first" if again == "next save" else "second"
    author.attempt = 4
    author.stage(state, token=old)
    author.attempt = 5
    author.stage(state, token="second")
    author.prepare("second", b'{"nodes": 2}')
    promised = store.holds("run")["staged"]
    assert promised == [[2, "second", True]]
    author.attempt = 4
    store.abort("run", old, attempt=4)
    with pytest.raises(StaleBaseError, match="came late"):
        author.stage(state, token=old)
    with pytest.raises(StaleBaseError):
        author.prepare(old, b'{"nodes": 1}')
    assert store.holds("run")["staged"] == promised
    store.commit("run", 2, "second")
    assert store.manifest("run", 2, "second").tobytes() == b'{"nodes": 2}'


def test_abort_of_the_present_attempt_and_of_a_decided_save_drop_it(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    for attempt, known in ((1, 1), (2, None)):
        author.attempt = attempt
        author.stage({"a": chunks.bits(1)}, token="t")
        author.prepare("t")
        store.abort("run", "t", attempt=known)
        assert store.holds("run")["staged"] == []


def test_commit_whose_base_is_not_held_any_more_is_refused(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    generation, token = author.stage({"a": chunks.bits(2)})
    author.prepare(token)
    store._holdings.runs["run"].committed = None
    with pytest.raises(StaleBaseError, match="its base is generation 1"):
        store.commit("run", generation, token)


def test_next_owner_counts_its_attempts_anew(store: ShardStore, author: Any, chunks: Any) -> None:
    author.order, author.attempt = 7, 12
    author.stage({"a": chunks.bits(1)}, token="old")
    author.order, author.attempt = 8, 1
    author.save({"a": chunks.bits(2)})
    assert author.loaded() == author.saved()


def test_put_delta_of_other_bits_than_the_base_is_refused_before_the_commit(
    store: ShardStore, author: Any, chunks: Any
) -> None:
    before, after = chunks.bits(1), chunks.bits(2)
    author.save({"a": before})
    damaged = before.copy()
    damaged[17] ^= 4
    store.begin("run", 2, "t", shard=0, base=(1, author.token), keys=["a"], reserve_bytes=0)
    with pytest.raises(StaleBaseError, match="no such base for chunk a"):
        store.put("run", "t", [chunks.delta("a", after, damaged)])
    store.put("run", "t", [chunks.whole("a", after)])
