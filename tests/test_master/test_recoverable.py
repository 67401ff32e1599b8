"""What the master says could be recovered, against a count of every chunk."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.recoverable import (
    Drill,
    Recoverable,
    drill_path,
    read_recoverable,
    recoverable_path,
)
from fastcheck_dask.errors import UnknownFormatError
from fastcheck_dask.layout.stripes import Layout, assign
from fastcheck_dask.master.recoverable import RecoverableDuty, recoverable
from fastcheck_dask.master.survey import ShardState
from fastcheck_dask.testing.fakes import FakeCoordinator

NAMES = ("n0", "n1", "n2")
SIZES = {f"k{number}": 10 for number in range(5)}
LAYOUT = assign(SIZES, shards=2)
RECORD = CommitRecord("run", 5, "tag", "token", "ab" * 32, NAMES, ("a",) * 3, 2, True, 9, 1.0)


#: One record and layout for each number of parity shards.
SAVED = [
    (RECORD, LAYOUT),
    (
        replace(RECORD, nodes=(*NAMES, "n3"), addresses=("a",) * 4, parity=2),
        assign(SIZES, shards=2, parity=2),
    ),
]


def states(conditions: Any) -> list[ShardState]:
    """Return shards that are gone, silent, or lack some keys."""
    return [
        ShardState(number, f"n{number}", found)
        if isinstance(found, str)
        else ShardState(number, f"n{number}", "damaged" if found else "whole", len(found), tuple(found))
        for number, found in enumerate(conditions)
    ]


@st.composite
def conditions(draw: st.DrawFn, layout: Layout) -> list[Any]:
    shards = range(layout.nodes_wanted)
    keys = [st.sets(st.sampled_from(layout.keys_of(shard)), max_size=2) for shard in shards]
    return [draw(st.one_of(st.sampled_from(["gone", "silent", "leaving"]), of)) for of in keys]


def had(layout: Layout, found: list[Any], lost: int | None) -> bool:
    """Say whether no stripe has more chunks missing than parity chunks."""
    missing = {
        key
        for shard, how in enumerate(found)
        for key in layout.keys_of(shard)
        if shard == lost or how in ("gone", "silent") or (not isinstance(how, str) and key in how)
    }
    members = [{*filter(None, s.members), *s.parity_keys(layout.parity)} for s in layout.stripes]
    return all(len(stripe & missing) <= layout.parity for stripe in members)


@given(st.sampled_from(SAVED), st.data(), st.booleans())
def test_recoverable_is_what_counting_chunks_says(saved: Any, data: st.DataObject, persisted: bool) -> None:
    record, layout = saved
    found = data.draw(conditions(layout))
    record = record.as_persisted() if persisted else record
    said = recoverable(record, states(found), layout)
    assert said.source == ("peers" if had(layout, found, None) else "object" if persisted else "nowhere")
    names = record.nodes
    assert said.may_die == [
        name for n, name in enumerate(names) if found[n] != "gone" and had(layout, found, n)
    ]
    cautious = recoverable(record, states(found))
    assert set(cautious.may_die) <= set(said.may_die)
    assert Recoverable.from_bytes(said.to_bytes()) == said


def test_without_parity_nothing_may_be_lost() -> None:
    record = CommitRecord("run", 5, "tag", "t", "ab" * 32, NAMES[:1], ("a",), 1, False, 9, 1.0)
    said = recoverable(record, states([set()]))
    assert (said.source, said.may_die) == ("peers", [])


def test_documents_that_cannot_be_read_say_so() -> None:
    for data in (b"", b"{}", b"[]", b"\xff"):
        with pytest.raises(UnknownFormatError):
            Drill.from_bytes(data)


class Client:
    """A node that holds generation 1 of a run, or does not."""

    held: tuple[str, ...] = ()

    def __init__(self, name: str, _address: str) -> None:
        self._name = name

    async def status(self) -> dict[str, Any]:
        run = {"staged": [], "pins": [], "ring": [], "bytes": 1, "damaged": [], "committed": [1, "token"]}
        runs = {"run": run} if self._name in self.held else {}
        return {"limit_bytes": 99, "used_bytes": 1, "reserved_bytes": 0, "runs": runs}

    async def close(self) -> None:
        """Nothing is open."""


def test_published_when_it_changes_and_only_then(
    office: Any, commit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator = FakeCoordinator()
    for name in NAMES:
        coordinator.register(NodeInfo(name, "a", name, name, 99))
    commit(coordinator, "run", nodes=NAMES, addresses=("a",) * 3, shards=2, parity=True)
    leadership = office(coordinator.entries)
    duty = RecoverableDuty(coordinator, Client)
    versions = []
    for held in (NAMES, NAMES, NAMES, NAMES[1:], NAMES[1:], NAMES[2:], ()):
        monkeypatch.setattr(Client, "held", held)
        asyncio.run(duty.run(leadership))
        entry = coordinator.entries.get(recoverable_path("run"))
        versions.append(None if entry is None else entry.version)
    assert versions == [None, 0, 0, 1, 1, 2, 3]
    now, drill = read_recoverable(coordinator.entries, "run")
    assert drill is None
    assert now is not None
    assert (now.source, now.may_die, set(now.nodes.values())) == ("nowhere", [], {"gone"})


def test_drill_alone_is_read(office: Any) -> None:
    coordinator = FakeCoordinator()
    drill = Drill(1, "t", "n0", passed=True, why="", raw_bytes=3, seconds=0.5, finished_unix=1.5)
    coordinator.entries.apply(Create(drill_path("run"), drill.to_bytes()))
    assert read_recoverable(coordinator.entries, "run") == (None, drill)
