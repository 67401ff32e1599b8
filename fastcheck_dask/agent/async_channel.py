"""One end of a channel on an event loop; encoders do without one, and start sooner."""

from __future__ import annotations

import asyncio
import socket

from fastcheck_dask.agent.channel import LENGTH, Message, checked_length, pack, unpack
from fastcheck_dask.errors import ClosedError


class AsyncChannel:
    """One end of a channel, for one event loop."""

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
            head = await self._reader.readexactly(LENGTH.size)
            return unpack(await self._reader.readexactly(checked_length(head)))
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
