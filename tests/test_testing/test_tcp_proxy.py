"""The cable that tests pull."""

from __future__ import annotations

import socket
import threading
from contextlib import closing

import pytest

from fastcheck_dask.testing.tcp_proxy import TcpProxy


@pytest.fixture
def echo():
    """Return the port of a server that sends back what it gets."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(connection):
        with connection:
            while data := connection.recv(100):
                connection.sendall(data)

    def accept():
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            threading.Thread(target=serve, args=(connection,), daemon=True).start()

    thread = threading.Thread(target=accept)
    thread.start()
    yield listener.getsockname()[1]
    listener.shutdown(socket.SHUT_RDWR)
    listener.close()
    thread.join()


def connected(proxy):
    host, port = proxy.hosts.split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    return closing(connection)


def test_proxy_carries_and_when_pulled_carries_nothing_and_closes_nothing(echo):
    with TcpProxy(echo) as proxy, connected(proxy) as before:
        before.sendall(b"one")
        assert before.recv(100) == b"one"
        proxy.pull()
        before.sendall(b"two")
        with connected(proxy) as during:
            during.sendall(b"three")
            for connection in (before, during):
                connection.settimeout(0.05)
                with pytest.raises(TimeoutError):
                    connection.recv(100)
            before.settimeout(20)
            proxy.plug()
            assert before.recv(100) == b""
        with connected(proxy) as after:
            after.sendall(b"four")
            assert after.recv(100) == b"four"


def test_proxy_closed_ends_connections(echo):
    with TcpProxy(echo) as proxy, connected(proxy) as connection:
        connection.sendall(b"one")
        assert connection.recv(100) == b"one"
        proxy.close()
        assert connection.recv(100) == b""
