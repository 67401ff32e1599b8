"""The ring of a node: earlier generations that it keeps, as long as nobody needs the room."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.errors import NodeFullError, ShardUnavailableError
from fastcheck_dask.node.holdings import RING_SHARE
from fastcheck_dask.node.shard_store import ShardStore

#: Generations in the ring of `keeper`.
RING = 2


@pytest.mark.parametrize("drain", [False, True])
@pytest.mark.parametrize("residual", ["xor", "difference"])
def test_ring_gives_each_of_the_last_generations_and_no_more(
    keeper: ShardStore, make_author: Any, chunks: Any, drain: bool, residual: str
) -> None:
    author = make_author(keeper, residual=residual)
    saved = {}
    state = {"a": chunks.bits(1), "b": chunks.bits(2)}
    for number in range(5):
        state = {key: chunks.nudged(raw, number) for key, raw in state.items()}
        author.save(state)
        saved[author.name] = author.saved()
        if drain:
            keeper.drain("run", background=True)
    one = chunks.recounted(keeper._runs["run"].committed.arrays())
    assert keeper.used_bytes < 1.4 * one
    for name in list(saved)[-1 - RING :]:
        found = keeper.read(*name, keys=["a", "b"])
        assert chunks.decoded(found.entries) == saved[name]
        assert bytes(keeper.manifest(*name)) == b"{}"
    with pytest.raises(ShardUnavailableError, match="it holds generation 3"):
        keeper.read(*list(saved)[1], keys=["a"])


def test_ring_of_chunks_that_came_raw_keeps_deltas_once_drained(
    keeper: ShardStore, make_author: Any, chunks: Any
) -> None:
    author = make_author(keeper, raw=True)
    before = chunks.bits(1, 40_000)
    author.save({"a": before})
    old = author.name
    author.save({"a": chunks.nudged(before, 1)})
    whole = keeper.used_bytes
    keeper.drain("run", background=True)
    assert keeper.used_bytes < 0.8 * whole
    assert chunks.decoded(keeper.read(*old, keys=["a"]).entries) == {"a": before.tobytes()}
    assert author.loaded() == author.saved()


def test_ring_keeps_chunks_that_vanished_or_came_whole(
    keeper: ShardStore, make_author: Any, chunks: Any
) -> None:
    author = make_author(keeper)
    author.save({"gone": chunks.bits(1), "new": chunks.bits(2)})
    name, saved = author.name, author.saved()
    author.save({"new": chunks.bits(3)}, rebase=True)
    author.save({"new": chunks.bits(4), "other": chunks.bits(5)})
    assert chunks.decoded(keeper.read(*name, keys=["gone", "new"]).entries) == saved


def test_ring_never_takes_more_than_its_share(make_author: Any, chunks: Any) -> None:
    store = ShardStore("node-1", 40_000, ring=5)
    author = make_author(store)
    for seed in range(6):
        author.save({"a": chunks.bits(seed)}, rebase=True)
        assert store.report()["ring"]["used_bytes"] <= RING_SHARE * 40_000
    assert len(store.holds("run")["ring"]) == 2


def test_ring_is_given_up_before_a_save_is_refused(make_author: Any, chunks: Any) -> None:
    store = ShardStore("node-1", 20_000, ring=RING)
    author = make_author(store)
    for seed in range(3):
        author.save({"a": chunks.bits(seed, 2048)}, rebase=True)
    assert len(store.holds("run")["ring"]) == 2
    used = store.used_bytes
    with pytest.raises(NodeFullError):
        store.begin("other", 1, "t", shard=0, base=None, keys=["k"], reserve_bytes=20_001)
    assert len(store.holds("run")["ring"]) == 2
    store.begin("other", 1, "t", shard=0, base=None, keys=["k"], reserve_bytes=20_000 - used + 1)
    assert len(store.holds("run")["ring"]) == 1
    assert author.loaded() == author.saved()


def test_pinned_ring_generation_outlives_the_ring(keeper: ShardStore, make_author: Any, chunks: Any) -> None:
    author = make_author(keeper)
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    name = (author.run, 1, "token-1")
    keeper.pin(*name)
    for seed in range(4):
        author.save({"a": chunks.nudged(author.state["a"], seed)})
    assert chunks.decoded(keeper.read(*name, keys=["a"]).entries) == {"a": chunks.bits(1).tobytes()}
    keeper.unpin(*name)
    assert len(keeper.holds("run")["ring"]) == RING


@pytest.mark.parametrize("what", ["newest", "step", "kept"])
def test_damage_in_the_ring_is_told_and_never_served(
    keeper: ShardStore, make_author: Any, chunks: Any, what: str
) -> None:
    author = make_author(keeper)
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    name, saved = author.name, author.saved()
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    keeper.drain("run")
    run = keeper._runs["run"]
    key = "b" if what == "kept" else "a"
    damaged = {
        "newest": lambda: run.committed.chains["a"][0],
        "step": lambda: run.ring[0].steps["a"].delta,
        "kept": lambda: run.ring[0].chains["b"][0],
    }[what]()
    damaged.payload.flags.writeable = True
    damaged.payload[damaged.payload.size // 2] ^= 4
    found = keeper.read(*name, keys=["a", "b"])
    assert (found.missing, found.corrupt) == ([key], [key])
    assert chunks.decoded(found.entries) == {k: v for k, v in saved.items() if k != key}
    assert author.loaded() == author.saved() if what != "newest" else True
    (lost,) = keeper.report()["runs"]["run"]["damaged"]
    assert (lost["generation"], lost["keys"]) == (2 if what == "newest" else 1, [key])
    keeper.repair(*name, [chunks.whole(key, chunks.bits(2 if what == "kept" else 1))])
    assert chunks.decoded(keeper.read(*name, keys=["a", "b"]).entries) == saved
