"""Several services of one office."""

from __future__ import annotations

import threading

import pytest

from fastcheck_dask.coordination.candidacy import Candidate, take_office
from fastcheck_dask.coordination.election import ElectionTimes, Leadership
from fastcheck_dask.coordination.services import together
from fastcheck_dask.coordination.steps import perform
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.entries import SharedEntries


@pytest.fixture
def clock():
    return FakeClock()


@pytest.fixture
def leadership(clock):
    entries = SharedEntries().session()
    office = perform(take_office(Candidate("n0", "", "x")), entries)
    return Leadership(entries, office, times=ElectionTimes(watchdog_seconds=5.0), clock=clock)


def test_together_runs_all_until_the_office_is_over(leadership):
    started = threading.Barrier(3)

    def service(leadership):
        started.wait(30.0)
        while leadership.wait(0.01):
            pass

    thread = threading.Thread(target=together(service, service), args=(leadership,))
    thread.start()
    started.wait(30.0)
    assert thread.is_alive()
    leadership.end()
    thread.join(30.0)
    assert not thread.is_alive()


@pytest.mark.parametrize("error", [None, KeyError("defect")])
def test_together_one_that_ends_ends_the_office_for_all(leadership, error):
    ended = []

    def lasting(leadership):
        while leadership.wait(0.01):
            pass
        ended.append("lasting")

    def short(_leadership):
        if error is not None:
            raise error

    if error is None:
        together(lasting, short)(leadership)
    else:
        with pytest.raises(KeyError):
            together(lasting, short)(leadership)
    assert ended == ["lasting"]
    assert leadership.over


def test_served_needs_a_sign_of_life_of_every_part(leadership, clock):
    leadership.wait(0.0, "states")
    leadership.wait(0.0, "duties")
    leadership.wait(0.0)
    clock.advance(4.0)
    leadership.wait(0.0, "states")
    leadership.wait(0.0)
    assert leadership.is_served
    clock.advance(2.0)
    leadership.wait(0.0, "states")
    leadership.wait(0.0)
    assert not leadership.is_served


def test_served_by_one_named_part_is_enough_and_by_none_is_not(leadership, clock):
    clock.advance(4.0)
    assert leadership.is_served
    leadership.wait(0.0, "states")
    clock.advance(4.0)
    assert leadership.is_served
    clock.advance(2.0)
    assert not leadership.is_served
