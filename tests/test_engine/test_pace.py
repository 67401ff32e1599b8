"""When a shard is late, and which of several sources answers."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.pace import JITTER_SECONDS, LATE_FACTOR, UNMEASURED_SECONDS, Pace, first_answer
from fastcheck_dask.errors import NodeUnavailableError


@pytest.fixture(autouse=True)
def as_it_is(impatient):
    """Test what holds outside of tests."""


def test_late_at_goes_by_the_median_of_the_others():
    pace = Pace()
    for shard, seconds in ((0, 1.0), (1, 2.0), (2, 60.0)):
        pace.asked(shard, 100, 0.0)
        pace.came(shard, seconds)
    pace.asked(3, 50, 10.0)
    assert pace.late_at(3) == pytest.approx(10.0 + LATE_FACTOR * 1.0 + JITTER_SECONDS)
    assert pace.late(12.0) == ([], pytest.approx(1.0 + JITTER_SECONDS))
    assert pace.late(14.0) == ([3], None)


def test_late_at_nothing_measured_or_nothing_owed_is_never():
    pace = Pace()
    pace.asked(0, 100, 0.0)
    pace.asked(1, 100, 0.0)
    assert pace.late(1e9) == ([], None)
    pace.came(0, 1.0)
    assert pace.late_at(0) is None
    assert pace.late_at(1) is not None
    pace.ended(1)
    pace.ended(1)
    assert pace.late(1e9) == ([], None)


def test_late_at_a_single_shard_goes_by_its_own_batches():
    pace = Pace()
    pace.asked(0, 100, 0.0)
    pace.came(0, 1.0)
    pace.asked(0, 200, 5.0)
    assert pace.late_at(0) == pytest.approx(5.0 + 2 * LATE_FACTOR + JITTER_SECONDS)


def test_patience_goes_by_the_median_of_all_or_a_constant():
    pace = Pace()
    assert pace.patience(100) == UNMEASURED_SECONDS
    for shard, seconds in ((0, 1.0), (1, 2.0), (2, 60.0)):
        pace.asked(shard, 100, 0.0)
        pace.came(shard, seconds)
    assert pace.patience(50) == pytest.approx(LATE_FACTOR * 1.0 + JITTER_SECONDS)


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(0, 2**30), st.floats(0, 100)), max_size=20),
    st.floats(0, 100),
)
def test_late_shards_that_are_no_slower_than_all_others_are_not_late(batches, now):
    pace = Pace()
    slowest = 0.0
    for shard, nbytes, seconds in batches:
        pace.asked(shard, nbytes, 0.0)
        pace.came(shard, seconds)
        slowest = max(slowest, seconds / max(nbytes, 1))
    pace.asked(4, 1000, 0.0)
    late, after = pace.late(now)
    assert (late == [4]) is (bool(batches) and (at := pace.late_at(4)) is not None and at <= now)
    assert after is None or after > 0
    if late:
        assert now >= JITTER_SECONDS
    # By the slowest of the others' pace alone nobody is late.
    assert not batches or pace.late_at(4) <= LATE_FACTOR * slowest * 1000 + JITTER_SECONDS + 1e-9


def ask(*sources, patience_seconds=60.0):
    return asyncio.run(first_answer(sources, patience_seconds=patience_seconds))


async def hangs():
    await asyncio.Event().wait()


async def answers():
    return "answer"


async def fails():
    raise NodeUnavailableError("n", "injected")


def test_first_answer_of_the_first_source_asks_no_other():
    async def never():
        raise AssertionError

    assert ask(answers, never) == ("answer", [])


def test_first_answer_failures_are_told_and_the_next_is_asked_at_once():
    answer, errors = ask(fails, fails, answers)
    assert (answer, [str(error) for error in errors]) == ("answer", ["storage node n: injected"] * 2)
    answer, errors = ask(fails, fails)
    assert (answer, len(errors)) == (None, 2)
    assert ask() == (None, [])


def test_first_answer_silent_source_is_overtaken_and_cancelled():
    ended = []

    async def silent():
        try:
            await hangs()
        finally:
            ended.append(True)

    assert ask(silent, fails, answers, patience_seconds=0.01)[0] == "answer"
    assert ended == [True]


def test_first_answer_slow_source_still_counts_when_the_others_fail():
    async def both():
        others_failed = asyncio.Event()

        async def slow():
            await others_failed.wait()
            return "slow"

        async def fails_last():
            others_failed.set()
            raise NodeUnavailableError("n", "injected")

        return await first_answer([slow, fails, fails_last], patience_seconds=0.01)

    answer, errors = asyncio.run(both())
    assert (answer, len(errors)) == ("slow", 2)


def test_first_answer_other_errors_are_raised():
    async def broken():
        raise RuntimeError("a defect")

    with pytest.raises(RuntimeError, match="defect"):
        ask(broken, answers)
