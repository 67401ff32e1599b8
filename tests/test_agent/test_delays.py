"""An agent tells why it cannot persist, and that it is over, and waits for nobody."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastcheck_dask.agent.delays import Delays
from fastcheck_dask.coordination.delays import note_delay, read_delays
from fastcheck_dask.errors import TierError
from fastcheck_dask.testing.fakes import FakeCoordinator


@pytest.fixture
def coordinator() -> FakeCoordinator:
    return FakeCoordinator()


def saved(generation: int) -> Any:
    return SimpleNamespace(record=SimpleNamespace(generation=generation, tag=f"s{generation}"))


def told(coordinator: FakeCoordinator) -> list[tuple[int, str, str]]:
    found = read_delays(coordinator.entries, "run-1")
    return [(delay.generation, delay.tag, delay.reason) for delay in found if delay is not None]


def test_failures_are_told_until_it_is_over(coordinator: FakeCoordinator) -> None:
    delays = Delays(coordinator, "run-1")
    asyncio.run(delays.failed(saved(3), TierError("away")))
    asyncio.run(delays.failed(saved(4), TierError("full")))
    assert told(coordinator) == [(4, "s4", "full")]
    asyncio.run(delays.over())
    assert told(coordinator) == []


def test_what_an_agent_before_told_is_over_with_the_first_success(coordinator: FakeCoordinator) -> None:
    note_delay(coordinator.entries, "run-1", 3, "s3", "away", now_unix=1.0)
    asyncio.run(Delays(coordinator, "run-1").over())
    assert told(coordinator) == []


def test_coordinator_away_is_not_asked_and_told_later_that_it_is_over(coordinator: FakeCoordinator) -> None:
    delays = Delays(coordinator, "run-1")
    asyncio.run(delays.failed(saved(3), TierError("away")))
    coordinator.unreachable = True
    asyncio.run(delays.over())
    asyncio.run(delays.failed(saved(4), TierError("full")))
    coordinator.unreachable = False
    assert told(coordinator) == [(3, "s3", "away")]
    asyncio.run(delays.over())
    assert told(coordinator) == []
