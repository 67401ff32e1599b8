"""Why the object tier does not have what it is to have."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.delays import DELAYS, Delay, forget_delay, note_delay, read_delays
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.errors import CoordinationError, UnknownFormatError
from fastcheck_dask.testing.entries import MemoryEntries, SharedEntries


@pytest.fixture
def entries() -> MemoryEntries:
    return SharedEntries().session()


@given(st.builds(Delay, st.integers(), st.text(), st.floats(allow_nan=False), st.text()))
def test_delay_round_trip(delay: Delay) -> None:
    assert Delay.from_bytes(delay.to_bytes()) == delay


@given(st.binary())
def test_delay_unreadable_raises(data: bytes) -> None:
    with pytest.raises(UnknownFormatError):
        Delay.from_bytes(data)


def test_note_again_keeps_since_when_and_the_same_writes_nothing(entries: MemoryEntries) -> None:
    note_delay(entries, "run-1", 3, "s3", "full", now_unix=5.0)
    note_delay(entries, "run-1", 3, "s3", "full", now_unix=6.0)
    note_delay(entries, "run-2", 1, "s1", "x" * 9000, now_unix=7.0)
    assert read_delays(entries, "run-1", "run-2", "run-3") == (
        Delay(3, "s3", 5.0, "full"),
        Delay(1, "s1", 7.0, "x" * 500),
        None,
    )
    found = entries.get(f"{DELAYS}/run-1")
    assert found is not None
    assert found.version == 0
    note_delay(entries, "run-1", 4, "s4", "away", now_unix=8.0)
    assert read_delays(entries, "run-1") == (Delay(4, "s4", 5.0, "away"),)


def test_forget_is_idempotent_and_what_comes_then_is_of_its_own_time(entries: MemoryEntries) -> None:
    note_delay(entries, "run-1", 3, "s3", "full", now_unix=5.0)
    forget_delay(entries, "run-1")
    forget_delay(entries, "run-1")
    assert read_delays(entries, "run-1") == (None,)
    note_delay(entries, "run-1", 4, "s4", "full", now_unix=9.0)
    assert read_delays(entries, "run-1") == (Delay(4, "s4", 9.0, "full"),)


def test_unreadable_is_left_out_and_replaced(entries: MemoryEntries) -> None:
    entries.apply(Create(f"{DELAYS}/run-1", b"?"))
    assert read_delays(entries, "run-1") == (None,)
    note_delay(entries, "run-1", 4, "s4", "full", now_unix=9.0)
    assert read_delays(entries, "run-1") == (Delay(4, "s4", 9.0, "full"),)


def test_coordinator_away_raises(entries: MemoryEntries) -> None:
    entries.unreachable = True
    with pytest.raises(CoordinationError):
        note_delay(entries, "run-1", 3, "s3", "full", now_unix=5.0)
