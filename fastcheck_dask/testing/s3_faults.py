"""A hop in front of a real S3 server that refuses, delays, cuts and loses as it is told."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

#: What befalls one request: nothing; an answer without asking the server; the connection cut before or after
#: the server did it; no answer at all.
Fate = Literal["pass", "refuse", "cut", "lose", "hang"]
#: Decides by method and path; called on the proxy's own thread.
Rule = Callable[[str, str], Fate]

_BUSY = (
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>"
)


@dataclass(frozen=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    head: bytes
    body: bytes


class S3Faults:
    """A proxy on loopback, as a context manager. One request per connection.

    Parameters
    ----------
    port : int
        Of the server on loopback.

    Attributes
    ----------
    rule : callable
        Decides what befalls a request; may be replaced at any time.
    status : int
        Of the answer to a request that is refused.
    requests : list of (method, path, fate)
        What came.
    most_bytes : int
        Most bytes of bodies that were under way at one time.
    """

    def __init__(self, port: int) -> None:
        self._target = port
        self.port = 0
        self.rule: Rule = lambda _method, _path: "pass"
        self.status = 503
        self.requests: list[tuple[str, str, Fate]] = []
        self.most_bytes = 0
        self._bytes = 0
        self._ready, self._closing = threading.Event(), asyncio.Event()
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._main, name="s3-faults", daemon=True)

    @property
    def endpoint(self) -> str:
        """``http://127.0.0.1:port``."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> S3Faults:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *_error: object) -> None:
        self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join()

    def _main(self) -> None:
        with asyncio.Runner(loop_factory=lambda: self._loop) as runner:
            runner.run(self._serve())

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._handle, "127.0.0.1", 0, limit=2**20)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        async with server:
            await self._closing.wait()

    async def _handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            request = await _read_request(reader)
            fate = self.rule(request.method, request.path)
            self.requests.append((request.method, request.path, fate))
            self._bytes += len(request.body)
            self.most_bytes = max(self.most_bytes, self._bytes)
            try:
                answer = await self._answer(request, fate)
            finally:
                self._bytes -= len(request.body)
            if answer is not None:
                writer.write(answer)
                await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass  # either end went away: that is what this is for
        finally:
            writer.close()

    async def _answer(self, request: Request, fate: Fate) -> bytes | None:
        if fate == "hang":
            await self._closing.wait()
            return None
        if fate == "cut":
            return None
        if fate == "refuse":
            head = (
                f"HTTP/1.1 {self.status} Refused\r\nContent-Length: {len(_BUSY)}\r\nConnection: close\r\n\r\n"
            )
            return head.encode() + _BUSY
        answer = await self._forward(request)
        return None if fate == "lose" else answer

    async def _forward(self, request: Request) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", self._target)
        try:
            writer.write(request.head + request.body)
            await writer.drain()
            return await reader.read()
        finally:
            writer.close()
            with contextlib.suppress(OSError):
                await writer.wait_closed()


async def _read_request(reader: asyncio.StreamReader) -> Request:
    """Read one request; it is passed on with `Connection: close`, so that its answer ends by itself."""
    head = await reader.readuntil(b"\r\n\r\n")
    first, *lines = head.removesuffix(b"\r\n\r\n").split(b"\r\n")
    kept = [line for line in lines if not line.lower().startswith((b"connection:", b"expect:"))]
    sizes = [line.partition(b":")[2] for line in lines if line.lower().startswith(b"content-length:")]
    body = await reader.readexactly(int(sizes[0])) if sizes else b""
    method, path, _ = first.decode().split(" ", 2)
    return Request(method, path, b"\r\n".join([first, *kept, b"Connection: close", b"", b""]), body)
