"""Leases that end, and those that must not."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.leases import read_leases, renew
from fastcheck_dask.errors import FencedError, NodeUnavailableError
from fastcheck_dask.master.lease_sweep import LeaseSweepDuty
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator


class Sweep:
    """One master that sweeps, with one node that it tells."""

    def __init__(self, office: Any) -> None:
        self.coordinator, self.clock, self.told = FakeCoordinator(), FakeClock(), []
        self.coordinator.register(NodeInfo("n0", "fcs://h:1", "r", "h", 1))
        self.leadership = office(self.coordinator.entries)
        self.on_tell: Callable[[], None] = lambda: None
        self.duty = LeaseSweepDuty(self.coordinator, self.tell, clock=self.clock)

    async def tell(self, node: NodeInfo, run: str) -> None:
        self.on_tell()
        self.told.append((node.name, run))

    def round(self, seconds: float = 0.0) -> set[str]:
        """Let time pass, sweep once, and return the runs that have a lease."""
        self.clock.advance(seconds)
        asyncio.run(self.duty.run(self.leadership))
        return set(read_leases(self.coordinator.entries))


@pytest.fixture
def sweep(office: Any) -> Sweep:
    return Sweep(office)


def test_lease_not_renewed_ends_and_nodes_are_told(sweep: Sweep) -> None:
    renew(sweep.coordinator.entries, "old", 10.0)
    renew(sweep.coordinator.entries, "young", 100.0)
    assert sweep.round() == {"old", "young"}
    assert sweep.round(9.0) == {"old", "young"}
    assert sweep.told == []
    assert sweep.round(1.0) == {"young"}
    assert sweep.told == [("n0", "old")]


@pytest.mark.parametrize("state", ["not persisted", "owned", "renewed in the middle"])
def test_lease_that_must_not_end_stays(sweep: Sweep, commit: Any, state: str) -> None:
    record, claim = commit(sweep.coordinator, "run-1")
    if state != "not persisted":
        sweep.coordinator.mark_persisted("run-1", record.generation, record.token)
    if state != "owned":
        claim.close()
    renew(sweep.coordinator.entries, "run-1", 10.0)
    if state == "renewed in the middle":
        sweep.on_tell = lambda: renew(sweep.coordinator.entries, "run-1", 10.0)
    sweep.round()
    assert sweep.round(1000.0) == {"run-1"}
    assert bool(sweep.told) is (state == "renewed in the middle")


def test_lease_of_persisted_run_without_owner_ends(sweep: Sweep, commit: Any) -> None:
    record, claim = commit(sweep.coordinator, "run-1")
    claim.close()
    renew(sweep.coordinator.entries, "run-1", 10.0)
    sweep.round()
    assert sweep.round(20.0) == {"run-1"}
    sweep.coordinator.mark_persisted("run-1", record.generation, record.token)
    assert sweep.round() == set()


def test_lease_next_master_ends_it_after_one_more_term(sweep: Sweep, office: Any) -> None:
    renew(sweep.coordinator.entries, "run-1", 10.0)
    sweep.round()
    sweep.clock.advance(9.0)
    sweep.leadership.depose()
    sweep.leadership.pretend()
    with pytest.raises(FencedError):
        sweep.round(1.0)
    sweep.leadership = office(sweep.coordinator.entries)
    sweep.duty = LeaseSweepDuty(sweep.coordinator, sweep.tell, clock=sweep.clock)
    assert sweep.round() == {"run-1"}
    assert sweep.round(9.9) == {"run-1"}
    assert sweep.round(0.1) == set()


def test_lease_master_not_in_force_ends_nothing(sweep: Sweep) -> None:
    renew(sweep.coordinator.entries, "run-1", 10.0)
    sweep.round()
    sweep.leadership.depose()
    assert sweep.round(10.0) == {"run-1"}
    assert sweep.told == []


def test_lease_node_away_ends_all_the_same_and_a_defect_is_raised(sweep: Sweep) -> None:
    renew(sweep.coordinator.entries, "run-1", 10.0)
    sweep.round()

    def away() -> None:
        raise NodeUnavailableError("n0", "is down")

    def defect() -> None:
        raise KeyError("defect")

    sweep.on_tell = defect
    with pytest.raises(KeyError):
        sweep.round(10.0)
    sweep.on_tell = away
    assert sweep.round() == set()
