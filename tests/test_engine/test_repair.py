"""A shard comes back: on another node or in place, each chunk read once, whatever else fails meanwhile."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from typing import Any

import pytest

from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.engine import rebuild, repair
from fastcheck_dask.engine.repair import RepairOrder, repair_shard
from fastcheck_dask.errors import (
    NodeUnavailableError,
    ShardUnavailableError,
    StaleBaseError,
    UnrecoverableError,
)
from fastcheck_dask.tiers import pacing

SPARE = "n4"


@pytest.fixture
def run(rig: Any) -> Any:
    """Three data shards and parity on n0 to n3, and one node that is idle."""
    return rig(nodes=5)


def order_of(run: Any, saved: Any, shard: int, node: str = SPARE, **fields: Any) -> RepairOrder:
    return RepairOrder(saved.record, shard, node, run.nodes[node].address, **{"gone": (shard,), **fields})


def repaired(run: Any, order: RepairOrder) -> Any:
    """Repair, and say so as a master does."""
    found = asyncio.run(repair_shard(order, run.nodes.client))
    if run.coordinator.entries.get("epoch") is None:
        run.coordinator.entries.apply(Create("epoch", b""))
    run.coordinator.relocate(order.record, order.moved, fencing_token=0)
    return found


def keys_read(run: Any) -> Counter[tuple[str, str]]:
    """Count, from now on, what is read of the nodes."""
    counts: Counter[tuple[str, str]] = Counter()
    for node in run.nodes:
        name = node.name

        def note(request: dict[str, Any], name: str = name) -> None:
            counts.update((name, key) for key in request["keys"])

        node.before["read"] = note
    return counts


@pytest.mark.parametrize("lost", range(4))
@pytest.mark.parametrize("after_deltas", [False, True])
def test_shard_lost_is_rebuilt_and_any_other_may_be_lost_then(
    run: Any, states: Any, monkeypatch: pytest.MonkeyPatch, lost: int, after_deltas: bool
) -> None:
    monkeypatch.setattr(rebuild, "BATCH_BYTES", 40_000)
    monkeypatch.setattr(repair, "_MESSAGE_BYTES", 4096)
    saved = run.save(states.of(1))
    if after_deltas:
        saved = run.save(states.of(1, step=1))
    run.nodes[f"n{lost}"].down = True
    counts = keys_read(run)
    found = repaired(run, order_of(run, saved, lost))
    layout = saved.manifest.layout
    assert found.chunks == len(layout.keys_of(lost))
    assert set(counts.values()) == {1}
    assert f"n{lost}" not in {name for name, _ in counts}
    assert run.nodes[SPARE].calls.count("repair") > 1
    for second in {*range(4)} - {lost}:
        run.forget_local()
        run.nodes[f"n{second}"].down = True
        recovered = run.recover(folder=False)
        assert states.same(recovered.state, states.of(1, step=int(after_deltas)))
        run.nodes[f"n{second}"].down = False


@pytest.mark.parametrize("lost", [1, 3])
def test_save_after_repair_is_a_delta_also_on_the_new_node(run: Any, states: Any, lost: int) -> None:
    saved = run.save(states.of(1))
    run.nodes[f"n{lost}"].down = True
    repaired(run, order_of(run, saved, lost))
    following = run.save(states.of(1, step=1))
    assert following.record.nodes[lost] == SPARE
    assert following.stats.deltas >= following.stats.chunks - 2, "momenta do not resemble"
    puts = run.nodes[SPARE].store.report()["runs"]["run-1"]
    assert puts["damaged"] == []
    run.forget_local()
    run.nodes["n0"].down = True
    assert states.same(run.recover(folder=False).state, states.of(1, step=1))


@pytest.mark.parametrize("lost", [(0, 1), (2, 3), (1, 4), (3, 4)])
def test_two_shards_lost_come_back_one_after_the_other(rig: Any, states: Any, lost: tuple[int, int]) -> None:
    run = rig(nodes=7)
    run.save(states.of(1), choice=run.choice(3, parity=2))
    saved = run.save(states.of(1, step=1), choice=run.choice(3, parity=2))
    for shard in lost:
        run.nodes[f"n{shard}"].down = True
    first, second = lost
    order = order_of(run, saved, first, "n5", gone=lost)
    repaired(run, order)
    repaired(run, RepairOrder(order.moved, second, "n6", run.nodes["n6"].address, gone=(second,)))
    for others in itertools.combinations(run.coordinator.latest("run-1").nodes, 2):
        run.forget_local()
        for name in others:
            run.nodes[name].down = True
        assert states.same(run.recover(folder=False).state, states.of(1, step=1))
        for name in others:
            run.nodes[name].down = False


@pytest.mark.parametrize("shard", [0, 3])
def test_chunks_damaged_on_a_node_come_back_in_place(run: Any, states: Any, shard: int) -> None:
    saved = run.save(states.of(1))
    keys = saved.manifest.layout.keys_of(shard)[:2]
    store = run.nodes[f"n{shard}"].store
    store.quarantine("run-1", 1, saved.record.token, keys)
    counts = keys_read(run)
    found = asyncio.run(repair_shard(order_of(run, saved, shard, f"n{shard}"), run.nodes.client))
    assert found.chunks == len(keys)
    assert f"n{shard}" not in {name for name, _ in counts}
    run.nodes[f"n{shard}"].heal()
    assert store.report()["runs"]["run-1"]["damaged"] == []
    assert store.read("run-1", 1, saved.record.token, keys=list(keys)).missing == []


def test_shard_of_a_node_that_leaves_is_copied_not_computed(run: Any, states: Any) -> None:
    saved = run.save(states.of(1))
    counts = keys_read(run)
    repaired(run, order_of(run, saved, 1, gone=()))
    assert set(counts) == {("n1", key) for key in saved.manifest.layout.keys_of(1)}


def test_second_loss_takes_only_the_missing_chunks_from_the_object_tier(
    run: Any, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved = run.save(states.of(1))
    run.persist(saved)
    read = []
    original = type(run.folder).read_chunk_into
    monkeypatch.setattr(
        type(run.folder),
        "read_chunk_into",
        lambda folder, directory, key, **into: (read.append(key), original(folder, directory, key, **into))[
            1
        ],
    )
    for name in ("n0", "n1"):
        run.nodes[name].down = True
    order = order_of(run, saved, 0, gone=(0, 1), location=run.persister._location)
    counts = keys_read(run)
    repaired(run, order)
    alone = {s.members[0] for s in saved.manifest.layout.stripes if s.members[1] is None}
    assert set(read) == set(saved.manifest.layout.keys_of(0)) - alone
    assert len(read) == len(set(read))
    assert {key for _, key in counts}.isdisjoint(read)


def test_second_loss_in_the_middle_without_object_tier_changes_nothing_and_says_why(
    run: Any, states: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rebuild, "BATCH_BYTES", 40_000)
    saved = run.save(states.of(1))
    run.nodes["n0"].down = True
    run.nodes["n2"].fail("read", NodeUnavailableError("n2", "killed"), skip=1)
    with pytest.raises(UnrecoverableError, match="killed"):
        repaired(run, order_of(run, saved, 0))
    assert run.coordinator.latest("run-1") == saved.record
    run.nodes["n2"].heal()
    done = run.nodes[SPARE].calls.count("repair")
    assert repaired(run, order_of(run, saved, 0)).chunks < len(saved.manifest.layout.keys_of(0)) or not done


def test_two_repairs_at_once_end_as_one(run: Any, states: Any) -> None:
    saved = run.save(states.of(1))
    run.nodes["n2"].down = True
    order = order_of(run, saved, 2)

    async def both() -> None:
        await asyncio.gather(*(repair_shard(order, run.nodes.client) for _ in range(2)))

    asyncio.run(both())
    repaired(run, order)
    run.forget_local()
    run.nodes["n0"].down = True
    assert states.same(run.recover(folder=False).state, states.of(1))


@pytest.mark.parametrize("op", ["adopt", "repair"])
def test_save_that_commits_meanwhile_makes_the_repair_moot(run: Any, states: Any, op: str) -> None:
    saved = run.save(states.of(1))
    run.nodes["n2"].down = True

    def save_first(_request: dict[str, Any]) -> None:
        run.nodes[SPARE].before.clear()
        run.save(states.of(1, step=1))

    original, tried = run.nodes.client, []

    def client(name: str, address: str) -> Any:
        made = original(name, address)
        if name == SPARE and not tried:
            tried.append(made)
            inner = getattr(made, op)

            async def after_a_save(*arguments: Any, **options: Any) -> Any:
                await asyncio.to_thread(save_first, {})
                return await inner(*arguments, **options)

            setattr(made, op, after_a_save)
        return made

    with pytest.raises((StaleBaseError, ShardUnavailableError)):
        asyncio.run(repair_shard(order_of(run, saved, 2), client))
    run.forget_local()
    run.nodes["n0"].down = True
    assert states.same(run.recover(folder=False).state, states.of(1, step=1))


def test_order_as_plain_values_is_the_same(run: Any, states: Any) -> None:
    order = order_of(run, run.save(states.of(1)), 2, location="/x", reserve_bytes=5)
    assert RepairOrder.from_plain(order.to_plain()) == order


@pytest.mark.parametrize("limit", [None, 1e6])
def test_repair_takes_of_its_limit_what_it_brings(
    run: Any, states: Any, monkeypatch: pytest.MonkeyPatch, limit: float | None
) -> None:
    taken: list[tuple[float, int]] = []

    class Bucket:
        def __init__(self, rate: float, *_: Any) -> None:
            self._rate = rate

        def take(self, nbytes: int) -> float:
            taken.append((self._rate, nbytes))
            return 0.0

    monkeypatch.setattr(pacing, "TokenBucket", Bucket)
    saved = run.save(states.of(1))
    run.nodes["n0"].down = True
    found = repaired(run, order_of(run, saved, 0, bytes_per_second=limit))
    assert sum(nbytes for _, nbytes in taken) == (0 if limit is None else found.sent_bytes)
    assert {rate for rate, _ in taken} <= {1e6}
