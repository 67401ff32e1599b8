"""Which checkpoint the next one is stored against."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.chains import ChainPolicy, chain_of, choose_base
from fastcheck_dask.tiers.commit_marker import CommitMarker


def marker(generation, base=None, *, hours=0.0):
    link = None if base is None else base.link
    return CommitMarker("run", generation, "t", f"token{generation}", "0" * 64, 1, hours * 3600, link)


def chosen(committed, policy, *, generation=100, hours=0.0):
    return choose_base(committed, policy, run="run", generation=generation, created_unix=hours * 3600)


@given(st.integers(0, 5), st.integers(1, 30))
def test_choose_base_bounds_every_chain(max_deltas, saves):
    committed = []
    for generation in range(1, saves + 1):
        base = chosen(committed, ChainPolicy(max_deltas), generation=generation)
        committed.append(marker(generation, base))
        by_directory = {m.directory: m for m in committed}
        chain = chain_of(committed[-1], by_directory)
        assert chain[-1].base is None
        assert len(chain) == 1 + (generation - 1) % (max_deltas + 1)


def test_choose_base_is_whole_when_the_whole_one_is_old_or_from_the_future():
    full = marker(1, hours=10.0)
    delta = marker(2, full, hours=20.0)
    for hours, base in [(21.0, delta), (33.9, delta), (34.0, None), (9.0, None)]:
        assert chosen([full, delta], ChainPolicy(), hours=hours) == base


def test_choose_base_never_builds_upon_a_broken_chain():
    full = marker(1)
    delta = marker(2, full)
    assert chosen([delta], ChainPolicy()) is None
    assert chosen([replace(full, token="another"), delta], ChainPolicy()) is None
    assert chosen([full, delta], ChainPolicy()) == delta


def test_choose_base_looks_at_older_generations_of_the_run_only():
    full = marker(5)
    assert chosen([full], ChainPolicy(), generation=5) is None
    assert chosen([replace(full, run="other")], ChainPolicy()) is None
    assert chosen([], ChainPolicy()) is None
