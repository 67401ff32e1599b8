from __future__ import annotations

import time

from fastcheck_dask.clock import SYSTEM_CLOCK, Deadline, SystemClock


class Held:
    """A clock that stands still until it is told."""

    def __init__(self, now=100.0):
        self.time = now

    def now(self):
        return self.time


def test_system_clock_is_monotonic_seconds():
    before = time.monotonic()
    now = SystemClock().now()
    assert before <= now <= time.monotonic()
    assert SYSTEM_CLOCK.now() >= now


def test_deadline_counts_down_to_zero_and_stays_there():
    clock = Held()
    deadline = Deadline.after(5.0, clock)
    assert (deadline.left(), deadline.passed) == (5.0, False)
    clock.time += 4.5
    assert (deadline.left(), deadline.passed) == (0.5, False)
    clock.time += 0.5
    assert (deadline.left(), deadline.passed) == (0.0, True)
    clock.time += 10
    assert (deadline.left(), deadline.passed) == (0.0, True)


def test_deadline_none_never_passes():
    clock = Held()
    deadline = Deadline.after(None, clock)
    clock.time = 1e12
    assert deadline.left() is None
    assert not deadline.passed


def test_deadline_zero_has_passed_at_once():
    assert Deadline.after(0.0, Held()).passed


def test_deadline_without_clock_uses_that_of_the_machine():
    left = Deadline.after(1000.0).left()
    assert 990.0 < left <= 1000.0
