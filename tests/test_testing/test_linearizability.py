"""The checker itself: histories that are right, and histories that are not."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.testing.linearizability import Event, check_register


def w(value, called, returned=float("inf")):
    return Event("write", value, called, returned)


def r(value, called, returned=float("inf")):
    return Event("read", value, called, returned)


@pytest.mark.parametrize(
    "history",
    [
        [],
        [r(None, 0, 1)],
        [w(1, 0, 1), r(1, 2, 3)],
        # Concurrent with the write: either value.
        [w(1, 0, 9), r(None, 1, 2), r(1, 3, 4)],
        # Two writes at once, in the order that the reads tell.
        [w(1, 0, 9), w(2, 0, 9), r(2, 10, 11)],
        [w(1, 0, 9), w(2, 0, 9), r(1, 10, 11)],
        [w(1, 0, 9), w(2, 0, 9), r(2, 1, 2), r(1, 3, 4)],
        # Of unknown outcome: it may never happen, or late.
        [w(1, 0), r(None, 5, 6)],
        [w(1, 0), r(None, 5, 6), r(1, 7, 8)],
        [w(1, 0), w(2, 1, 2), r(2, 3, 4), r(1, 5, 6)],
        [w(1, 0, 1), r(7, 2)],
    ],
)
def test_history_that_can_have_happened_is_accepted(history):
    assert check_register(history) == ""


@pytest.mark.parametrize(
    "history",
    [
        # Freshness: older than what was complete before the call.
        [w(1, 0, 1), r(None, 2, 3)],
        [w(1, 0, 1), w(2, 2, 3), r(1, 4, 5)],
        # Back in time between two reads.
        [w(1, 0, 9), r(1, 1, 2), r(None, 3, 4)],
        [w(1, 0), r(1, 1, 2), r(None, 3, 4)],
        # Never written.
        [w(1, 0, 1), r(7, 2, 3)],
        # From the future.
        [r(1, 0, 1), w(1, 2, 3)],
        # It took effect twice.
        [w(1, 0), w(2, 1, 2), r(1, 3, 4), w(3, 5, 6), r(3, 7, 8), r(1, 9, 10)],
    ],
)
def test_history_that_cannot_have_happened_is_refused(history):
    assert "no order explains" in check_register(history)


@given(st.integers(0, 10**6))
def test_history_of_a_register_is_accepted_and_one_old_read_is_not(seed):
    """Operations of three clients take effect at moments that are drawn; then one read is made old."""
    dice, history, register = random.Random(seed), [], None
    moments = sorted(dice.uniform(0, 100) for _ in range(12))
    effective = []
    for number, moment in enumerate(moments):
        called, returned = moment - dice.uniform(0, 20), moment + dice.uniform(0, 20)
        if dice.random() < 0.5:
            register = number
            history.append(w(number, called, returned))
        else:
            history.append(r(register, called, returned))
        effective.append(register)
    assert check_register(dice.sample(history, len(history))) == ""
    first, last = w("first", -50, -40), w("last", 200, 210)
    assert check_register([first, *history, last, r("first", 220, 230)])
