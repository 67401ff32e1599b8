"""The agent's encoder processes and the arena that they write payloads into."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import mmap
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from fastcheck_codecs import max_encoded_nbytes

from fastcheck_dask.agent.async_channel import AsyncChannel
from fastcheck_dask.agent.channel import Message
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.plan import CastCheck, Job, Task
from fastcheck_dask.engine.sending import EncodedChunk
from fastcheck_dask.errors import ClosedError, ConfigError, TierError, from_wire

log = logging.getLogger(__name__)

_PAGE = 4096
#: How often a job is given to another process after one has died of it (or of something else meanwhile).
_ATTEMPTS = 3
#: Encoded jobs that may be on their way. With one, links stand while the slowest node takes the rest of it.
_SENDING = 2


class _EncoderDiedError(TierError):
    """The process ended in the middle of a job."""


@dataclass
class _Process:
    popen: subprocess.Popen[bytes]
    channel: AsyncChannel


class EncoderPool:
    """Encoder processes that share one arena; a job holds a window of it until its chunks are sent.

    Belongs to one event loop. There is one window more than processes, so that one job can be sent while the
    next is encoded.

    Parameters
    ----------
    count : int
        How many processes.
    compress : bool
        If False no job is compressed, whatever it says itself.
    cpus : sequence of int, optional
        Those that the processes may use.
    nice : int
        By which they yield to the training, 0 to 19.
    """

    def __init__(
        self, count: int, *, compress: bool = True, cpus: Sequence[int] | None = None, nice: int = 5
    ) -> None:
        self._cpus, self._nice = cpus, nice
        self._count = count
        self._compress = compress
        self._idle: asyncio.Queue[_Process] = asyncio.Queue()
        self._windows: asyncio.Queue[int] = asyncio.Queue()
        self._processes: list[_Process] = []
        self._arena_fd = os.memfd_create("fastcheck-arena", os.MFD_CLOEXEC)
        self._arena: Bits = np.empty(0, np.uint8)
        self._window_bytes = 0
        self._growing = asyncio.Lock()
        self._replacing: set[asyncio.Future[None]] = set()
        self._closed = False
        self._ids = itertools.count()

    @property
    def parallel(self) -> int:
        """How many jobs can be held at once."""
        return self._count + _SENDING

    async def start(self) -> None:
        """Start the processes."""
        for _ in range(self._count):
            await self._start_one()

    async def _start_one(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            module = "fastcheck_dask.agent.encoder"
            try:
                popen = subprocess.Popen(
                    [sys.executable, "-P", "-m", module, str(theirs.fileno()), str(self._arena_fd)],
                    pass_fds=(theirs.fileno(), self._arena_fd),
                    stdin=subprocess.DEVNULL,
                )
            except OSError as error:
                ours.close()
                raise TierError(f"an encoder process cannot be started: {error}") from error
        try:
            self._place(popen.pid)
        except BaseException:
            popen.kill()
            popen.wait()
            ours.close()
            raise
        process = _Process(popen, await AsyncChannel.over(ours))
        self._processes.append(process)
        self._idle.put_nowait(process)

    def _place(self, pid: int) -> None:
        """Give a process that has just begun its CPUs and its place behind the training."""
        with contextlib.suppress(ProcessLookupError):
            # The trainer may be nice already.
            os.setpriority(os.PRIO_PROCESS, pid, min(19, os.getpriority(os.PRIO_PROCESS, 0) + self._nice))
            if self._cpus is not None:
                try:
                    os.sched_setaffinity(pid, self._cpus)
                except OSError as error:
                    raise ConfigError(
                        f"encoder_cpus = {list(self._cpus)} cannot be had here ({error.strerror}); "
                        f"this process may use {sorted(os.sched_getaffinity(0))}"
                    ) from error

    async def prepare(self, jobs: list[Job]) -> None:
        """Make the windows large enough for the largest of `jobs`; to grow they must come back first."""
        largest = max((sum(max_encoded_nbytes(t.nbytes) for t in job.tasks) for job in jobs), default=0)
        wanted = -(-max(largest, 1) // _PAGE) * _PAGE
        async with self._growing:
            if wanted <= self._window_bytes:
                return
            returned: list[int] = []
            try:
                while self._window_bytes and len(returned) < self.parallel:
                    returned.append(await self._windows.get())
                os.ftruncate(self._arena_fd, wanted * self.parallel)
                self._arena = np.frombuffer(mmap.mmap(self._arena_fd, wanted * self.parallel), np.uint8)
                self._window_bytes = wanted
                returned = [number * wanted for number in range(self.parallel)]
            finally:
                # Also after an error: a window that does not come back would be waited for for ever.
                for window in returned:
                    self._windows.put_nowait(window)

    @contextlib.asynccontextmanager
    async def encoded(self, job: Job, current: Path, base: Path | None) -> AsyncIterator[list[EncodedChunk]]:
        """Encode a job; its payloads are valid until the block ends."""
        window = await self._windows.get()
        try:
            yield await self._encode(job, current, base, window)
        finally:
            self._windows.put_nowait(window)

    async def check(self, checks: Sequence[CastCheck], current: Path) -> list[str | None]:
        """Return the digest of each chunk that is the cast it may be, and None for the others."""
        reply = await self._ask(
            {"current": str(current), "checks": [[c.dtype, c.source, c.narrow] for c in checks]}
        )
        found: list[str | None] = reply["digests"]
        return found

    async def _encode(self, job: Job, current: Path, base: Path | None, window: int) -> list[EncodedChunk]:
        reply = await self._ask(
            {
                "window": window,
                "arena_bytes": self._arena.size,
                "current": str(current),
                "base": None if base is None else str(base),
                "compress": self._compress and job.compress,
                "tasks": [[t.dtype, t.nbytes, t.current, t.base, t.exponent] for t in job.tasks],
            }
        )
        return [self._chunk(t, r) for t, r in zip(job.tasks, reply["results"], strict=True)]

    async def _ask(self, message: Message) -> Message:
        """Have a process answer; one that dies of it is replaced, and another one is asked."""
        for _ in range(_ATTEMPTS - 1):
            try:
                return await self._ask_one(message)
            except _EncoderDiedError as error:
                log.warning("%s; the job is given to another", error)
        try:
            return await self._ask_one(message)
        except _EncoderDiedError as error:
            raise TierError(f"{error}; {_ATTEMPTS} encoder processes died of the same job") from error

    async def _ask_one(self, message: Message) -> Message:
        if len(self._processes) + len(self._replacing) < self._count:
            # One that died could not be replaced then.
            await self._start_one()
        process = await self._idle.get()
        try:
            number = next(self._ids)
            await process.channel.send({"id": number, **message})
            reply = await process.channel.receive()
        except ClosedError:
            reply = None
        except BaseException:
            # Cancelled or broken in mid-job: what it would answer next belongs to nobody.
            await self._replace(process)
            raise
        if reply is None or reply.get("id") != number:
            await self._replace(process)
            raise _EncoderDiedError(
                f"encoder process {process.popen.pid} ended in the middle of a job "
                f"(exit status {process.popen.returncode})"
            )
        self._idle.put_nowait(process)
        if "error" in reply:
            raise from_wire(reply["error"])
        return reply

    def _chunk(self, task: Task, result: list[Any]) -> EncodedChunk:
        at, nbytes, digest, crc32c, seconds, nonfinite = result
        return EncodedChunk(
            key=task.key,
            shard=task.shard,
            dtype=task.dtype,
            raw_nbytes=task.nbytes,
            digest=digest,
            crc32c=crc32c,
            payload=self._arena[at : at + nbytes],
            encode_seconds=seconds,
            nonfinite=nonfinite,
        )

    async def _replace(self, process: _Process) -> None:
        """End a process and start another; goes on to its end even if the caller is cancelled meanwhile."""
        self._processes.remove(process)
        replacing = asyncio.ensure_future(self._end_and_start(process))
        self._replacing.add(replacing)
        replacing.add_done_callback(self._replacing.discard)
        await asyncio.shield(replacing)

    async def _end_and_start(self, process: _Process) -> None:
        await _end(process)
        if not self._closed:
            await self._start_one()

    async def close(self) -> None:
        """End the processes. Idempotent."""
        if self._closed:
            return
        self._closed = True
        await asyncio.gather(*self._replacing, return_exceptions=True)
        for process in self._processes:
            await _end(process)
        self._processes.clear()
        os.close(self._arena_fd)


async def _end(process: _Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.popen.kill()
    await process.channel.close()
    await asyncio.to_thread(process.popen.wait)
