"""What a generation counts while it is changed, and what the garbage collector sees of it."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.node.entries import Entry, Step, accept
from fastcheck_dask.node.generations import Generation

KEYS = "abcd"

keys = st.sampled_from(KEYS)


def test_counts_are_those_of_counting_after_any_changes(chunks: Any) -> None:
    entries = [accept(*chunks.whole("a", chunks.bits(n, 40 + 8 * n)), "here") for n in range(9)]
    payloads = st.lists(st.sampled_from(entries), max_size=3)
    steps = st.none() | st.builds(Step, st.just(entries[0].descriptor), st.none() | st.sampled_from(entries))
    changes = st.one_of(
        st.tuples(st.just("replace"), keys, payloads.map(lambda found: tuple(found) or None)),
        st.tuples(st.just("set_step"), keys, steps),
        st.tuples(st.just("want"), st.sets(keys).map(lambda found: dict.fromkeys(found, ("", 0)))),
    )

    @given(st.sets(keys), st.lists(changes, max_size=30))
    def check(wanted: set[str], done: list[Any]) -> None:
        held = Generation(1, "t", np.zeros(7, np.uint8), dict.fromkeys(wanted, ("", 0)))
        for what, *how in done:
            getattr(held, what)(*how)
            assert held.nbytes == sum(array.nbytes for array in held.arrays())
            assert held.lost == held.wanted.keys() - held.chains.keys() - held.steps.keys()
            assert held.pending == {key for key, chain in held.chains.items() if len(chain) > 1}

    check()


def test_garbage_collector_does_not_go_through_chunks(chunks: Any) -> None:
    """Its full passes hold the interpreter for as long as there are objects that it has to look at."""
    held = Generation(1, "t", np.zeros(7, np.uint8), {})
    for key in KEYS:
        entry: Entry = accept(*chunks.whole(key, chunks.bits(1)), "here")
        held.replace(key, (entry,))
        held.set_step(key, Step(entry.descriptor, entry))
        found = [entry, entry.descriptor, entry.summary, held.chains[key], held.steps[key]]
        assert not any(map(gc.is_tracked, found))
