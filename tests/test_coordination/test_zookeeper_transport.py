"""Servers that say nothing while we connect are left for another, before the session ends."""

from __future__ import annotations

import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.coordination.zookeeper.transport import Journal, make_client, patience_seconds
from fastcheck_dask.testing.zookeeper import ZooKeeperServer


@pytest.fixture
def handler():
    return make_client("h:1", Access(), session_seconds=0.4, journal=Journal()).handler


@given(session=st.floats(0.4, 60.0), servers=st.integers(1, 9))
def test_patience_never_longer_than_kazoo_and_in_long_sessions_all_are_asked_twice(session, servers):
    patience = patience_seconds(session, servers)
    assert 0 < patience <= session / servers
    assert patience <= 5.0
    if session >= 2 * max(servers, 2):
        assert patience * servers * 2 <= session * (1 + 1e-9)


def test_connecting_machine_that_is_off_is_given_up_after_our_patience(handler, monkeypatch):
    asked = []
    monkeypatch.setattr(
        socket, "create_connection", lambda address, timeout: asked.append(timeout) or socket.socket()
    )
    for timeout in (60.0, 0.1, None):
        handler.create_connection(("h", 1), timeout=timeout).close()
    assert asked == [0.4, 0.1, 0.4]


def test_select_answer_that_is_due_is_not_waited_for_for_ever(handler):
    one, other = socket.socketpair()
    with one, other:
        # Would not come back at all.
        assert handler.select([one], [], [], None) == ([], [], [])
        other.sendall(b"x")
        assert handler.select([one], [], [], None) == ([one], [], [])
        assert handler.select([], [one], [], None) == ([], [one], [])


def test_select_idle_connection_is_waited_for_as_long_as_kazoo_wants(handler):
    one, other = socket.socketpair()
    mine, waker = socket.socketpair()
    with one, other, mine, waker:
        timer = threading.Timer(0.8, waker.sendall, [b"x"])
        timer.start()
        assert handler.select([one, mine], [], [], 60.0) == ([mine], [], [])
        timer.join()


@pytest.mark.zookeeper
def test_connection_that_the_server_forgot_session_is_kept(tmp_path, open_coordinator, eventually):
    with ZooKeeperServer(tmp_path / "server") as server:
        entries = open_coordinator(f"zk://{server.hosts}/root", session_seconds=20.0).entries
        entries.apply(Create("live", b"", ephemeral=True))
        watch, session = entries.watch("live"), entries.session
        server.kill()
        eventually(lambda: not entries.connected)
        with socket.create_server(("127.0.0.1", server.port)) as silent:
            forgotten, _ = silent.accept()
        with forgotten:
            server.start()
            assert watch.wait(15.0) is True
        assert (entries.session, entries.get("live").session) == (session, session)
        watch.close()
