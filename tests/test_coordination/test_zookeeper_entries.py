from __future__ import annotations

import socket
import threading

import pytest

from fastcheck_dask.coordination.connect import zookeeper_place
from fastcheck_dask.coordination.entries import Create, Delete, Entry, OutcomeUnknownError, Write
from fastcheck_dask.coordination.zookeeper import client, liveness
from fastcheck_dask.coordination.zookeeper.liveness import Liveness
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.testing.zookeeper import ZooKeeperServer

#: As the coordinators of the suite have it.
SESSION_SECONDS = 2.0

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def coordinator(zookeeper_url, open_coordinator):
    return open_coordinator(zookeeper_url)


@pytest.fixture
def entries(coordinator):
    return coordinator.entries


@pytest.fixture
def own_server(tmp_path):
    with ZooKeeperServer(tmp_path / "server") as server:
        yield server


def watch_count(server):
    """Return how many watches a server holds."""
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(b"mntr")
        answer = b""
        while part := connection.recv(65536):
            answer += part
    (line,) = (line for line in answer.decode().splitlines() if line.startswith("zk_watch_count"))
    return int(line.split()[1])


def callbacks(coordinator):
    """Return how many paths kazoo holds callbacks for."""
    kazoo = coordinator._session._client
    return len(kazoo._data_watchers) + len(kazoo._child_watchers)


# Reads


def test_get_fresh_goes_through_the_quorum_and_other_reads_do_not(coordinator, entries):
    entries.apply(Create("a/b", b""))
    kazoo = coordinator._session._client
    for read, grows in (
        (lambda: entries.get("a"), True),
        (lambda: entries.get_many("a", "b"), True),
        (lambda: entries.names("a"), True),
        (lambda: entries.get("a", fresh=False), False),
    ):
        before = kazoo.last_zxid
        read()
        assert (kazoo.last_zxid > before) is grows


def test_get_connection_lost_meanwhile_asks_again(coordinator, entries, own_server, open_coordinator):
    entries = open_coordinator(f"zk://{own_server.hosts}/root", session_seconds=5.0).entries
    entries.apply(Create("a", b"x"))
    own_server.restart()
    assert entries.get("a") == Entry(b"x", 0)


def test_root_emptied_meanwhile_is_an_error_not_an_absence(coordinator, entries, zookeeper_url):
    entries.apply(Create("a", b""), Create("token", b""))
    session = coordinator._session
    _, root = zookeeper_place(zookeeper_url)
    session.attempt("emptying", lambda c: c.delete_async(f"{root}/entries/a"), deadline=session.deadline())
    assert entries.get("a") is None
    for path in ("entries/token", "entries"):
        session.attempt(
            "emptying", lambda c, p=path: c.delete_async(f"{root}/{p}"), deadline=session.deadline()
        )
    for call in (
        lambda: entries.get("token"),
        lambda: entries.names("a"),
        lambda: entries.apply(Create("token", b"")),
        lambda: entries.apply(Create("a/b", b"")),
    ):
        with pytest.raises(CoordinationError, match="was it emptied"):
            call()


# Answers that are missing


def test_server_paused_outcome_is_open_and_the_change_is_made_later(
    own_server, open_coordinator, monkeypatch, eventually
):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root", session_seconds=20.0)
    entries = coordinator.entries
    entries.apply(Create("a", b""))
    own_server.pause()
    monkeypatch.setattr(coordinator._session, "timeout_seconds", 0.5)
    with pytest.raises(OutcomeUnknownError):
        entries.apply(Write("a", b"late", 0))
    with pytest.raises(CoordinationError):
        entries.get("a")
    monkeypatch.undo()
    own_server.resume()
    eventually(lambda: entries.get("a") == Entry(b"late", 1))


def test_server_killed_not_connected_and_nothing_was_sent(
    own_server, open_coordinator, monkeypatch, eventually
):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root", session_seconds=20.0)
    entries = coordinator.entries
    entries.apply(Create("a", b""), Create("live", b"", ephemeral=True))
    watch, session = entries.watch("a"), entries.session
    assert entries.connected
    own_server.kill()
    eventually(lambda: not entries.connected)
    assert entries.session == session
    monkeypatch.setattr(coordinator._session, "timeout_seconds", 0.3)
    with pytest.raises(CoordinationError) as caught:
        entries.apply(Write("a", b"x", 0))
    monkeypatch.undo()
    assert not isinstance(caught.value, OutcomeUnknownError)
    assert watch.wait(0.2) is False
    own_server.start()
    assert watch.wait(20.0) is True
    eventually(lambda: entries.connected)
    assert entries.get("a") == Entry(b"", 0)
    assert (entries.session, entries.get("live").session) == (session, session)
    watch.close()


