"""Which chunks are read and computed, compared with trying every stripe."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.erasures import Erasure, computed, erasures_of, keys_to_read, rebuildable_now
from fastcheck_dask.layout.parity import HOLE, combine
from fastcheck_dask.layout.stripes import assign

SIZES = {f"k{number}": 100 for number in range(9)}


def test_rebuildable_now_waits_for_what_is_on_its_way_and_is_bounded():
    layout = assign(SIZES, shards=3)
    late = layout.keys_of(1)
    others = set(layout.keys_of(0)) | set(layout.keys_of(2))

    def keys(**options):
        chosen = rebuildable_now(layout, late, SIZES, **{"awaited": (), "budget_bytes": 10**6} | options)
        assert all(layout.position[key] == (found.stripe, 1) for found in chosen for key in found.lost)
        return [key for found in chosen for key in found.lost]

    assert keys() == list(late)
    assert keys(awaited=set(late)) == list(late)
    assert keys(awaited=others) == []
    assert keys(awaited=others, given_up=others) == []
    assert keys(awaited={layout.position[late[0]][0].members[2]}) == list(late[1:])
    assert keys(budget_bytes=1) == [late[0]]
    assert keys(budget_bytes=200) == list(late[:2])
    bare = assign(SIZES, shards=3, parity=0)
    assert rebuildable_now(bare, late, SIZES, awaited=(), budget_bytes=10**6) == []


def test_rebuildable_now_with_two_parity_shards_takes_two_of_a_stripe():
    layout = assign(SIZES, shards=3, parity=2)
    by_shard = [layout.keys_of(shard) for shard in range(3)]
    everything = {key for keys in by_shard for key in keys}

    def lost(*late, awaited=everything, given_up=(), budget_bytes=10**6):
        owed = [key for shard in late for key in by_shard[shard]]
        found = rebuildable_now(
            layout, owed, SIZES, awaited=awaited, given_up=given_up, budget_bytes=budget_bytes
        )
        return [set(erasure.lost) for erasure in found]

    there = everything - set(by_shard[0]) - set(by_shard[1])
    pairs = [set(stripe.members[:2]) for stripe in layout.stripes]
    assert lost(0, 1, awaited=everything - there) == pairs
    assert lost(0, 1, awaited=everything - there, budget_bytes=300) == pairs[:1]
    assert lost(0, awaited=everything - there) == [], "the other one may still come"
    assert lost(0, awaited=everything - there, given_up=set(by_shard[1])) == pairs
    assert lost(0, 1, 2) == lost(0, 1) == []


@given(st.data())
def test_keys_to_read_are_what_makes_the_lost_chunks_computable(data):
    """With any chunks there, and any that cannot be read: None exactly if the others are too few."""
    shards = data.draw(st.integers(1, 6), "shards")
    parity = data.draw(st.integers(0, 2), "parity")
    sizes = data.draw(st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 30), min_size=1), "sizes")
    layout = assign(sizes, shards=shards, parity=parity)
    stripe = data.draw(st.sampled_from(layout.stripes), "stripe")
    members = [key for key in stripe.members if key is not None]
    bits = {key: np.random.default_rng(ord(key)).integers(0, 256, sizes[key], np.uint8) for key in members}
    length = max(bits[key].size for key in members)
    every = dict(bits)
    for number, key in enumerate(stripe.parity_keys(parity)):
        parts = [HOLE if member is None else bits[member] for member in stripe.members]
        every[key] = combine(parts, np.empty(length, np.uint8), exponent=number)
    subset = st.sets(st.sampled_from(sorted(every)))
    lost = tuple(data.draw(st.sets(st.sampled_from(members), min_size=1), "lost"))
    there = data.draw(subset, "there") - set(lost)
    failed = data.draw(subset, "failed") - there
    erasure = Erasure(stripe, lost)
    wanted = keys_to_read(layout, erasure, there=there, failed=failed)
    had = there | (every.keys() - failed - set(lost))
    assert (wanted is None) == (
        len(set(members) - had) > sum(key in had for key in stripe.parity_keys(parity))
    )
    if wanted is None:
        return
    assert not set(wanted) & (there | failed | set(lost))
    found, used = computed(layout, erasure, there={key: every[key] for key in there | set(wanted)})
    assert set(lost) <= found.keys()
    assert set(used) <= set(stripe.parity_keys(parity))
    for key, whole in found.items():
        assert whole[: sizes[key]].tobytes() == bits[key].tobytes()
        assert not whole[sizes[key] :].any()


def test_erasures_are_the_lost_chunks_of_each_stripe():
    layout = assign(SIZES, shards=3, parity=2)
    first, second = layout.stripes[:2]
    keys = [first.members[0], second.members[1], first.members[2]]
    assert erasures_of(layout, keys) == [
        Erasure(first, (first.members[0], first.members[2])),
        Erasure(second, (second.members[1],)),
    ]
