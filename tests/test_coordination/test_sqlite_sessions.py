from __future__ import annotations

import contextlib
import logging
import sqlite3
import threading

import pytest

from fastcheck_dask.coordination import sqlite_sessions
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.entries import Create, Delete, Entry, EntryConflictError
from fastcheck_dask.errors import FencedError, RunInUseError, SessionLostError

#: Long enough that no thread of these tests beats by itself: the tests say when.
SESSION_SECONDS = 600.0


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.db"


@pytest.fixture
def opened(path):
    with contextlib.ExitStack() as stack:
        yield lambda: stack.enter_context(
            contextlib.closing(EmbeddedCoordinator(path, session_seconds=SESSION_SECONDS))
        )


@pytest.fixture
def coordinator(opened):
    return opened()


@pytest.fixture
def other(opened):
    return opened()


def beat(coordinator):
    coordinator._session._beat()


def rows(path, query):
    with contextlib.closing(sqlite3.connect(path)) as connection:
        return connection.execute(query).fetchall()


def beating_threads():
    return [thread for thread in threading.enumerate() if thread.name == "fastcheck-session"]


def test_beat_nothing_ephemeral_nothing_is_written(path, coordinator):
    with contextlib.closing(sqlite3.connect(path)) as watcher:

        def version():
            return watcher.execute("PRAGMA data_version").fetchone()

        before = version()
        coordinator.entries.apply(Create("a", b""))
        assert version() != before
        assert not beating_threads()
        coordinator.entries.apply(Create("b", b"", ephemeral=True))
        (thread,) = beating_threads()
        coordinator.entries.apply(Delete("b", 0))
        assert len(rows(path, "SELECT * FROM sessions")) == 1
        beat(coordinator)
        assert rows(path, "SELECT * FROM sessions") == []
        before = version()
        beat(coordinator)
        assert version() == before
    name = coordinator.entries.session
    coordinator.entries.apply(Create("b", b"", ephemeral=True))
    assert coordinator.entries.session == name
    coordinator.close()
    thread.join(20.0)
    assert not beating_threads()
    assert rows(path, "SELECT * FROM sessions") == []


def test_beat_while_anything_is_ephemeral_keeps_the_session(path, coordinator, node):
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "a")
    for release in (registration.close, claim.close):
        first = rows(path, "SELECT beat FROM sessions")
        beat(coordinator)
        assert rows(path, "SELECT beat FROM sessions") > first
        release()
    beat(coordinator)
    assert rows(path, "SELECT * FROM sessions") == []


def test_session_lost_registration_and_claim_come_back_with_the_next_beat(
    coordinator, other, expire, node, record, caplog
):
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "trainer")
    coordinator.entries.apply(Create("live", b"", ephemeral=True))
    before = coordinator.entries.session
    expire(coordinator)
    assert other.nodes() == ()
    with caplog.at_level(logging.WARNING, logger="fastcheck_dask"):
        beat(coordinator)
    assert "lost its session" in caplog.text
    assert coordinator.entries.session != before
    assert other.nodes() == (node("a"),)
    with pytest.raises(RunInUseError):
        other.claim("run-1", "b")
    assert coordinator.commit(record(), claim) == record()
    assert other.entries.get("live") is None
    registration.update(node("a", state="draining"))
    assert other.nodes() == (node("a", state="draining"),)
    registration.close()
    claim.close()
    assert other.nodes() == ()
    other.claim("run-1", "b")


@pytest.mark.parametrize("beaten", [True, False])
def test_session_lost_places_that_others_took_stay_theirs(coordinator, other, expire, node, record, beaten):
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "trainer")
    expire(coordinator)
    other.register(node("a", rack="new"))
    theirs = other.claim("run-1", "b")
    if beaten:
        beat(coordinator)
    with pytest.raises(FencedError):
        coordinator.commit(record(), claim)
    with pytest.raises(SessionLostError):
        registration.update(node("a"))
    claim.close()
    registration.close()
    assert other.nodes() == (node("a", rack="new"),)
    assert other.commit(record(), theirs) == record()


def test_session_lost_first_call_is_in_the_next_one(coordinator, other, expire):
    entries = coordinator.entries
    entries.apply(Create("a", b"", ephemeral=True))
    before = entries.session
    expire(coordinator)
    # No beat in between: the write finds out by itself.
    entries.apply(Create("b", b"", ephemeral=True))
    assert entries.session != before
    assert other.entries.get_many("a", "b") == [None, Entry(b"", 0, entries.session)]


def test_session_removed_by_who_cannot_see_the_process_is_lost_too(path, coordinator, other, node):
    # Somebody in another container took this process for dead.
    coordinator.register(node("a"))
    before = coordinator.entries.session
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        connection.execute("DELETE FROM sessions")
    assert other.nodes() == ()
    beat(coordinator)
    assert coordinator.entries.session != before
    assert other.nodes() == (node("a"),)


def test_session_lost_without_entries_those_who_watch_are_told(coordinator, expire, node):
    coordinator.register(node("a"))
    watch = coordinator.entries.watch("a")
    assert watch.wait(0.0) is False
    expire(coordinator)
    beat(coordinator)
    assert watch.wait(0.0) is True
    watch.close()


def test_change_refused_session_is_as_before(path, coordinator):
    entries = coordinator.entries
    with pytest.raises(EntryConflictError):
        entries.apply(Create("a", b"", ephemeral=True), Delete("none", None))
    assert rows(path, "SELECT * FROM sessions") == []
    beat(coordinator)
    assert entries.connected


def test_change_refused_after_session_was_lost_loses_it_only_once(coordinator, expire):
    entries = coordinator.entries
    entries.apply(Create("a", b"", ephemeral=True))
    before = entries.session
    expire(coordinator)
    with pytest.raises(EntryConflictError):
        entries.apply(Create("b", b"", ephemeral=True), Delete("none", None))
    assert entries.session == before
    beat(coordinator)
    after = entries.session
    assert after != before
    beat(coordinator)
    assert entries.session == after


@pytest.mark.parametrize(
    ("silence", "connected"), [(0.0, True), (399.0, True), (401.0, False), (10_000.0, False)]
)
def test_connected_only_as_long_as_nobody_can_see_the_session_ended(
    coordinator, monkeypatch, silence, connected
):
    coordinator.entries.apply(Create("a", b"", ephemeral=True))
    now = sqlite_sessions.boot_seconds()
    monkeypatch.setattr(sqlite_sessions, "boot_seconds", lambda: now + silence)
    assert coordinator.entries.connected is connected
    beat(coordinator)
    assert coordinator.entries.connected


def test_watch_file_away_for_a_while_is_told(path, coordinator):
    watch = coordinator.entries.watch("a")
    path.rename(path.with_name("elsewhere"))
    assert watch.wait(0.0) is False
    path.with_name("elsewhere").rename(path)
    assert watch.wait(20.0) is True
    assert watch.wait(0.0) is False
    watch.close()
