"""What a storage node stages, prepares and commits of a save, and whom it refuses."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fastcheck_dask.errors import (
    FencedError,
    ShardCorruptError,
    ShardUnavailableError,
    StaleBaseError,
    TierError,
    TierFullError,
)
from fastcheck_dask.node.shard_store import ShardStore


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
