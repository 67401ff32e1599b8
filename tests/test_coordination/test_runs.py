"""Descriptions of runs."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.runs import DESCRIPTIONS, RunDescription, describe, described_runs
from fastcheck_dask.errors import ConfigError, CoordinationError, UnknownFormatError
from fastcheck_dask.testing.entries import MemoryEntries, SharedEntries


@pytest.fixture
def entries() -> MemoryEntries:
    return SharedEntries().session()


@given(
    st.builds(
        RunDescription, location=st.text(), persist_every=st.integers(), keep=st.text(), groups=st.text()
    )
)
def test_description_round_trip(description: RunDescription) -> None:
    assert RunDescription.from_bytes(description.to_bytes()) == description


def test_description_of_an_older_version_is_read() -> None:
    assert RunDescription.from_bytes(b'{"location":"/a","persist_every":1}') == RunDescription("/a", 1)
    with pytest.raises(UnknownFormatError):
        RunDescription.from_bytes(b'{"location":"/a","persist_every":1,"groups":[]}')


@pytest.mark.parametrize("data", [b"", b"1", b"{}", b'{"location": 1, "persist_every": 1}', b"\xff"])
def test_description_unreadable_raises(data: bytes) -> None:
    with pytest.raises(UnknownFormatError):
        RunDescription.from_bytes(data)


def test_describe_again_replaces_and_the_same_writes_nothing(entries: MemoryEntries) -> None:
    describe(entries, "run-1", RunDescription("/a", 1))
    describe(entries, "run-1", RunDescription("/b", 2))
    describe(entries, "run-1", RunDescription("/b", 2))
    assert described_runs(entries) == {"run-1": RunDescription("/b", 2)}
    found = entries.get(f"{DESCRIPTIONS}/run-1")
    assert found is not None
    assert found.version == 1


@pytest.mark.parametrize("done", [False, True])
@pytest.mark.parametrize("known", [False, True])
def test_describe_answer_lost_is_found_out(entries: MemoryEntries, done: bool, known: bool) -> None:
    if known:
        describe(entries, "run-1", RunDescription("/a", 1))
    entries.lose_reply(done=done)
    describe(entries, "run-1", RunDescription("/b", 2))
    assert described_runs(entries) == {"run-1": RunDescription("/b", 2)}


def test_described_runs_leaves_out_what_cannot_be_read(entries: MemoryEntries) -> None:
    describe(entries, "run-1", RunDescription("/a", 1))
    entries.apply(Create(f"{DESCRIPTIONS}/run-2", b"{}"))
    assert set(described_runs(entries)) == {"run-1"}


def test_describe_bad_name_or_no_coordinator_raises(entries: MemoryEntries) -> None:
    with pytest.raises(ConfigError):
        describe(entries, "a/b", RunDescription("/a", 1))
    entries.unreachable = True
    with pytest.raises(CoordinationError):
        describe(entries, "run-1", RunDescription("/a", 1))
