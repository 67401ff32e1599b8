"""An encoder without processes."""

from __future__ import annotations

import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

import numpy as np
from fastcheck_codecs import max_encoded_nbytes

from fastcheck_dask.engine.encode import TaskEncoder, check_cast
from fastcheck_dask.engine.plan import CastCheck, Job, Task
from fastcheck_dask.engine.sending import EncodedChunk
from fastcheck_dask.tiers.slot import Slot
from fastcheck_dask.tiers.wire import Bits


class InlineEncoder:
    """Encodes in the calling thread, with the codecs and from the slots that the encoder processes use."""

    def __init__(self, parallel: int = 2) -> None:
        self._parallel = parallel
        self._encoder = TaskEncoder()
        #: Every job that was encoded.
        self.jobs: list[Job] = []

    @property
    def parallel(self) -> int:
        """How many jobs can be held at once."""
        return self._parallel

    async def prepare(self, jobs: list[Job]) -> None:
        """Do nothing: payloads lie in memory of their own."""

    @contextlib.asynccontextmanager
    async def encoded(self, job: Job, current: Path, base: Path | None) -> AsyncIterator[list[EncodedChunk]]:
        """Encode a job; its payloads are overwritten when the block ends, as the arena's are."""
        self.jobs.append(job)
        now = Slot(current, readonly=True).data
        before = None if base is None else Slot(base, readonly=True).data
        chunks = [self._encode(task, now, before, compress=job.compress) for task in job.tasks]
        yield chunks
        for chunk in chunks:
            chunk.payload[:] = 0xEE

    async def check(self, checks: Sequence[CastCheck], current: Path) -> list[str | None]:
        """Compare chunks with the casts of others."""
        now = Slot(current, readonly=True).data
        return [check_cast(now, source=c.source, narrow=c.narrow, dtype=c.dtype) for c in checks]

    def _encode(self, task: Task, now: Bits, before: Bits | None, *, compress: bool) -> EncodedChunk:
        started = time.perf_counter()
        out = np.empty(max_encoded_nbytes(task.nbytes), np.uint8)
        payload = self._encoder.encode(
            (now, task.current),
            None if task.base is None or before is None else (before, task.base),
            dtype=task.dtype,
            nbytes=task.nbytes,
            out=out,
            compress=compress,
            exponent=task.exponent,
        )
        return EncodedChunk(
            key=task.key,
            shard=task.shard,
            dtype=task.dtype,
            raw_nbytes=task.nbytes,
            digest=payload.digest,
            crc32c=payload.crc32c,
            payload=out[: payload.nbytes],
            encode_seconds=time.perf_counter() - started,
            nonfinite=payload.nonfinite,
        )
