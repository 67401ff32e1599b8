"""Have chunks encoded, and send them while the next ones are being encoded."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, TypeVar

from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.plan import CastCheck, Job
from fastcheck_dask.tiers.descriptors import Descriptor

_Result = TypeVar("_Result")

#: Raw bytes of one job: a message to each node.
JOB_BYTES = 16 * 2**20


@dataclass(frozen=True)
class EncodedChunk:
    """One encoded chunk; the payload lies in the arena and is valid while its job is held."""

    key: str
    shard: int
    dtype: str
    raw_nbytes: int
    digest: str
    crc32c: int
    payload: Bits
    #: What encoding it took one process.
    encode_seconds: float = 0.0
    #: Whether it holds a NaN or an infinity.
    nonfinite: bool = False

    @property
    def descriptor(self) -> Descriptor:
        """What travels beside the payload."""
        return Descriptor(
            self.key, self.dtype, self.raw_nbytes, self.digest, self.crc32c, self.payload.nbytes
        )


class Encoder(Protocol):
    """Encodes jobs; implemented by the agent's encoder processes."""

    @property
    def parallel(self) -> int:
        """How many jobs can be held at once."""
        ...

    async def prepare(self, jobs: list[Job]) -> None:
        """Make room for the largest job."""
        ...

    def encoded(
        self, job: Job, current: Path, base: Path | None
    ) -> AbstractAsyncContextManager[list[EncodedChunk]]:
        """Encode a job from the slots at these paths; the chunks are valid until the block ends."""
        ...

    async def check(self, checks: Sequence[CastCheck], current: Path) -> list[str | None]:
        """Return the digest of each chunk that is the cast it may be, and None for the others."""
        ...


async def send_jobs(
    encoder: Encoder,
    jobs: list[Job],
    send: Callable[[list[EncodedChunk]], Awaitable[None]],
    current: Path,
    base: Path | None,
    *,
    current_job: Callable[[Job], Job] = lambda job: job,
) -> None:
    """Encode jobs and hand their chunks to `send`: the next ones are encoded while one is being sent.

    `current_job` may change a job when its turn comes; its chunks and their raw bytes stay the same.
    """
    await encoder.prepare(jobs)
    waiting = map(current_job, jobs)

    async def lane() -> None:
        for job in waiting:
            async with encoder.encoded(job, current, base) as chunks:
                await send(chunks)

    await together(lane() for _ in range(encoder.parallel))


async def together(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Run calls at once and return their results; the first error cancels the others and is raised itself."""
    tasks = [asyncio.ensure_future(call) for call in calls]
    try:
        return list(await asyncio.gather(*tasks))
    except BaseException:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


async def in_thread(call: Callable[..., _Result], *arguments: Any) -> _Result:
    """Return what a call in another thread returns; cancelled or not, this ends after the call has ended.

    The memory that it reads, and the names that it writes, are free for others then.
    """
    task = asyncio.ensure_future(asyncio.to_thread(call, *arguments))
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        await asyncio.gather(task, return_exceptions=True)
        raise
