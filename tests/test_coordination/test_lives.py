"""Lives of nodes: what is remembered of them, and what is concluded."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.lives import (
    ENDS_KEPT,
    End,
    Here,
    Life,
    begin,
    end,
    judge,
    life_path,
    oom_kills,
    read_lives,
)
from fastcheck_dask.coordination.memory_group import MemoryGroup
from fastcheck_dask.errors import CoordinationError, UnknownFormatError
from fastcheck_dask.testing.entries import MemoryEntries, SharedEntries

HERE = Here("h", "boot-1", 5)
LIFE = Life("n0", "fcs://h:1", "h", "r", 100.0, 7, "boot-1", 5)


@pytest.fixture
def entries() -> MemoryEntries:
    return SharedEntries().session()


def stored(entries: MemoryEntries) -> Life:
    return read_lives(entries)["n0"][0]


@given(
    st.builds(
        Life,
        *[st.text(max_size=9)] * 4,
        st.floats(0, 1e12),
        st.integers(0),
        st.text(max_size=9),
        st.none() | st.integers(0),
        st.lists(
            st.builds(End, st.floats(0, 1e12), st.just("killed"), st.text(max_size=9), st.floats(0, 1e12)),
            max_size=ENDS_KEPT,
        ).map(tuple),
        st.none() | st.builds(MemoryGroup, st.text(max_size=9), st.integers(0), st.integers(0)),
    )
)
def test_life_survives_its_bytes(life: Life) -> None:
    assert Life.from_bytes(life.to_bytes()) == life


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        replace(LIFE, pid="7").to_bytes(),
        replace(LIFE, host=None).to_bytes(),
        replace(LIFE, group=MemoryGroup("/g", "2", 3)).to_bytes(),
        LIFE.ended(End(1.0, "bored", "", 100.0)).to_bytes(),
        LIFE.ended(End("now", "killed", "", 100.0)).to_bytes(),
    ],
)
def test_what_is_no_life_is_refused(data: bytes) -> None:
    with pytest.raises(UnknownFormatError):
        Life.from_bytes(data)


def test_entry_that_cannot_be_read_is_left_out_and_replaced_by_the_next_start(entries: MemoryEntries) -> None:
    entries.apply(Create(life_path("n0"), b"\xff"))
    assert read_lives(entries) == {}
    begin(entries, LIFE, now=100.0, here=HERE)
    assert stored(entries) == LIFE


def test_start_and_end_are_one_write_each(entries: MemoryEntries) -> None:
    begin(entries, LIFE, now=100.0, here=HERE)
    last = End(200.0, "ended", "SIGTERM", 100.0)
    end(entries, LIFE, last)
    end(entries, LIFE, last)
    life, entry = read_lives(entries)["n0"]
    assert (life.end, entry.version) == (last, 1)


def test_start_after_a_life_without_end_tells_that_it_was_killed(entries: MemoryEntries) -> None:
    begin(entries, LIFE, now=100.0, here=HERE)
    begin(entries, replace(LIFE, started_unix=300.0, pid=8), now=300.0, here=HERE)
    found = stored(entries)
    assert found.end is None
    (killed,) = found.ends
    assert (killed.cause, killed.unix, killed.started_unix) == ("killed", 300.0, 100.0)


def test_end_that_the_master_supposed_gives_way_to_what_the_node_says(entries: MemoryEntries) -> None:
    begin(entries, LIFE.ended(End(150.0, "silent", "?", 100.0)), now=100.0, here=HERE)
    end(entries, LIFE, End(200.0, "ended", "SIGTERM", 100.0))
    assert [one.cause for one in stored(entries).ends] == ["ended"]


def test_end_of_a_process_whose_name_another_took_is_not_noted(entries: MemoryEntries) -> None:
    begin(entries, LIFE, now=100.0, here=HERE)
    begin(entries, replace(LIFE, started_unix=300.0, pid=8), now=300.0, here=HERE)
    end(entries, LIFE, End(400.0, "ended", "SIGTERM", 100.0))
    assert stored(entries).end is None


def test_only_the_last_ends_are_remembered(entries: MemoryEntries) -> None:
    for number in range(ENDS_KEPT + 3):
        begin(entries, replace(LIFE, started_unix=float(number)), now=float(number), here=HERE)
    assert [one.started_unix for one in stored(entries).ends] == [float(2 + i) for i in range(ENDS_KEPT)]


@pytest.mark.parametrize("done", [False, True])
def test_answer_lost_writes_once(entries: MemoryEntries, done: bool) -> None:
    entries.lose_reply(done=done)
    begin(entries, LIFE, now=100.0, here=HERE)
    begin_again, entry = read_lives(entries)["n0"]
    assert (begin_again, entry.version) == (LIFE, 0)


def test_coordinator_away_raises(entries: MemoryEntries) -> None:
    entries.unreachable = True
    with pytest.raises(CoordinationError):
        begin(entries, LIFE, now=100.0, here=HERE)


@pytest.mark.parametrize(
    ("here", "finding", "cause", "says"),
    [
        (HERE, "refused", "killed", "not for want of memory"),
        (replace(HERE, oom_kills=7), "refused", "memory", "ended 2 for want of memory"),
        (replace(HERE, oom_kills=None), "refused", "killed", "out of memory, or"),
        (HERE, "silent", "silent", "stopped"),
        (HERE, None, "killed", "SIGKILL"),
        (replace(HERE, boot="boot-2"), None, "host", "started anew"),
        (Here("g", "boot-9", 0), None, "killed", "is there"),
        (Here("g", "boot-9", 0), "refused", "killed", "(h) is there"),
        (Here("g", "boot-9", 0), "unreachable", "host", "lost, or cut off"),
        (Here("g", "boot-9", 0), "silent", "silent", "stuck"),
        (Here("h", "", None), "refused", "killed", "is there"),
    ],
)
def test_judge(here: Here, finding: str | None, cause: str, says: str) -> None:
    found, why = judge(LIFE, finding, here)
    assert (found, says in why) == (cause, True), why


GROUP = MemoryGroup("/sys/fs/cgroup/nodes", 77, 3)


@pytest.mark.parametrize(
    ("was", "group", "machine", "cause", "says"),
    [
        (
            GROUP,
            replace(GROUP, oom_kills=4),
            6,
            "memory",
            "ended a process of its cgroup (/sys/fs/cgroup/nodes)",
        ),
        (GROUP, replace(GROUP, oom_kills=5), 5, "memory", "ended 2 processes of its cgroup"),
        # Another process of the machine was, not this one.
        (GROUP, GROUP, 9, "killed", "not for want of memory"),
        # It has gone with its cgroup, or another one has that place now: what the machine counts is left.
        (GROUP, None, 6, "memory", "since it started the kernel ended 1"),
        (GROUP, replace(GROUP, inode=78, oom_kills=9), 5, "killed", "not for want of memory"),
        (None, GROUP, 6, "memory", "since it started the kernel ended 1"),
    ],
)
def test_judge_by_the_cgroup(was: Any, group: Any, machine: int, cause: str, says: str) -> None:
    found, why = judge(replace(LIFE, group=was), "refused", replace(HERE, oom_kills=machine, group=group))
    assert (found, says in why) == (cause, True), why


def test_life_that_an_older_version_wrote_has_no_cgroup() -> None:
    document = json.loads(LIFE.to_bytes())
    del document["group"]
    assert Life.from_bytes(json.dumps(document).encode()) == LIFE


def test_for_judging_another_machine_looks_at_no_cgroup(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MemoryGroup, "now", lambda group: group)
    boot = Here.of_this_machine("h").boot
    assert Here.for_judging(replace(LIFE, group=GROUP)).group is None
    assert Here.for_judging(replace(LIFE, group=GROUP, boot=boot)).group == GROUP


def test_here_is_this_machine() -> None:
    here = Here.of_this_machine("h")
    assert here.boot
    assert here.oom_kills == oom_kills()
    assert here.oom_kills is None or here.oom_kills >= 0
