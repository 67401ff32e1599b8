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
