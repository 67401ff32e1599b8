"""What is remembered of nodes, and which are left out for being slow."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.placement.outlook import (
    AWAY_LIMIT,
    AWAY_SAVES,
    BAND_SECONDS,
    MEASURED_FROM_BYTES,
    SLOW_FACTOR,
    SLOW_SAVES,
    UNKNOWN,
    Outlook,
    SlowNodes,
)

BYTES = MEASURED_FROM_BYTES


def save(slow, *, name="n3", factor=3.0):
    """Return what four nodes took, of which one may be slow."""
    return {f"n{i}": (BYTES, factor if slow and f"n{i}" == name else 1.0) for i in range(4)}


def test_outlook_keeps_means_and_the_newest_load():
    outlook = UNKNOWN.pinged(1.0, 0.5).pinged(2.0, 0.25)
    assert outlook == Outlook(pytest.approx(1.3), None, 0.25)
    outlook = outlook.transferred(BYTES, 4.0).transferred(BYTES - 1, 1e9)
    assert outlook.seconds_per_byte == 4.0 / BYTES


def test_band_of_equal_costs_is_equal_and_grows_by_doubling():
    assert UNKNOWN.band is None
    bands = [UNKNOWN.pinged(BAND_SECONDS * 2**n, 0.0).band for n in range(-3, 5)]
    assert bands == [0, 0, 0, 0, 1, 2, 3, 4]
    assert Outlook(BAND_SECONDS, 1e-9).band > 0


def test_slow_node_is_left_out_after_some_saves_in_a_row_and_comes_back():
    nodes = SlowNodes()
    for _ in range(SLOW_SAVES - 1):
        nodes.observe(save(True))
    assert nodes.avoided == frozenset()
    nodes.observe(save(True))
    assert nodes.avoided == {"n3"}
    for _ in range(AWAY_SAVES - 1):
        nodes.observe(save(False, name="n0"))
        assert nodes.avoided == {"n3"}
    nodes.observe(save(False))
    assert nodes.avoided == frozenset()


def test_slow_node_that_stays_slow_is_away_for_longer_each_time():
    nodes = SlowNodes()
    away = []
    for _ in range(8):
        while not nodes.avoided:
            nodes.observe(save(True))
        count = 0
        while nodes.avoided:
            nodes.observe({name: took for name, took in save(False).items() if name != "n3"})
            count += 1
        away.append(count)
    assert away == [min(AWAY_SAVES * 2**n, AWAY_LIMIT) for n in range(8)]


@pytest.mark.parametrize(
    "transfers",
    [
        save(True, factor=SLOW_FACTOR * 0.99),
        {"a": (BYTES, 1.0), "b": (BYTES, 100.0)},
        {**save(False), "n3": (BYTES - 1, 100.0)},
        {},
    ],
    ids=["no clear margin", "two nodes", "too little", "nothing"],
)
def test_slow_needs_a_clear_margin_and_enough_to_go_by(transfers):
    nodes = SlowNodes()
    for _ in range(10 * SLOW_SAVES):
        nodes.observe(transfers)
    assert nodes.avoided == frozenset()


def test_slow_in_turns_is_nobody():
    nodes = SlowNodes()
    for number in range(50):
        nodes.observe(save(True, name=f"n{number % 2}"))
    assert nodes.avoided == frozenset()


@given(st.lists(st.dictionaries(st.sampled_from("abcdef"), st.floats(1e-3, 1e3), max_size=6), max_size=150))
def test_slow_any_saves_never_flap(saves):
    nodes = SlowNodes()
    since = dict.fromkeys("abcdef", 0)
    was = frozenset()
    for number, paces in enumerate(saves):
        nodes.observe({name: (BYTES, pace) for name, pace in paces.items()})
        for name in nodes.avoided ^ was:
            least = SLOW_SAVES if name in nodes.avoided else AWAY_SAVES
            assert number + 1 - since[name] >= least
            since[name] = number + 1
        was = nodes.avoided
