"""Messages between processes of one host: length-prefixed msgpack over a socket. No pickle."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import struct
import threading
from typing import Any

import msgpack

from fastcheck_dask.errors import ClosedError, CorruptDataError

_LENGTH = struct.Struct("<I")
#: Bulk data never travels here (it lies in shared memory); this bounds what a damaged length can allocate.
LIMIT_BYTES = 256 * 2**20

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """Return the bytes of a message, its length first."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LIMIT_BYTES:
        raise CorruptDataError(f"a message of {len(body):,} bytes is larger than {LIMIT_BYTES:,}")
    return _LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Message:
    """Undo :func:`pack`, without the length."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptDataError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise CorruptDataError(f"not a message but a {type(message).__name__}")
    return message


def _checked_length(head: bytes) -> int:
    (length,) = _LENGTH.unpack(head)
    if length > LIMIT_BYTES:
        raise CorruptDataError(f"a message claims {length:,} bytes, at most {LIMIT_BYTES:,} are read")
    return int(length)


class BlockingChannel:
    """One end of a channel for threads: any thread may send, one thread receives."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self._sending = threading.Lock()

    def send(self, message: Message) -> None:
        """Send one message; `ClosedError` when the other end is gone."""
        try:
            with self._sending:
                self._socket.sendall(pack(message))
        except OSError as error:
            raise ClosedError(f"the other end of the channel is gone: {error}") from error

    def receive(self) -> Message | None:
        """Wait for one message; None when the other end is gone."""
        head = self._exactly(_LENGTH.size)
        if head is None:
            return None
        body = self._exactly(_checked_length(head))
        return None if body is None else unpack(body)

    def _exactly(self, count: int) -> bytes | None:
        parts = bytearray()
        while len(parts) < count:
            try:
                part = self._socket.recv(count - len(parts))
            except OSError:
                return None
            if not part:
                return None
            parts += part
        return bytes(parts)

    def shut(self) -> None:
        """End both directions, also for a process that holds a copy of the other end; wakes who waits.

        What has come before is still received.
        """
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close this end; wakes a receiver and senders. Idempotent."""
        self.shut()
        # A sender in mid-call would go on with a number that may be another file by then.
        with self._sending:
            self._socket.close()


class AsyncChannel:
    """One end of a channel on an event loop."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer

    @classmethod
    async def over(cls, sock: socket.socket) -> AsyncChannel:
        """Wrap a connected socket."""
        sock.setblocking(False)
        return cls(*await asyncio.open_connection(sock=sock))

    async def send(self, message: Message) -> None:
        """Send one message; `ClosedError` when the other end is gone."""
        try:
            self._writer.write(pack(message))
            await self._writer.drain()
        except OSError as error:
            raise ClosedError(f"the other end of the channel is gone: {error}") from error

    async def receive(self) -> Message | None:
        """Wait for one message; None when the other end is gone."""
        try:
            head = await self._reader.readexactly(_LENGTH.size)
            return unpack(await self._reader.readexactly(_checked_length(head)))
        except (asyncio.IncompleteReadError, OSError):
            return None

    def stop_receiving(self) -> None:
        """Let a waiting `receive` return what has come, and then None: the other process is gone."""
        transport = self._writer.transport
        if not transport.is_closing():
            transport.pause_reading()  # type: ignore[attr-defined]
        self._reader.feed_eof()

    async def close(self) -> None:
        """Close this end. Idempotent."""
        self._writer.close()
        try:
            await self._writer.wait_closed()
        except OSError:
            return
