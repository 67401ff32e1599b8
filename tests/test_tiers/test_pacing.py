"""What may be sent when; the clocks are ours."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.tiers import pacing
from fastcheck_dask.tiers.pacing import PATIENCE_SECONDS, Pacer, TokenBucket


@given(
    st.lists(st.tuples(st.integers(0, 5000), st.floats(0, 3)), min_size=1, max_size=30),
    st.floats(10, 1e4),
    st.floats(0, 5e3),
)
def test_bucket_any_takes_never_exceed_burst_rate_and_one_piece(
    takes: list[tuple[int, float]], rate: float, burst: float
) -> None:
    clock = FakeClock(100.0)
    bucket = TokenBucket(rate, burst, clock)
    #: When each piece is let through, as if senders waited side by side.
    sent: list[tuple[float, int]] = []
    for nbytes, pause in takes:
        clock.advance(pause)
        sent.append((clock.now() + bucket.take(nbytes), nbytes))
    assert [at for at, _ in sent] == sorted(at for at, _ in sent)
    for first, (began, _) in enumerate(sent):
        total = 0
        for at, nbytes in sent[first:]:
            assert total <= burst + rate * (at - began) + max(n for n, _ in takes) + 1e-6 * (1 + total)
            total += nbytes


def test_bucket_after_silence_gives_the_burst_at_once_and_then_the_rate() -> None:
    clock = FakeClock(100.0)
    bucket = TokenBucket(100.0, 50.0, clock)
    assert [bucket.take(25) for _ in range(4)] == [0.0, 0.0, 0.0, 0.25]
    clock.advance(1000.0)
    assert [bucket.take(25) for _ in range(4)] == [0.0, 0.0, 0.0, 0.25]


def test_bucket_is_used_up_by_what_does_not_wait() -> None:
    clock = FakeClock(100.0)
    bucket = TokenBucket(100.0, 0.0, clock)
    bucket.take(300)
    assert bucket.take(1) == pytest.approx(3.0)


def on_loop(test: Callable[[Pacer], Awaitable[None]], rate: float | None = None) -> None:
    async def main() -> None:
        async with asyncio.timeout(30):
            await test(Pacer(rate))

    asyncio.run(main())


def test_turn_without_limit_or_pause_waits_for_nothing() -> None:
    async def test(pacer: Pacer) -> None:
        turn = pacer.turn()
        for _ in range(1000):
            await turn.wait(2**30)
        assert turn.patience_seconds == PATIENCE_SECONDS

    on_loop(test)


def test_turn_waits_while_busy_and_goes_on_when_it_is_over() -> None:
    async def test(pacer: Pacer) -> None:
        pacer.set_busy(True)
        assert pacer.is_busy
        waiting = asyncio.create_task(pacer.turn().wait(10))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert not waiting.done()
        pacer.set_busy(False)
        await waiting

    on_loop(test)


def test_turn_patience_is_bounded_over_all_pauses_of_a_message(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 0.05)

    async def test(pacer: Pacer) -> None:
        pacer.set_busy(True)
        turn = pacer.turn()
        await turn.wait(10)
        assert turn.patience_seconds <= 0
        # Nothing is left of it: this does not wait.
        await asyncio.wait_for(asyncio.shield(turn.wait(10)), 20)
        assert pacer.is_busy

    on_loop(test)


def test_busy_that_was_forgotten_is_over_by_itself_and_said(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pacing, "FORGOTTEN_SECONDS", 0.02)
    monkeypatch.setattr(pacing, "PATIENCE_SECONDS", 1e6)

    async def test(pacer: Pacer) -> None:
        pacer.set_busy(True)
        await pacer.turn().wait(10)
        assert not pacer.is_busy
        pacer.set_busy(False)

    on_loop(test)
    assert "probably not left" in caplog.text


def test_busy_that_is_left_in_time_is_not_taken_for_forgotten(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def test(pacer: Pacer) -> None:
        for _ in range(5):
            pacer.set_busy(True)
            pacer.set_busy(False)
        assert pacer._forgetting is None

    on_loop(test)
    assert caplog.text == ""


def test_turn_with_a_limit_sleeps_as_long_as_the_bucket_says(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []

    async def sleep(seconds: float) -> None:
        slept.append(seconds)

    async def main() -> None:
        pacer = Pacer(1000.0, clock=FakeClock(100.0))
        monkeypatch.setattr(asyncio, "sleep", sleep)
        pacer.count(50)
        await pacer.turn().wait(1000)
        await pacer.turn().wait(500)
        await pacer.turn().wait(500)

    asyncio.run(main())
    assert slept == [pytest.approx(1.0), pytest.approx(1.5)]
