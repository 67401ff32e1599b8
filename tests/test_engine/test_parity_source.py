"""Chunks that are computed from parity: whatever cannot be read, and whatever gives other bits."""

from __future__ import annotations

import asyncio
import itertools

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.parity_source import ParitySource
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.parity import HOLE, combine
from fastcheck_dask.layout.stripes import assign

#: Of five nodes.
PAIRS = list(itertools.combinations(range(5), 2))


class World:
    """A checkpoint of bytes, whose nodes give what is not `failed`."""

    def __init__(self, sizes, *, shards, parity):
        self.arrays = tuple(ArraySpec(f"a{n}", "uint8", (size,), (size,)) for n, size in enumerate(sizes))
        chunks = [chunk for spec in self.arrays for chunk in spec.chunks]
        rng = np.random.default_rng(len(sizes))
        self.bits = {chunk.key: rng.integers(0, 256, chunk.nbytes, np.uint8) for chunk in chunks}
        self.layout = assign(
            {key: bits.size for key, bits in self.bits.items()}, shards=shards, parity=parity
        )
        self.every = dict(self.bits)
        for stripe in self.layout.stripes:
            parts = [HOLE if key is None else self.bits[key] for key in stripe.members]
            for number, key in enumerate(stripe.parity_keys(parity)):
                out = np.empty(max(part.size for part in parts), np.uint8)
                self.every[key] = combine(parts, out, exponent=number)
        self.manifest = Manifest(
            "run",
            1,
            "t",
            "k",
            1.0,
            {},
            self.arrays,
            {key: digest(bits) for key, bits in self.every.items()},
            self.layout,
            tuple(f"n{n}" for n in range(self.layout.nodes_wanted)),
        )
        self.good, self.taken, self.refused, self.asked = set(), {}, [], []

    def rebuild(self, lost, *, failed=(), without=(), hung=(), patience=lambda _nbytes: 60.0):
        """Compute chunks as a load does that has all other data chunks but those which failed."""
        forever = asyncio.Event()

        async def read(shard, keys, room):
            assert all(self.layout.position[key][1] == shard for key in keys)
            assert shard not in without
            self.asked += keys
            if shard in hung:
                await forever.wait()
            came = {key for key in keys if key not in failed}
            for key in keys:
                # What fails may have been written half.
                room(key)[:] = self.every[key] if key in came else 0xEE
            return came

        source = ParitySource(
            self.manifest,
            self.bits.__getitem__,
            good=self.good,
            without=without,
            read=read,
            patience=patience,
            take=lambda key, bits: self.taken.update({key: bits.copy()}),
            refuse=self.refused.append,
        )
        asyncio.run(source.rebuild_all(lost))
        return set(self.taken)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_rebuild_takes_exactly_what_the_readable_chunks_determine(data):
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=9), "sizes")
    shards, parity = data.draw(st.integers(1, 5), "shards"), data.draw(st.integers(0, 2), "parity")
    world = World(sizes, shards=shards, parity=parity)
    without = data.draw(st.sets(st.integers(0, world.layout.nodes_wanted - 1), max_size=2), "without")
    lost = data.draw(st.sets(st.sampled_from(sorted(world.bits)), min_size=1), "lost")
    failed = data.draw(st.sets(st.sampled_from(sorted(world.every))), "failed")
    world.good = data.draw(st.sets(st.sampled_from(sorted(world.bits))), "good") - lost
    gone = failed | {key for shard in without for key in world.layout.keys_of(shard)}
    wanted = set()
    for stripe in world.layout.stripes:
        members = {key for key in stripe.members if key is not None}
        unknown = {key for key in members if key in lost or (key in gone and key not in world.good)}
        if len(unknown) <= len(set(stripe.parity_keys(parity)) - gone):
            wanted |= members & lost
    assert world.rebuild(sorted(lost), failed=failed, without=without) == wanted
    assert all(bits.tobytes() == world.bits[key].tobytes() for key, bits in world.taken.items())
    assert len(world.asked) == len(set(world.asked)), "nothing is read twice"
    assert world.refused == []


