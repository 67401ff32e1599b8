"""Duties that are done again and again, for as long as the office lasts."""

from __future__ import annotations

import threading

import pytest

from fastcheck_dask.errors import FencedError, TierError
from fastcheck_dask.master.service import MasterService


class Office:
    def __init__(self):
        self.in_force = True
        self.over = threading.Event()
        self.fencing_token = 1

    def wait(self, seconds, part=""):
        return not self.over.wait(seconds)


class Duty:
    name = "duty"
    interval_seconds = 0.001

    def __init__(self, act):
        self.act, self.rounds = act, 0

    async def run(self, leadership):
        self.rounds += 1
        self.act(self)


def test_serve_repeats_each_duty_and_ends_with_the_office():
    office = Office()

    def first(duty):
        if duty.rounds == 3 and second.rounds >= 3:
            office.over.set()
        duty.rounds = min(duty.rounds, 2)

    second = Duty(lambda duty: None)
    MasterService(lambda: (Duty(first), second))(office)
    assert second.rounds >= 3


@pytest.mark.parametrize("error", [TierError("the store is away"), FencedError("for a moment")])
def test_serve_error_is_told_once_and_tried_again(caplog, error):
    office = Office()

    def act(duty):
        if duty.rounds == 5:
            office.over.set()
        raise error

    MasterService(lambda: (Duty(act),))(office)
    assert [record.message for record in caplog.records] == [f"duty is tried again: {error}"]


def test_serve_defect_ends_the_service_and_is_raised():
    def act(_duty):
        raise KeyError("defect")

    with pytest.raises(KeyError):
        MasterService(lambda: (Duty(act),))(Office())


def test_serve_not_in_force_for_a_while_does_nothing_and_goes_on():
    office = Office()
    office.in_force = False
    duty = Duty(lambda duty: office.over.set())
    turns = []

    def wait(_seconds, part=""):
        turns.append(duty.rounds)
        if len(turns) == 3:
            office.in_force = True
        return not office.over.is_set()

    office.wait = wait
    MasterService(lambda: (duty,))(office)
    assert turns[:3] == [0, 0, 0]
    assert duty.rounds >= 1
