"""A TCP proxy that tests can cut like a cable, which knows nothing of what it carries; and its listener."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import Final, Self

_PIECE: Final = 2**16


class Listener:
    """A port on loopback whose connections are served in threads of their own.

    Parameters
    ----------
    serve : callable
        Is given each connection, and closes it.
    name : str
        Of the threads.
    """

    def __init__(self, serve: Callable[[socket.socket], None], *, name: str) -> None:
        self._serve, self._name = serve, name
        self._lock = threading.Lock()
        self._threads: list[threading.Thread] = []
        self._socket = socket.create_server(("127.0.0.1", 0))
        #: ``127.0.0.1:port``
        self.location = f"127.0.0.1:{self._socket.getsockname()[1]}"
        self.spawn(self._accept)

    def spawn(self, target: Callable[..., None], *arguments: object) -> None:
        """Run something in one more thread that `close` waits for."""
        thread = threading.Thread(target=target, args=arguments, name=self._name, daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            # Started under the lock: `close` joins only threads that run.
            thread.start()

    def close(self) -> None:
        """Accept nothing any more, and wait for all threads, which the caller has told to end. Idempotent."""
        # On Linux this wakes the thread that accepts.
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()
        while running := self._running():
            for thread in running:
                thread.join()

    def _running(self) -> list[threading.Thread]:
        with self._lock:
            return [one for one in self._threads if one.is_alive()]

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._socket.accept()
            except OSError:
                return
            self.spawn(self._serve, client)


def hang_up(connections: Iterable[socket.socket]) -> None:
    """End connections in both directions, whatever their state; who reads or writes them closes them."""
    for one in connections:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)


class TcpProxy:
    """Forwards connections to a server of this machine; any thread may call.

    While it is pulled, connections stay open and new ones are accepted, and nothing is carried: neither side
    is told anything. When it is plugged in again, those that were open before are closed.

    Parameters
    ----------
    port : int
        Of the server, on loopback.
    """

    def __init__(self, port: int) -> None:
        self._server_port = port
        self._plugged = threading.Event()
        self._plugged.set()
        self._lock = threading.Lock()
        self._sockets: set[socket.socket] = set()
        self._closed = False
        self._listener = Listener(self._serve, name="tcp-proxy")
        #: ``127.0.0.1:port``: what clients are told.
        self.hosts = self._listener.location

    def pull(self) -> None:
        """Carry nothing any more."""
        self._plugged.clear()

    def plug(self) -> None:
        """Close what was open, and forward what comes."""
        self._drop()
        self._plugged.set()

    def close(self) -> None:
        """End everything. Idempotent."""
        self._closed = True
        self._drop()
        self._plugged.set()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _drop(self) -> None:
        with self._lock:
            hang_up(self._sockets)

    def _serve(self, client: socket.socket) -> None:
        """Carry one connection in both directions, until either side ends it."""
        with client, contextlib.ExitStack() as stack:
            self._plugged.wait()
            try:
                server = stack.enter_context(
                    socket.create_connection(("127.0.0.1", self._server_port), timeout=5)
                )
            except OSError:
                return
            server.settimeout(None)
            pair = {client, server}
            with self._lock:
                self._sockets |= pair
            back = threading.Thread(target=self._carry, args=(server, client), daemon=True)
            back.start()
            self._carry(client, server)
            back.join()
            with self._lock:
                self._sockets -= pair

    def _carry(self, source: socket.socket, sink: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while not self._closed and (data := source.recv(_PIECE)):
                self._plugged.wait()
                sink.sendall(data)
        hang_up((source, sink))
