"""Messages between processes of one host: length-prefixed msgpack over a socket. No pickle, no event loop."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from typing import Any

import msgpack

from fastcheck_dask.errors import ClosedError, CorruptDataError

#: What a message begins with.
LENGTH = struct.Struct("<I")
#: Bulk data never travels here (it lies in shared memory); this bounds what a damaged length can allocate.
LIMIT_BYTES = 256 * 2**20

Message = dict[str, Any]


def pack(message: Message) -> bytes:
    """Return the bytes of a message, its length first."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    if len(body) > LIMIT_BYTES:
        raise CorruptDataError(f"a message of {len(body):,} bytes is larger than {LIMIT_BYTES:,}")
    return LENGTH.pack(len(body)) + body


def unpack(body: bytes) -> Message:
    """Undo :func:`pack`, without the length."""
    try:
        message = msgpack.unpackb(body, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException) as error:
        raise CorruptDataError(f"not a message: {error}") from error
    if not isinstance(message, dict):
        raise CorruptDataError(f"not a message but a {type(message).__name__}")
    return message


def checked_length(head: bytes) -> int:
    """Return the length of the message that follows its head."""
    (length,) = LENGTH.unpack(head)
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
        head = self._exactly(LENGTH.size)
        if head is None:
            return None
        body = self._exactly(checked_length(head))
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