# Watches


def test_watch_change_while_the_connection_was_away_is_told(own_server, open_coordinator, eventually):
    url = f"zk://{own_server.hosts}/root"
    entries = open_coordinator(url, session_seconds=5.0).entries
    others = open_coordinator(url, session_seconds=5.0).entries
    entries.apply(Create("a", b"0"))
    watch, seen = entries.watch("a"), []

    def follow():
        while not seen or seen[-1] < 2:
            seen.append(int(entries.get("a").value))
            if seen[-1] < 2 and not watch.wait(30.0):
                return

    follower = threading.Thread(target=follow)
    follower.start()
    for number in (1, 2):
        own_server.restart()
        others.apply(Write("a", str(number).encode(), number - 1))
    follower.join(60.0)
    watch.close()
    assert seen[-1] == 2


def test_watches_closed_leave_nothing_with_the_server_or_kazoo(own_server, open_coordinator):
    # Of its own: one that is shared may still forget the watches of tests that are over.
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root")
    entries = coordinator.entries
    before = watch_count(own_server)
    for number in range(50):
        watches = [entries.watch(f"a/n{number}") for _ in range(3)]
        assert watch_count(own_server) == before + 1
        entries.apply(Create(f"a/n{number}", b""))
        assert all(watch.wait(20.0) for watch in watches)
        # Value and names, once for all three.
        assert watch_count(own_server) == before + 2
        if number % 2:
            entries.apply(Delete(f"a/n{number}", 0))
        for watch in watches:
            watch.close()
        assert watch_count(own_server) == before
        assert callbacks(coordinator) == 0
    assert not entries._watches._places


def test_watch_told_many_times_and_reads_leave_no_more_than_one_watch(own_server, open_coordinator):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root")
    entries = coordinator.entries
    entries.apply(Create("a", b""))
    watch = entries.watch("a")
    count = watch_count(own_server)
    for number in range(100):
        entries.apply(Write("a", b"", None), Create(f"a/n{number}", b""))
        assert watch.wait(20.0)
        entries.get("a")
        entries.names("a")
    assert watch_count(own_server) == count
    assert callbacks(coordinator) == 2
    watch.close()


def test_watch_refused_by_the_server_leaves_nothing(coordinator, entries, monkeypatch):
    def attempt(_session, what, _call, *, deadline):
        raise CoordinationError(what)

    monkeypatch.setattr(client.Session, "attempt", attempt)
    with pytest.raises(CoordinationError, match="watching"):
        entries.watch("a")
    assert not entries._watches._places


# What can be known of the session


class QuietSession:
    """A session that is asked for signs of life, by a clock that the test moves."""

    session_seconds, timeout_seconds = 9.0, 1.0

    def __init__(self):
        self.connected, self.closed, self.foreign = True, False, False
        self.heard_at = 100.0
        self.asked = threading.Event()
        self.answers = False

    def attempt(self, _what, _call, *, deadline):
        self.asked.set()
        if not self.answers:
            raise CoordinationError("no answer")
        self.heard_at = liveness.boot_seconds()


@pytest.fixture
def quiet(monkeypatch):
    session = QuietSession()
    session.now = 100.0
    monkeypatch.setattr(liveness, "boot_seconds", lambda: session.now)
    made = Liveness(session, "/root")
    # No thread: the test says when it looks.
    monkeypatch.setattr(made, "watch_over", lambda: None)
    yield session, made
    made.close()


@pytest.mark.parametrize(("silence", "certain"), [(0.0, True), (5.9, True), (6.1, False), (1000.0, False)])
def test_certain_only_as_long_as_the_server_surely_waits(quiet, silence, certain):
    session, made = quiet
    session.now = 100.0 + silence
    assert made.certain is certain
    session.connected = False
    assert made.certain is False


@pytest.mark.parametrize(("silence", "asks"), [(2.9, False), (3.1, True)])
def test_liveness_asks_when_nothing_was_heard_for_a_third(quiet, silence, asks):
    session, made = quiet
    session.now, session.answers = 100.0 + silence, True
    made.look()
    assert session.asked.is_set() is asks
    session.now += 5.9 if asks else 3.0
    assert made.certain


def test_liveness_without_an_answer_is_not_certain_and_goes_on(quiet):
    session, made = quiet
    session.now = 107.0
    made.look()
    assert not made.certain
    session.answers = True
    made.look()
    assert made.certain


def test_connected_idle_session_is_asked_for(coordinator, entries, eventually):
    session = coordinator._session
    before = session.heard_at
    assert entries.connected
    # Without any call: half a session later it was heard again.
    eventually(lambda: session.heard_at > before + SESSION_SECONDS / 2)
    assert entries.connected
