"""How the connection is: told from flags, right through outages, and free of charge however often asked."""

from __future__ import annotations

import ast
import gc
import inspect
import socket
import textwrap
import threading
import tracemalloc

import pytest
from kazoo.protocol.states import KazooState, KeeperState

from fastcheck_dask.coordination import Health
from fastcheck_dask.coordination.zookeeper import client, ephemeral
from fastcheck_dask.coordination.zookeeper.connection import Connection
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.zookeeper import ServerOptions, ZooKeeperServer


def health(connection):
    return connection.health(hosts="h:1", session_id="0x1", why="cut")


# The flags


def test_connection_suspended_is_lost_after_a_session_and_connected_again():
    clock = FakeClock(100.0)
    connection = Connection(10.0, clock)
    assert health(connection) == Health("suspended", 100.0, "h:1", "0x1", "cut")
    connection.heard(KazooState.CONNECTED, KeeperState.CONNECTED)
    clock.advance(5.0)
    assert health(connection) == Health("connected", 100.0, "h:1", "0x1")
    connection.heard(KazooState.SUSPENDED, KeeperState.CONNECTING)
    clock.advance(9.0)
    assert health(connection) == Health("suspended", 105.0, "h:1", "0x1", "cut")
    clock.advance(2.0)
    assert health(connection) == Health("lost", 115.0, "h:1", "0x1", "cut")
    # Kazoo says it only now, and is connected a moment later.
    connection.heard(KazooState.LOST, KeeperState.EXPIRED_SESSION)
    assert health(connection).state == "lost"
    assert not connection.settled.is_set()
    connection.heard(KazooState.CONNECTED, KeeperState.CONNECTED)
    assert health(connection) == Health("connected", 116.0, "h:1", "0x1")
    connection.close()
    connection.heard(KazooState.LOST, KeeperState.CLOSED)
    assert health(connection) == Health("closed", 116.0, "h:1", "0x1")


@pytest.mark.parametrize("last", [KeeperState.AUTH_FAILED, KeeperState.CLOSED])
def test_connection_given_up_wakes_who_waits_until_it_lives_again(last):
    connection = Connection(10.0, FakeClock())
    connection.heard(KazooState.CONNECTED, KeeperState.CONNECTED)
    connection.heard(KazooState.LOST, last)
    assert connection.dead
    assert connection.settled.is_set()
    assert not connection.connected
    connection.heard(KazooState.CONNECTED, KeeperState.CONNECTED)
    assert not connection.dead
    connection.heard(KazooState.SUSPENDED, KeeperState.CONNECTING)
    assert not connection.settled.is_set()


# No call in a listener


def test_listeners_call_nothing_that_asks_zookeeper():
    """Whoever calls kazoo in its own thread waits for ever; flags may be set, and that is all."""
    allowed = {"heard", "_on_change", "set", "clear", "now", "give_up", "begin_again"}
    told = (client.Session._listen, ephemeral.Keeper.poke, Connection.heard)
    for function in (*told, Connection.give_up, Connection.begin_again):
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        called = {node.func.attr for node in ast.walk(tree) if isinstance(node, ast.Call)}
        assert called <= allowed, function


@pytest.mark.zookeeper
def test_listener_executed_sends_nothing_and_does_not_wait(zookeeper_url, open_coordinator, monkeypatch):
    session = open_coordinator(zookeeper_url)._session
    for name in ("_call", "start", "start_async", "stop"):
        monkeypatch.setattr(session._client, name, lambda *_, name=name: pytest.fail(f"{name} in a listener"))
    told = [KazooState.SUSPENDED, KazooState.LOST, KazooState.CONNECTED]
    thread = threading.Thread(target=lambda: [session._listen(state) for state in told], daemon=True)
    thread.start()
    thread.join(10.0)
    assert not thread.is_alive()
    monkeypatch.undo()


# Outages


@pytest.mark.zookeeper
def test_health_server_killed_and_back(tmp_path, open_coordinator, eventually):
    with ZooKeeperServer(tmp_path / "server") as server:
        coordinator = open_coordinator(f"zk://{server.hosts}/root", session_seconds=3.0, timeout_seconds=5.0)
        first = coordinator.health()
        assert (first.state, first.hosts, first.why) == ("connected", server.hosts, "")
        server.kill()
        eventually(lambda: coordinator.health().state == "suspended")
        eventually(lambda: coordinator.health().state == "lost" and "refused" in coordinator.health().why)
        server.start()
        eventually(lambda: coordinator.health().state == "connected")
        again = coordinator.health()
        assert again.since_seconds > first.since_seconds
        assert again.session_id != "0x0"
        coordinator.close()
        assert coordinator.health().state == "closed"


@pytest.fixture
def resolver(monkeypatch):
    """Return a table of what kazoo finds for a name of ours: a port on loopback, or None for nothing."""
    table = {}
    whole = socket.getaddrinfo

    def resolve(host, port, *arguments, **options):
        if host not in table:
            return whole(host, port, *arguments, **options)
        if table[host] is None:
            failed.set()
            raise socket.gaierror(socket.EAI_AGAIN, "Temporary failure in name resolution")
        return whole("127.0.0.1", table[host], *arguments, **options)

    failed = threading.Event()
    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    return table, failed


@pytest.mark.zookeeper
def test_name_not_resolved_for_a_while_and_then_another_address_reconnects_by_itself(
    tmp_path, open_coordinator, resolver, node, eventually
):
    table, failed = resolver
    old, new = free_ports(2)
    table["zk.example"] = old
    with ZooKeeperServer(tmp_path, port=old) as server:
        coordinator = open_coordinator("zk://zk.example:2181/root", session_seconds=20.0)
        coordinator.register(node("a"))
        table["zk.example"] = None
        server.kill()
        assert failed.wait(20.0)
        eventually(lambda: "Cannot resolve zk.example" in coordinator.health().why)
        # As many tries as kazoo makes in more than ten seconds, and it does not give up.
        retry = coordinator._session._client._conn_retry
        assert (retry.max_tries, retry.max_delay) == (-1, 0.5)
        server.port = new
        server.start()
        failed.clear()
        assert failed.wait(20.0)
        table["zk.example"] = new
        eventually(lambda: coordinator.health().state == "connected")
        assert [info.name for info in coordinator.nodes()] == ["a"]


# Free of charge


@pytest.mark.zookeeper
@pytest.mark.slow
def test_many_polls_and_many_comings_and_goings_leave_nothing(tmp_path, open_coordinator, node):
    with ZooKeeperServer(tmp_path, ServerOptions(tick_milliseconds=500)) as server:
        coordinator = open_coordinator(f"zk://{server.hosts}/root")

        def cycle(times):
            for _ in range(10 * times):
                coordinator.health()
            for _ in range(times):
                coordinator.register(node("a")).close()
                coordinator.nodes()

        def told():
            found = dict(line.split("\t") for line in server.ask("mntr").splitlines() if "\t" in line)
            return found["zk_watch_count"], found["zk_znode_count"], found["zk_ephemerals_count"]

        # What is made once is made now.
        cycle(50)
        before, watches = told(), server.ask("wchs")
        gc.collect()
        tracemalloc.start()
        try:
            cycle(200)
            gc.collect()
            first = tracemalloc.get_traced_memory()[0]
            cycle(800)
            gc.collect()
            grown = tracemalloc.get_traced_memory()[0] - first
        finally:
            tracemalloc.stop()
        # One object for each cycle would be more than this.
        assert grown < 800 * 50
        assert (told(), server.ask("wchs")) == (before, watches)
        assert coordinator.nodes() == ()