def test_rebuild_of_one_chunk_reads_the_first_parity_alone():
    world = World([9, 9, 9], shards=3, parity=2)
    world.good = {"a1/c/0", "a2/c/0"}
    assert world.rebuild(["a0/c/0"]) == {"a0/c/0"}
    assert world.asked == ["%parity/0"]


def test_rebuild_with_a_parity_chunk_that_gives_other_bits_takes_the_other_one():
    """Its own digest is right: whoever made it made it wrong."""
    world = World([9, 9, 9], shards=3, parity=2)
    world.good = {"a1/c/0", "a2/c/0"}
    world.every["%parity/0"][3] ^= 1
    assert world.rebuild(["a0/c/0"]) == {"a0/c/0"}
    assert world.taken["a0/c/0"].tobytes() == world.bits["a0/c/0"].tobytes()
    assert world.asked == ["%parity/0", "%parity2/0"]
    assert "parity of stripe 0 gives other bits" in world.refused[0]


@pytest.mark.parametrize("parity", [1, 2])
def test_rebuild_with_parity_that_gives_other_bits_takes_nothing(parity):
    world = World([9, 9, 9], shards=3, parity=parity)
    world.good = {"a2/c/0"} if parity == 2 else {"a1/c/0", "a2/c/0"}
    world.every["%parity/0"][3] ^= 1
    assert world.rebuild(["a0/c/0", "a1/c/0"][:parity]) == set()
    assert world.refused


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_rebuild_waits_for_no_hung_shard_that_others_can_stand_in_for(data):
    """Nobody is given any time: all that is hung or only slow is done without where that is possible."""
    sizes = data.draw(st.lists(st.integers(1, 30), min_size=1, max_size=9), "sizes")
    shards = data.draw(st.integers(1, 4), "shards")
    world = World(sizes, shards=shards, parity=2)
    lost_shard, hung = data.draw(st.permutations(range(shards + 2)), "shards that fail")[:2]
    lost = [key for key in world.layout.keys_of(lost_shard) if key in world.bits]
    if data.draw(st.booleans(), "whether the other data are there"):
        world.good = world.bits.keys() - set(lost)
    found = world.rebuild(lost, without={lost_shard}, hung={hung}, patience=lambda _nbytes: 0.0)
    assert found == set(lost)
    assert all(bits.tobytes() == world.bits[key].tobytes() for key, bits in world.taken.items())
    assert len(world.asked) == len(set(world.asked)), "nothing is read twice"


def test_rebuild_late_parity_that_nothing_stands_in_for_is_waited_for():
    world = World([9, 9, 9], shards=3, parity=1)
    world.good = {"a1/c/0", "a2/c/0"}
    assert world.rebuild(["a0/c/0"], patience=lambda _nbytes: 0.0) == {"a0/c/0"}
    assert world.asked == ["%parity/0"]


def test_rebuild_late_parity_that_comes_before_the_other_one_is_used():
    world = World([9, 9, 9], shards=3, parity=2)
    world.good = {"a1/c/0", "a2/c/0"}
    asked, taken = asyncio.Event(), []

    async def main():
        async def read(shard, keys, room):
            if shard == 4:
                asked.set()
                await asyncio.Event().wait()
            await asked.wait()
            for key in keys:
                room(key)[:] = world.every[key]
            return set(keys)

        source = ParitySource(
            world.manifest,
            world.bits.__getitem__,
            good=world.good,
            without=(),
            read=read,
            patience=lambda _nbytes: 0.0,
            take=lambda key, _bits: taken.append(key),
            refuse=world.refused.append,
        )
        await asyncio.wait_for(source.rebuild_all(["a0/c/0"]), 60)

    asyncio.run(main())
    assert taken == ["a0/c/0"]


# Loads from nodes


@pytest.fixture
def saved(rig, states):
    """Three data shards and two parity shards on n0 to n4."""
    run = rig(nodes=5)
    run.state = states.of(1)
    run.saved = run.save(run.state, choice=run.choice(parity=2))
    assert (run.saved.record.shards, run.saved.record.parity) == (3, 2)
    return run


