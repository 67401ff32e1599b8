"""A network cable that tests can pull: a TCP proxy that knows nothing of what it carries."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Final, Self

_PIECE: Final = 2**16


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
        self._threads: list[threading.Thread] = []
        self._closed = False
        self._listener = socket.create_server(("127.0.0.1", 0))
        #: ``127.0.0.1:port``: what clients are told.
        self.hosts = f"127.0.0.1:{self._listener.getsockname()[1]}"
        self._spawn(self._accept)

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
        # On Linux this wakes the thread that accepts.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._drop()
        self._plugged.set()
        for thread in list(self._threads):
            thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _spawn(self, target: Callable[..., None], *arguments: object) -> None:
        thread = threading.Thread(target=target, args=arguments, name="tcp-proxy", daemon=True)
        with self._lock:
            self._threads = [one for one in self._threads if one.is_alive()]
            self._threads.append(thread)
            thread.start()

    def _drop(self) -> None:
        with self._lock:
            for one in self._sockets:
                with contextlib.suppress(OSError):
                    one.shutdown(socket.SHUT_RDWR)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self._spawn(self._serve, client)

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
        for one in (source, sink):
            with contextlib.suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
