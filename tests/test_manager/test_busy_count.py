"""Who is inside is counted; the agent hears of the first and of the last."""

from __future__ import annotations

import os
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.manager.busy_count import BusyCount


def test_only_the_first_and_the_last_are_told() -> None:
    told: list[bool] = []
    count = BusyCount(told.append)
    count.enter()
    count.enter()
    count.leave()
    assert told == [True]
    count.leave()
    assert told == [True, False]


@given(st.lists(st.booleans(), max_size=50))
def test_any_order_tells_changes_in_turns_and_ends_with_what_is_so(steps: list[bool]) -> None:
    told: list[bool] = []
    count, inside = BusyCount(told.append), 0
    for enters in steps:
        if enters:
            count.enter()
            inside += 1
        elif inside:
            count.leave()
            inside -= 1
        assert (told[-1] if told else False) is (inside > 0)
    assert told == [number % 2 == 0 for number in range(len(told))]


def test_threads_tell_in_turns_and_end_free() -> None:
    told: list[bool] = []
    count = BusyCount(told.append)
    start = threading.Barrier(4)

    def work() -> None:
        start.wait()
        for _ in range(500):
            count.enter()
            count.leave()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert told
    assert told == [number % 2 == 0 for number in range(len(told))]
    assert told[-1] is False


def test_forked_child_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[bool] = []
    count = BusyCount(told.append)
    monkeypatch.setattr(os, "getpid", lambda: -1)
    count.enter()
    assert told == []
