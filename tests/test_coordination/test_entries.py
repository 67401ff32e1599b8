"""What the entries of every coordinator do; the same tests for each."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
import threading
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcheck_dask.coordination import sqlite_file
from fastcheck_dask.coordination.entries import (
    Check,
    Create,
    Delete,
    Entry,
    EntryConflictError,
    OutcomeUnknownError,
    Write,
)
from fastcheck_dask.coordination.zookeeper import client
from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.testing.fakes import FakeCoordinator

#: For what needs other processes.
real = pytest.mark.parametrize(
    "kind", ["embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)], indirect=True
)


@pytest.fixture
def lose_answer(kind, entries, monkeypatch):
    """Have the next change's answer get lost, after it took effect if `done`."""

    def memory(done):
        entries.lose_reply(done=done)

    def embedded(done):
        class Connection(sqlite3.Connection):
            def execute(self, statement, *values):
                if statement != "COMMIT":
                    return super().execute(statement, *values)
                monkeypatch.undo()
                if done:
                    super().execute(statement)
                raise sqlite3.OperationalError("disk I/O error")

        connect = sqlite3.connect
        monkeypatch.setattr(
            sqlite_file.sqlite3, "connect", lambda *args, **kw: connect(*args, **kw, factory=Connection)
        )

    def zookeeper(done):
        whole = client.Session.attempt

        def attempt(session, what, call, *, deadline):
            monkeypatch.undo()
            if done:
                whole(session, what, call, deadline=deadline)
            raise client.ReplyLostError(what)

        monkeypatch.setattr(client.Session, "attempt", attempt)

    return {"memory": memory, "embedded": embedded, "zookeeper": zookeeper}[kind]


# Values, versions and names


def test_get_nothing_there_is_none(entries):
    assert entries.get("a/b") is None
    assert entries.get("a/b", fresh=False) is None
    assert entries.names("a") == ()
    assert entries.get_many() == []


def test_apply_create_write_versions_grow_and_others_see_them(entries, others):
    entries.apply(Create("a/b", b"one"))
    assert others.get("a/b") == Entry(b"one", 0)
    entries.apply(Write("a/b", b"two", 0))
    others.apply(Write("a/b", b"", None))
    assert entries.get("a/b") == others.get("a/b") == Entry(b"", 2)
    assert entries.get("a/b", fresh=False).version >= 1


def test_apply_entry_made_again_begins_anew(entries):
    entries.apply(Create("a", b"x"), Write("a", b"y", 0))
    entries.apply(Delete("a", 1), Create("a", b"z"))
    assert entries.get("a") == Entry(b"z", 0)


def test_apply_one_entry_many_times_at_once_counts_each(entries):
    entries.apply(
        Create("a", b""), Write("a", b"1", 0), Check("a", 1), Write("a", b"2", None), Create("a/b", b"3")
    )
    assert entries.get_many("a/b", "none", "a") == [Entry(b"3", 0), None, Entry(b"2", 2)]


def test_names_come_sorted_and_are_those_directly_under(entries, others):
    entries.apply(*(Create(f"a/{name}", b"") for name in ("n10", "n9", "b=+._-")), Create("ab", b""))
    entries.apply(Create("a/deep/er/still", b""))
    assert others.names("a") == ("b=+._-", "deep", "n10", "n9")
    assert others.names("a/deep") == ("er",)
    assert others.names("a/n9") == ()


def test_apply_nothing_does_nothing(entries):
    entries.apply()


@pytest.mark.parametrize("path", ["", "/a", "a/", "a//b", "a/../b", "a b", "a/\0", ".", "a/" + "x" * 129])
def test_path_that_is_none_is_refused(entries, path):
    for call in (
        lambda: entries.get(path),
        lambda: entries.get_many("a", path),
        lambda: entries.names(path),
        lambda: entries.watch(path),
        lambda: entries.apply(Create("a", b""), Create(path, b"")),
    ):
        with pytest.raises(ConfigError):
            call()
    assert entries.get("a") is None


# All or nothing


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (Create("there", b""), "exists"),
        (Check("none", 0), "there is none"),
        (Write("none", b"", 0), "there is none"),
        (Write("none", b"", None), "there is none"),
        (Delete("none", None), "there is none"),
        (Check("there", 0), "version"),
        (Write("there", b"", 2), "version"),
        (Delete("there", 0), "version"),
        (Delete("parent", 0), "under it"),
        (Delete("parent", None), "under it"),
        (Create("short/lived", b""), "ephemeral"),
        (Create("short/a/b", b""), "ephemeral"),
    ],
)
def test_apply_one_refused_all_are_and_the_error_says_which(entries, others, change, why):
    entries.apply(Create("there", b""), Write("there", b"x", 0), Create("parent/child", b""))
    entries.apply(Create("short", b"", ephemeral=True), Create("value", b""), Create("gone", b""))
    with pytest.raises(EntryConflictError, match=why) as caught:
        entries.apply(Create("new", b""), Write("value", b"y", 0), Delete("gone", 0), change)
    assert caught.value.path == change.path
    assert not caught.value.retryable
    assert others.get_many("new", "value", "gone", "there") == [
        None,
        Entry(b"", 0),
        Entry(b"", 0),
        Entry(b"x", 1),
    ]
    assert others.names("parent") == ("child",)
    assert others.names("short") == ()


def test_apply_delete_of_parent_after_its_last_child_works(entries):
    entries.apply(Create("a/b/c", b""))
    entries.apply(Delete("a/b/c", 0), Delete("a/b", 0))
    assert entries.names("a") == ()
    assert entries.get("a") == Entry(b"", 0)
    entries.apply(Delete("a", None))
    assert entries.get("a") is None


