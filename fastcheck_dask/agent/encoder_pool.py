"""The agent's encoder processes and the arena that they write payloads into."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from fastcheck_codecs import max_encoded_nbytes

from fastcheck_dask.agent.channel import AsyncChannel
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.plan import Job, Task
from fastcheck_dask.engine.save import EncodedChunk
from fastcheck_dask.errors import TierError, from_wire

_PAGE = 4096


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    channel: AsyncChannel


class EncoderPool:
    """Encoder processes that share one arena; a job holds a window of it until its chunks are sent.

    Belongs to one event loop. There is one window more than processes, so that one job can be sent while the
    next is encoded.
    """

    def __init__(self, count: int) -> None:
        self._count = count
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._windows: asyncio.Queue[int] = asyncio.Queue()
        self._processes: list[_Process] = []
        self._arena_fd = os.memfd_create("fastcheck-arena", os.MFD_CLOEXEC)
        self._arena: Bits = np.empty(0, np.uint8)
        self._window_bytes = 0
        self._growing = asyncio.Lock()
        self._ids = itertools.count()

    @property
    def parallel(self) -> int:
        """How many jobs can be held at once."""
        return self._count + 1

    async def start(self) -> None:
        """Start the processes."""
        for _ in range(self._count):
            await self._start_one()

    async def _start_one(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            popen = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "fastcheck_dask.agent.encoder",
                    str(theirs.fileno()),
                    str(self._arena_fd),
                ],
                pass_fds=(theirs.fileno(), self._arena_fd),
                stdin=subprocess.DEVNULL,
            )
        process = _Process(popen, await AsyncChannel.over(ours))
        self._processes.append(process)
        self._idle.put_nowait(process)

    async def prepare(self, jobs: list[Job]) -> None:
        """Make the windows large enough for the largest of `jobs`; to grow they must come back first."""
        largest = max((sum(max_encoded_nbytes(t.nbytes) for t in job.tasks) for job in jobs), default=0)
        wanted = -(-max(largest, 1) // _PAGE) * _PAGE
        async with self._growing:
            if wanted <= self._window_bytes:
                return
            if self._window_bytes:
                for _ in range(self.parallel):
                    await self._windows.get()
            os.ftruncate(self._arena_fd, wanted * self.parallel)
            self._arena = np.frombuffer(mmap.mmap(self._arena_fd, wanted * self.parallel), np.uint8)
            self._window_bytes = wanted
            for number in range(self.parallel):
                self._windows.put_nowait(number * wanted)

    @contextlib.asynccontextmanager
    async def encoded(self, job: Job, current: Path, base: Path | None) -> AsyncIterator[list[EncodedChunk]]:
        """Encode a job; its payloads are valid until the block ends."""
        window = await self._windows.get()
        try:
            yield await self._run(job, current, base, window)
        finally:
            self._windows.put_nowait(window)

    async def _run(self, job: Job, current: Path, base: Path | None, window: int) -> list[EncodedChunk]:
        process = await self._idle.get()
        try:
            number = next(self._ids)
            await process.channel.send(
                {
                    "id": number,
                    "window": window,
                    "arena_bytes": self._arena.size,
                    "current": str(current),
                    "base": None if base is None else str(base),
                    "tasks": [[t.dtype, t.nbytes, t.current, t.base] for t in job.tasks],
                }
            )
            reply = await process.channel.receive()
        except BaseException:
            # Cancelled or broken in mid-job: what it would answer next belongs to nobody.
            await self._replace(process)
            raise
        if reply is None or reply.get("id") != number:
            code = process.popen.poll()
            await self._replace(process)
            raise TierError(f"an encoder process ended in the middle of a job (exit status {code})")
        self._idle.put_nowait(process)
        if "error" in reply:
            raise from_wire(reply["error"])
        return [self._chunk(t, *r) for t, r in zip(job.tasks, reply["results"], strict=True)]

    def _chunk(self, task: Task, at: int, nbytes: int, digest: str, crc32c: int) -> EncodedChunk:
        return EncodedChunk(
            key=task.key,
            shard=task.shard,
            dtype=task.dtype,
            raw_nbytes=task.nbytes,
            digest=digest,
            crc32c=crc32c,
            payload=self._arena[at : at + nbytes],
        )

    async def _replace(self, process: _Process) -> None:
        self._processes.remove(process)
        await _end(process)
        await self._start_one()

    async def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            await _end(process)
        self._processes.clear()
        os.close(self._arena_fd)


async def _end(process: _Process) -> None:
    await process.channel.close()
    process.popen.kill()
    await asyncio.to_thread(process.popen.wait)
