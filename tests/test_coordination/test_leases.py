"""Leases: what a master concludes from versions and its own clock alone."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.entries import Delete, Entry, EntryConflictError
from fastcheck_dask.coordination.leases import (
    DEFAULT_LEASE_SECONDS,
    RENEWALS_PER_LEASE,
    LeaseRenewer,
    LeaseTerms,
    LeaseWatch,
    lease_path,
    read_leases,
    renew,
)
from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.entries import MemoryEntries, SharedEntries


@pytest.fixture
def entries() -> MemoryEntries:
    return SharedEntries().session()


def test_renew_writes_terms_and_counts_up(entries: MemoryEntries) -> None:
    renew(entries, "run-1", 60.0)
    renew(entries, "run-1", 90.0)
    found = entries.get(lease_path("run-1"))
    assert found is not None
    assert (LeaseTerms.from_bytes(found.value).seconds, found.version) == (90.0, 1)


def test_renew_outlives_the_session_of_the_owner(entries: MemoryEntries) -> None:
    renew(entries, "run-1", 60.0)
    entries.expire()
    assert set(read_leases(entries)) == {"run-1"}


@pytest.mark.parametrize("done", [False, True])
def test_renew_answer_lost_is_no_error(entries: MemoryEntries, done: bool) -> None:
    renew(entries, "run-1", 60.0)
    entries.lose_reply(done=done)
    renew(entries, "run-1", 60.0)


def test_renew_coordinator_away_raises(entries: MemoryEntries) -> None:
    entries.unreachable = True
    with pytest.raises(CoordinationError):
        renew(entries, "run-1", 60.0)


def test_renew_bad_name_is_refused(entries: MemoryEntries) -> None:
    with pytest.raises(ConfigError):
        renew(entries, "../run", 60.0)


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"seconds": -1}', b'{"seconds": "x"}', b"\xff"])
def test_terms_unreadable_count_as_default(data: bytes) -> None:
    assert LeaseTerms.from_bytes(data).seconds == DEFAULT_LEASE_SECONDS


def test_watch_lease_not_renewed_ends_after_its_terms(entries: MemoryEntries) -> None:
    clock = FakeClock()
    watch = LeaseWatch(clock)
    renew(entries, "short", 10.0)
    renew(entries, "long", 100.0)
    assert not watch.ended(lambda: read_leases(entries))
    clock.advance(9.9)
    assert not watch.ended(lambda: read_leases(entries))
    clock.advance(0.1)
    assert set(watch.ended(lambda: read_leases(entries))) == {"short"}


def test_watch_new_master_counts_anew(entries: MemoryEntries) -> None:
    clock = FakeClock()
    renew(entries, "run-1", 10.0)
    LeaseWatch(clock).ended(lambda: read_leases(entries))
    clock.advance(20.0)
    assert not LeaseWatch(clock).ended(lambda: read_leases(entries))


def test_watch_master_stopped_while_it_reads_ends_nothing_that_was_renewed(entries: MemoryEntries) -> None:
    clock = FakeClock()
    watch = LeaseWatch(clock)
    renew(entries, "run-1", 10.0)
    watch.ended(lambda: read_leases(entries))

    def stopped_after_read() -> dict[str, Entry]:
        found = read_leases(entries)
        clock.advance(1000.0)
        return found

    clock.advance(5.0)
    assert not watch.ended(stopped_after_read)


def test_watch_slow_read_counts_from_its_end(entries: MemoryEntries) -> None:
    clock = FakeClock()
    watch = LeaseWatch(clock)
    renew(entries, "run-1", 10.0)

    def slow() -> dict[str, Entry]:
        clock.advance(100.0)
        return read_leases(entries)

    assert not watch.ended(slow)
    clock.advance(5.0)
    assert not watch.ended(lambda: read_leases(entries))
    clock.advance(5.0)
    assert watch.ended(lambda: read_leases(entries)).keys() == {"run-1"}


def test_ended_lease_renewed_meanwhile_cannot_be_deleted(entries: MemoryEntries) -> None:
    clock = FakeClock()
    watch = LeaseWatch(clock)
    renew(entries, "run-1", 10.0)
    watch.ended(lambda: read_leases(entries))
    clock.advance(10.0)
    ended = watch.ended(lambda: read_leases(entries))["run-1"]
    renew(entries, "run-1", 10.0)
    with pytest.raises(EntryConflictError):
        entries.apply(Delete(lease_path("run-1"), ended.version))


@given(
    steps=st.lists(st.tuples(st.sampled_from(["renew", "look"]), st.floats(0.0, 30.0)), max_size=40),
    seconds=st.floats(1.0, 50.0),
)
def test_watch_never_ends_a_lease_early(steps: list[tuple[str, float]], seconds: float) -> None:
    clock, entries = FakeClock(), SharedEntries().session()
    watch, renewed_at = LeaseWatch(clock), clock.now()
    renew(entries, "run-1", seconds)
    for step, pause in steps:
        clock.advance(pause)
        if step == "renew":
            renew(entries, "run-1", seconds)
            renewed_at = clock.now()
        elif watch.ended(lambda: read_leases(entries)):
            assert clock.now() - renewed_at >= seconds


def test_renewer_renews_when_due_and_after_a_failure() -> None:
    clock, calls, away = FakeClock(), [], [True]

    def write() -> None:
        calls.append(clock.now())
        if away[0]:
            raise CoordinationError("the coordinator did not answer")

    renewer = LeaseRenewer(write, 40.0, clock)
    renewer.tick()
    assert renewer.due
    away[0] = False
    renewer.tick()
    renewer.tick()
    assert len(calls) == 2
    clock.advance(40.0 / RENEWALS_PER_LEASE)
    renewer.tick()
    assert len(calls) == 3