def test_apply_parents_are_made_and_can_be_made_in_the_same_changes(entries):
    entries.apply(Create("a/b", b"parent"), Create("a/b/c", b"child"), Create("a/b/d/e", b""))
    assert entries.get_many("a", "a/b", "a/b/d") == [Entry(b"", 0), Entry(b"parent", 0), Entry(b"", 0)]
    with pytest.raises(EntryConflictError, match="exists"):
        entries.apply(Create("x/y", b""), Create("x", b""))
    with pytest.raises(EntryConflictError, match="deleted by the same"):
        entries.apply(Delete("a/b/c", None), Create("a/b/c/d", b""))


def test_apply_five_hundred_changes_work_and_too_many_are_refused(entries, others):
    entries.apply(*(Create(f"many/n{number}", b"x" * 1000) for number in range(500)))
    assert len(others.names("many")) == 500
    assert others.get_many(*(f"many/n{number}" for number in range(500))) == [Entry(b"x" * 1000, 0)] * 500
    entries.apply(*(Create(f"more/n{number}", b"x" * 850) for number in range(1000)))
    with pytest.raises(CoordinationError, match="1001 changes"):
        entries.apply(*(Check("many", 0) for _ in range(1001)))


def test_apply_too_large_is_refused_with_its_size(entries):
    with pytest.raises(CoordinationError, match="entry a takes 900,001 bytes"):
        entries.apply(Create("a", b"x" * 900_001))
    with pytest.raises(CoordinationError, match=r"entry a on take 1,000,002 bytes"):
        entries.apply(Create("a", b"x" * 500_000), Create("b", b"x" * 500_000))
    assert entries.get_many("a", "b") == [None, None]
    entries.apply(Create("a", b"x" * 899_999))
    assert len(entries.get("a").value) == 899_999


@pytest.mark.parametrize("done", [True, False])
def test_apply_answer_lost_outcome_is_open(entries, lose_answer, done):
    entries.apply(Create("a", b""))
    lose_answer(done)
    with pytest.raises(OutcomeUnknownError):
        entries.apply(Write("a", b"x", 0), Create("a/b", b""))
    assert entries.get("a") == (Entry(b"x", 1) if done else Entry(b"", 0))
    assert entries.names("a") == (("b",) if done else ())
    entries.apply(Write("a", b"y", None))


# Any changes


_PATHS = st.sampled_from(["a", "a/b", "a/b/c", "a/d", "e/f", "g"])
_VERSIONS = st.sampled_from([None, 0, 1, 2])
_CHANGES = st.one_of(
    st.builds(Create, _PATHS, st.just(b"c"), st.booleans()),
    st.builds(Write, _PATHS, st.just(b"w"), _VERSIONS),
    st.builds(Delete, _PATHS, _VERSIONS),
    st.builds(Check, _PATHS, st.sampled_from([0, 1])),
)
_ROOTS = itertools.count()


def _outcome(entries, root, changes):
    """Apply changes under a root of their own and say what came of it, free of names."""
    try:
        entries.apply(*(replace(change, path=f"{root}/{change.path}") for change in changes))
    except EntryConflictError as error:
        outcome = error.path.removeprefix(root)
    else:
        outcome = "done"
    paths = ["a", "a/b", "a/b/c", "a/d", "e", "e/f", "g"]
    found = [
        entry and replace(entry, session=entry.session and "live")
        for entry in entries.get_many(*(f"{root}/{path}" for path in paths))
    ]
    return outcome, dict(zip(paths, found, strict=True)), [entries.names(f"{root}/{path}") for path in paths]


@real
@settings(
    max_examples=40,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(rounds=st.lists(st.lists(_CHANGES, min_size=1, max_size=4), min_size=1, max_size=6))
def test_apply_any_changes_does_what_entries_in_memory_do(entries, rounds):
    root, memory = f"r{next(_ROOTS)}", FakeCoordinator().entries
    for session in (entries, memory):
        session.apply(Create(root, b""))
    for changes in rounds:
        assert _outcome(entries, root, changes) == _outcome(memory, root, changes)


# Several at once


def test_threads_add_to_one_entry_none_is_lost(entries, others):
    entries.apply(Create("sum", b"0"))

    def add(session):
        for _ in range(10):
            while True:
                found = session.get("sum")
                with contextlib.suppress(EntryConflictError):
                    session.apply(Write("sum", str(int(found.value) + 1).encode(), found.version))
                    break

    threads = [threading.Thread(target=add, args=(session,)) for session in (entries, entries, others)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert others.get("sum") == Entry(b"30", 30)


def test_threads_make_and_delete_under_one_parent_parents_never_stand_in_the_way(entries, others):
    failed = []

    def churn(session, name):
        try:
            for _ in range(15):
                session.apply(Create(f"p/q/{name}", b""))
                session.apply(Delete(f"p/q/{name}", 0))
                with contextlib.suppress(EntryConflictError):
                    session.apply(Delete("p/q", None), Delete("p", None))
        except Exception as error:
            failed.append(error)

    threads = [threading.Thread(target=churn, args=pair) for pair in ((entries, "a"), (others, "b"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert not failed


def test_read_sees_what_another_session_was_told_is_done(entries, others):
    entries.apply(Create("a", b"", ephemeral=False))
    for number in range(30):
        writer, reader = (entries, others) if number % 2 else (others, entries)
        writer.apply(Write("a", str(number).encode(), None), Create(f"a/n{number}", b""))
        assert int(reader.get("a").value) == number
        assert len(reader.names("a")) == number + 1
