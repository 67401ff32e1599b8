"""What a run left unpersisted is persisted by the master, with real nodes."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.delays import read_delays
from fastcheck_dask.coordination.runs import RunDescription, describe
from fastcheck_dask.errors import TierError
from fastcheck_dask.master import persisting
from fastcheck_dask.master.persisting import PersistDuty, left_over
from fastcheck_dask.testing.fakes import FakeCoordinator

RECORD = CommitRecord("run-1", 3, "t", "token", "ab" * 32, ("n0",), ("fcs://h:1",), 1, False, 1, 1.0)


@pytest.mark.parametrize(
    ("description", "latest", "owner", "wanted"),
    [
        (RunDescription("/x", 1), RECORD, None, RECORD),
        (RunDescription("/x", 7), RECORD, None, RECORD),
        (RunDescription("/x", 0), RECORD, None, None),
        (RunDescription("/x", 1), RECORD, "trainer", None),
        (RunDescription("/x", 1), RECORD.as_persisted(), None, None),
        (RunDescription("/x", 1), None, None, None),
    ],
)
def test_left_over(description, latest, owner, wanted):
    assert left_over(description, latest, owner) == wanted


def test_why_it_fails_is_told_until_it_does_not(monkeypatch):
    coordinator, outcomes = FakeCoordinator(), [TierError("the bucket is gone"), None]
    describe(coordinator.entries, "run-1", RunDescription("/x", 1))
    claim = coordinator.claim("run-1", "trainer")
    coordinator.commit(RECORD, claim)
    claim.close()

    async def persist(*_: Any) -> None:
        if (error := outcomes.pop(0)) is not None:
            raise error

    monkeypatch.setattr(persisting, "persist_from_nodes", persist)
    duty, leadership = PersistDuty(coordinator, None), SimpleNamespace(in_force=True)
    with pytest.raises(TierError, match="the bucket is gone"):
        asyncio.run(duty.run(leadership))
    (delay,) = read_delays(coordinator.entries, "run-1")
    assert (delay.generation, delay.tag, delay.reason) == (3, "t", "the bucket is gone")
    asyncio.run(duty.run(leadership))
    assert read_delays(coordinator.entries, "run-1") == (None,)