def load(run, keys=None):
    memory = {}
    keys = list(run.saved.manifest.chunks) if keys is None else keys
    loader = run.loader(run.saved, memory)
    asyncio.run(loader.load(keys))
    assert all(digest(memory[key]) == run.saved.manifest.digests[key] for key in keys)
    return loader._report


@pytest.mark.parametrize("lost", PAIRS)
def test_load_any_two_nodes_down_is_exact_also_after_a_delta_and_in_part(saved, states, lost):
    saved.saved = saved.save(states.of(1, step=1), choice=saved.choice(parity=2))
    assert saved.saved.stats.deltas > 0
    for number in lost:
        saved.nodes[f"n{number}"].down = True
    report = load(saved)
    sizes = saved.saved.manifest.sizes
    owed = sum(sizes[key] for n in lost if n < 3 for key in saved.saved.manifest.layout.keys_of(n))
    assert report.raw_bytes.get("parity", 0) == owed
    for key in list(sizes)[::4]:
        load(saved, [key])


@pytest.mark.parametrize("lost", PAIRS)
def test_load_two_damaged_chunks_of_a_stripe_are_rebuilt_and_repaired(saved, lost):
    stripe = saved.saved.manifest.layout.stripes[0]
    assert all(stripe.members)
    keys = [*stripe.members, *stripe.parity_keys(2)]
    for shard in lost:
        (held,) = saved.nodes[f"n{shard}"].store._runs["run-1"].generations()
        payload = held.chains[keys[shard]][0].payload
        payload.flags.writeable = True
        payload[-1] ^= 1
    first = load(saved)
    second = load(saved)
    of_data = [shard for shard in lost if shard < 3]
    # The first parity chunk was read if a member is lost, the second one if the first one is lost, too.
    read = of_data + [shard for shard in lost if of_data and shard == 3]
    for shard in read:
        (held,) = saved.nodes[f"n{shard}"].store._runs["run-1"].generations()
        bits = PrefixIndex().decode(held.chains[keys[shard]][0].payload)
        assert digest(bits) == saved.saved.manifest.digests[keys[shard]]
    assert first.raw_bytes.get("parity", 0) == sum(saved.saved.manifest.sizes[keys[n]] for n in of_data)
    assert second.raw_bytes == {"peers": saved.saved.manifest.raw_bytes}


@pytest.mark.parametrize("dead", [False, True])
def test_load_two_late_nodes_or_a_late_and_a_dead_one_are_overtaken(saved, monkeypatch, dead):
    monkeypatch.setattr("fastcheck_dask.engine.load._BATCH_BYTES", 1)
    monkeypatch.setattr("fastcheck_dask.engine.pace.JITTER_SECONDS", 0.02)
    forever = asyncio.Event()
    for number in (0, 1):
        node = saved.nodes[f"n{number}"]
        if dead and number:
            node.down = True
            continue
        serve = node.serve

        async def held(request, serve=serve):
            if request["op"] == "read":
                await forever.wait()
            return await serve(request)

        node.serve = held
    report = load(saved)
    sizes, layout = saved.saved.manifest.sizes, saved.saved.manifest.layout
    assert report.raw_bytes["parity"] >= sum(sizes[key] for n in (0, 1) for key in layout.keys_of(n))


@pytest.mark.parametrize("history", [(1, 2, 1), (2, 0, 2), (2, 1, 2), (0, 1, 2)])
def test_save_number_of_parity_shards_changes_the_data_shards_stay(rig, states, history):
    run = rig(nodes=5)
    for step, parity in enumerate(history):
        latest = run.coordinator.latest("run-1")
        choice = run.choice(3, parity=parity, previous_shards=latest.shards if latest else None)
        run.saved = run.save(states.of(1, step=step), choice=choice)
        assert (run.saved.record.parity, len(run.saved.record.nodes)) == (parity, 3 + parity)
        assert run.saved.record.nodes[:3] == ("n0", "n1", "n2")
        if step:
            assert run.saved.stats.deltas > 0
        for lost in itertools.combinations(run.saved.record.nodes, parity):
            for name in lost:
                run.nodes[name].down = True
            load(run)
            for name in lost:
                run.nodes[name].down = False
