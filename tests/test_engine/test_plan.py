"""What is encoded for a save, and that the nodes end up with the truth whatever the states do."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine.plan import (
    FIRST_PART,
    MESSAGE_CHUNKS,
    Content,
    batches_of,
    jobs_for_objects,
    jobs_for_peers,
    parity_dtype,
)
from fastcheck_dask.layout.chunks import ArraySpec, chunk_shape_for, place
from fastcheck_dask.layout.parity import combine, rebuild
from fastcheck_dask.layout.stripes import assign, is_parity_key, parity_nbytes

WIDTHS = {"float32": 4, "float64": 8, "bfloat16": 2, "uint8": 1, "complex128": 16}

#: A state is {name: (dtype, elements)}.
states = st.dictionaries(
    st.sampled_from("abcdefgh"),
    st.tuples(st.sampled_from(sorted(WIDTHS)), st.integers(1, 40)),
    min_size=1,
    max_size=8,
)


def content_of(state, *, shards, parity=1, previous=None, chunk_bytes=64):
    arrays = tuple(
        ArraySpec(name, dtype, (count,), chunk_shape_for((count,), WIDTHS[dtype], chunk_bytes))
        for name, (dtype, count) in state.items()
    )
    sizes = {chunk.key: chunk.nbytes for spec in arrays for chunk in spec.chunks}
    layout = assign(sizes, shards=shards, parity=parity, previous=previous)
    return Content(arrays, place(arrays), layout)


def bits_of(slot, pieces, nbytes, exponent):
    return combine((slot[o : o + n] for o, n in pieces), np.empty(nbytes, np.uint8), exponent=exponent)


def padded(bits, nbytes):
    """Cut or pad, as a storage node does with the base of a parity chunk."""
    out = np.zeros(nbytes, np.uint8)
    n = min(bits.size, nbytes)
    out[:n] = bits[:n]
    return out


class Node:
    """All storage nodes in one: raw bits by key, merged from residuals as a node merges."""

    def __init__(self):
        self.held = {}

    def save(self, content, slot, *, base, base_slot, lost, budget):
        """Apply the plan; return its tasks."""
        for key in lost:
            self.held.pop(key, None)
        keys = set(content.layout.position)
        whole = keys - self.held.keys() if base is not None else keys
        jobs = list(jobs_for_peers(content, base, whole, budget_bytes=budget))
        staged = {}
        for task in (task for job in jobs for task in job.tasks):
            current = bits_of(slot, task.current, task.nbytes, task.exponent)
            if task.base is None:
                staged[task.key] = current
                continue
            residual = current ^ bits_of(base_slot, task.base, task.nbytes, task.exponent)
            staged[task.key] = padded(self.held[task.key], task.nbytes) ^ residual
        self.held = staged
        return jobs


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_plan_any_history_nodes_hold_truth_and_parity_recovers_what_it_is_made_for(data):
    node, base, base_slot, previous = Node(), None, None, None
    rng = np.random.default_rng(0)
    shards = data.draw(st.integers(1, 4), "shards")
    for _ in range(data.draw(st.integers(1, 5), "generations")):
        state = data.draw(states, "state")
        if data.draw(st.integers(0, 5), "other number of shards") == 0:
            shards = data.draw(st.integers(1, 4), "shards")
        parity = data.draw(st.integers(0, 2), "parity")
        if data.draw(st.integers(0, 5), "rebase") == 0:
            base = base_slot = previous = None
        content = content_of(state, shards=shards, parity=parity, previous=previous)
        slot = rng.integers(0, 256, content.placement.total_bytes, np.uint8)
        lost = data.draw(st.sets(st.sampled_from(sorted(node.held))) if node.held else st.just(set()), "lost")
        node.save(content, slot, base=base, base_slot=base_slot, lost=lost, budget=300)
        assert node.held.keys() == content.layout.position.keys()
        for key in content.chunks:
            offset, nbytes = content.piece(key)
            assert (node.held[key] == slot[offset : offset + nbytes]).all()
        for stripe in content.layout.stripes:
            members = {shard: key for shard, key in enumerate(stripe.members) if key is not None}
            numbered = {n: node.held[key] for n, key in enumerate(stripe.parity_keys(parity))}
            for lost in itertools.combinations(members, min(parity, len(members))):
                others = {shard: node.held[key] for shard, key in members.items() if shard not in lost}
                found = rebuild(lost, others, numbered) if lost else {}
                for shard, bits in found.items():
                    assert (bits == padded(node.held[members[shard]], bits.size)).all()
        base, base_slot, previous = content, slot, content.layout


@settings(max_examples=80, deadline=None)
@given(states, st.integers(1, 5), st.integers(0, 2), st.integers(1, 400))
def test_jobs_for_peers_hold_every_chunk_once_within_budget(state, shards, parity, budget):
    content = content_of(state, shards=shards, parity=parity)
    jobs = list(jobs_for_peers(content, None, (), budget_bytes=budget))
    keys = [task.key for job in jobs for task in job.tasks]
    assert sorted(keys) == sorted(content.layout.position)
    for job in jobs:
        stripes = {content.layout.position[task.key][0].id for task in job.tasks}
        assert job.raw_bytes <= budget or len(stripes) == 1
        assert job.raw_bytes == sum(task.nbytes for task in job.tasks)
    limits = [min(budget, max(1, budget // FIRST_PART) * 2**number) for number in range(len(jobs))]
    for (left, right), limit in zip(itertools.pairwise(jobs), limits, strict=False):
        first = content.layout.position[right.tasks[0].key][0]
        of_first = sum(t.nbytes for t in right.tasks if content.layout.position[t.key][0] == first)
        assert left.raw_bytes + of_first > limit
    for job, limit in zip(jobs, limits, strict=True):
        assert job.raw_bytes <= limit or len({content.layout.position[t.key][0].id for t in job.tasks}) == 1
    for task in (task for job in jobs for task in job.tasks):
        stripe, shard = content.layout.position[task.key]
        assert task.shard == shard
        assert task.nbytes == (
            parity_nbytes(stripe, {k: c.nbytes for k, c in content.chunks.items()})
            if is_parity_key(task.key)
            else content.chunks[task.key].nbytes
        )


@settings(max_examples=80, deadline=None)
@given(states, states, st.integers(1, 4), st.sets(st.integers(0, 40)))
def test_jobs_for_peers_deltas_only_where_base_has_same_dtype_and_size(before, after, shards, odd):
    base = content_of(before, shards=shards, parity=2)
    content = content_of(after, shards=shards, parity=2, previous=base.layout)
    whole = {key for number, key in enumerate(sorted(content.layout.position)) if number in odd}
    old_stripes = {stripe.id for stripe in base.layout.stripes}
    for job in jobs_for_peers(content, base, whole, budget_bytes=300):
        for task in job.tasks:
            if is_parity_key(task.key):
                stripe = content.layout.position[task.key][0]
                assert (task.base is not None) == (stripe.id in old_stripes and task.key not in whole)
                continue
            new, old = content.chunks[task.key], base.chunks.get(task.key)
            fits = old is not None and (old.dtype, old.nbytes) == (new.dtype, new.nbytes)
            assert (task.base is not None) == (fits and task.key not in whole)
            if task.base is not None:
                assert task.base == (base.piece(task.key),)


def test_jobs_for_peers_many_tiny_chunks_a_message_never_has_too_many():
    content = content_of({f"x{i:05d}": ("uint8", 1) for i in range(3 * MESSAGE_CHUNKS + 1)}, shards=2)
    jobs = list(jobs_for_peers(content, None, (), budget_bytes=2**30))
    for job in jobs:
        shards = [task.shard for task in job.tasks]
        assert all(shards.count(shard) <= MESSAGE_CHUNKS for shard in range(3))
    assert len(jobs) == 2


def test_jobs_for_objects_all_or_named_go_whole_and_without_parity():
    content = content_of({"a": ("float32", 40), "b": ("uint8", 3)}, shards=2)
    tasks = [t for job in jobs_for_objects(content, budget_bytes=64) for t in job.tasks]
    assert sorted(t.key for t in tasks) == sorted(content.chunks)
    assert all(t.base is None and t.shard == 0 for t in tasks)
    named = [t for job in jobs_for_objects(content, ["b/c/0"], budget_bytes=64) for t in job.tasks]
    assert [t.key for t in named] == ["b/c/0"]
    assert list(jobs_for_objects(content, [], budget_bytes=64)) == []


@given(st.lists(st.integers(0, 100), max_size=50), st.integers(1, 150))
def test_batches_of_any_sizes_keep_order_and_budget(sizes, budget):
    keys = [str(number) for number in range(len(sizes))]
    batches = list(batches_of(keys, lambda key: sizes[int(key)], budget_bytes=budget))
    assert [key for batch in batches for key in batch] == keys
    assert all(len(batch) == 1 or sum(sizes[int(k)] for k in batch) <= budget for batch in batches)
    assert all(batches)


def test_batches_of_tiny_chunks_respect_message_limit():
    batches = list(batches_of(map(str, range(2 * MESSAGE_CHUNKS + 1)), lambda _key: 1, budget_bytes=2**30))
    assert [len(batch) for batch in batches] == [MESSAGE_CHUNKS, MESSAGE_CHUNKS, 1]


@pytest.mark.parametrize(
    ("dtypes", "wanted"),
    [
        (["float32", "int32"], "uint32"),
        (["bfloat16"], "uint16"),
        (["float64", "float32"], "uint8"),
        (["complex128"], "uint8"),
        (["float8_e5m2", "bool"], "uint8"),
    ],
)
def test_parity_dtype_words_of_members(dtypes, wanted):
    assert parity_dtype(dtypes) == wanted


def test_jobs_for_peers_same_size_and_other_dtype_goes_whole():
    base = content_of({"a": ("float32", 10), "b": ("uint8", 9)}, shards=1)
    content = content_of({"a": ("bfloat16", 20), "b": ("uint8", 9)}, shards=1, previous=base.layout)
    tasks = {t.key: t for job in jobs_for_peers(content, base, (), budget_bytes=99) for t in job.tasks}
    assert tasks["a/c/0"].nbytes == base.chunks["a/c/0"].nbytes
    assert tasks["a/c/0"].base is None
    assert tasks["b/c/0"].base is not None
