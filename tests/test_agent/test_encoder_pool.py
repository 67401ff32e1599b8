"""The pool with real encoder processes."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex, XorDelta, checksum, is_delta

from fastcheck_dask.agent import encoder_pool
from fastcheck_dask.agent.encoder_pool import EncoderPool
from fastcheck_dask.engine.encode import digest
from fastcheck_dask.engine.plan import CastCheck, Job, Task
from fastcheck_dask.errors import ConfigError, FastCheckError, TierError
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.tiers.local import LocalTier, Slot

NBYTES = 40_000


@pytest.fixture
def slots(tmp_path: Path) -> Iterator[tuple[Slot, Slot]]:
    with LocalTier("run", tmp_path) as local:
        for seed, slot in enumerate(local.slots):
            slot.reserve(NBYTES)
            slot.data[:NBYTES] = (
                np.random.default_rng(seed).normal(size=NBYTES // 4).astype(np.float32).view(np.uint8)
            )
        yield local.slots


def task(offset: int = 0, nbytes: int = NBYTES, *, delta: bool = False) -> Task:
    pieces = ((offset, nbytes),)
    return Task(f"w/c/{offset}", 0, "float32", nbytes, pieces, pieces if delta else None)


def run(test: Callable[[EncoderPool], Awaitable[None]], count: int = 1, *, compress: bool = True) -> None:
    async def main() -> None:
        pool = EncoderPool(count, compress=compress)
        await pool.start()
        try:
            async with asyncio.timeout(60):
                await test(pool)
        finally:
            processes = [p.popen for p in pool._processes]
            await pool.close()
            await pool.close()
            assert all(p.returncode is not None for p in processes)

    asyncio.run(main())


def test_encoded_payloads_decode_to_what_the_slots_hold(slots: tuple[Slot, Slot]) -> None:
    current, base = slots

    async def test(pool: EncoderPool) -> None:
        job = Job((task(0, 20_000), task(20_000, 20_000, delta=True)))
        await pool.prepare([job])
        async with pool.encoded(job, current.path, base.path) as (whole, delta):
            for chunk in (whole, delta):
                assert chunk.crc32c == checksum(chunk.payload)
            assert (
                PrefixIndex(dtype="float32").decode(whole.payload).tobytes()
                == current.data[:20_000].tobytes()
            )
            assert whole.digest == digest(current.data[:20_000])
            bits, before = current.data[20_000:NBYTES], base.data[20_000:NBYTES]
            assert delta.digest == digest(bits)
            try:
                found = XorDelta(base=before, dtype="float32").decode(delta.payload)
            except ValueError:
                found = PrefixIndex(dtype="float32").decode(delta.payload)
            assert found.tobytes() == bits.tobytes()

    run(test)


@pytest.mark.parametrize(("of_pool", "of_job"), [(False, True), (True, False), (True, True)])
def test_encoded_raw_if_pool_or_job_says_so(slots: tuple[Slot, Slot], of_pool: bool, of_job: bool) -> None:
    current, base = slots
    current.data[:NBYTES] = base.data[:NBYTES]

    async def test(pool: EncoderPool) -> None:
        job = Job((task(delta=True),), compress=of_job)
        await pool.prepare([job])
        async with pool.encoded(job, current.path, base.path) as (chunk,):
            raw = not (of_pool and of_job)
            assert is_delta(chunk.payload) is not raw
            assert (chunk.payload.nbytes > NBYTES) is raw
            found = XorDelta(base=base.data[:NBYTES], dtype="float32").decode(chunk.payload)
            assert found.tobytes() == current.data[:NBYTES].tobytes()
            assert chunk.digest == digest(current.data[:NBYTES])
            assert chunk.encode_seconds > 0

    run(test, compress=of_pool)


def test_check_tells_the_digest_of_casts_and_none_for_others(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots
    made = cast(current.data[:20_000], "bfloat16")
    current.data[20_000:30_000] = made
    check = CastCheck("w/c/0", "bfloat16", source=(0, 20_000), narrow=(20_000, 10_000))

    async def test(pool: EncoderPool) -> None:
        checks = [check, replace(check, dtype="float16"), replace(check, source=(4, 20_000))]
        assert await pool.check(checks, current.path) == [digest(made), None, None]
        pool._processes[0].popen.kill()
        assert await pool.check([check], current.path) == [digest(made)]

    run(test)


def test_encoded_more_jobs_than_windows_all_come(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        jobs = [Job((task(4000 * i, 4000),)) for i in range(10)]
        await pool.prepare(jobs[:1])

        async def one(job: Job) -> bytes:
            async with pool.encoded(job, current.path, None) as (chunk,):
                await asyncio.sleep(0)
                return PrefixIndex(dtype="float32").decode(chunk.payload).tobytes()

        found = await asyncio.gather(*map(one, jobs))
        assert b"".join(found) == current.data[:NBYTES].tobytes()

    run(test, 2)


def test_prepare_larger_jobs_waits_for_windows_and_grows(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        small, large = Job((task(0, 4000),)), Job((task(),))
        await pool.prepare([small])
        async with pool.encoded(small, current.path, None) as (chunk,):
            growing = asyncio.ensure_future(pool.prepare([large]))
            await asyncio.sleep(0)
            assert not growing.done()
            assert (
                PrefixIndex(dtype="float32").decode(chunk.payload).tobytes() == current.data[:4000].tobytes()
            )
        await growing
        async with pool.encoded(large, current.path, None) as (chunk,):
            assert chunk.digest == digest(current.data[:NBYTES])

    run(test)


def test_prepare_cancelled_gives_the_windows_back(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        small = Job((task(0, 4000),))
        await pool.prepare([small])
        async with pool.encoded(small, current.path, None):
            growing = asyncio.ensure_future(pool.prepare([Job((task(),))]))
            await asyncio.sleep(0)
            growing.cancel()
            await asyncio.gather(growing, return_exceptions=True)
        assert pool._windows.qsize() == pool.parallel

    run(test)


def test_encoded_failed_job_raises_and_the_process_goes_on(slots: tuple[Slot, Slot], tmp_path: Path) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        job = Job((task(),))
        await pool.prepare([job])
        before = [p.popen.pid for p in pool._processes]
        with pytest.raises(FastCheckError, match="nowhere"):
            async with pool.encoded(job, tmp_path / "nowhere", None):
                pass
        async with pool.encoded(job, current.path, None) as (chunk,):
            assert chunk.digest == digest(current.data[:NBYTES])
        assert [p.popen.pid for p in pool._processes] == before

    run(test)


def test_encoded_process_killed_another_does_the_job(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        job = Job((task(),))
        await pool.prepare([job])
        for _ in range(2):
            (process,) = pool._processes
            process.popen.kill()
            async with pool.encoded(job, current.path, None) as (chunk,):
                assert chunk.digest == digest(current.data[:NBYTES])
            assert process.popen.returncode is not None, "reaped"
        assert len(pool._processes) == 1
        assert pool._windows.qsize() == pool.parallel

    run(test)


def test_encoded_job_kills_every_process_raises(
    slots: tuple[Slot, Slot], monkeypatch: pytest.MonkeyPatch
) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        job = Job((task(),))
        await pool.prepare([job])
        start = subprocess.Popen

        def dying(_: list[str], **options: object) -> subprocess.Popen[bytes]:
            return start(["/bin/false"], **options)  # type: ignore[call-overload,no-any-return]

        with monkeypatch.context() as patch:
            patch.setattr(encoder_pool.subprocess, "Popen", dying)
            pool._processes[0].popen.kill()
            with pytest.raises(TierError, match="3 encoder processes died of the same job"):
                async with pool.encoded(job, current.path, None):
                    pass
        async with pool.encoded(job, current.path, None) as (chunk,):
            assert chunk.digest == digest(current.data[:NBYTES])

    run(test)


def test_encoded_cancelled_in_mid_job_process_is_replaced(slots: tuple[Slot, Slot]) -> None:
    current, _ = slots

    async def test(pool: EncoderPool) -> None:
        job = Job((task(),))
        await pool.prepare([job])
        (process,) = pool._processes
        os.kill(process.popen.pid, 19)

        async def encode() -> None:
            async with pool.encoded(job, current.path, None):
                raise AssertionError("a stopped process cannot answer")

        working = asyncio.ensure_future(encode())
        while pool._idle.qsize():
            await asyncio.sleep(0)
        working.cancel()
        await asyncio.sleep(0)
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        assert working.cancelled()
        async with pool.encoded(job, current.path, None) as (chunk,):
            assert chunk.digest == digest(current.data[:NBYTES])
        assert process.popen.returncode is not None
        assert len(pool._processes) == 1

    run(test)


# Where the processes run


def test_processes_get_their_cpus_and_yield(slots: tuple[Slot, Slot]) -> None:
    cpu = min(os.sched_getaffinity(0))

    async def main() -> None:
        pool = EncoderPool(2, cpus=(cpu,), nice=7)
        await pool.start()
        try:
            job = Job((task(),))
            await pool.prepare([job])
            async with pool.encoded(job, slots[0].path, None):
                pids = [process.popen.pid for process in pool._processes]
                assert [os.sched_getaffinity(pid) for pid in pids] == [{cpu}] * 2
                own = os.getpriority(os.PRIO_PROCESS, 0)
                assert [os.getpriority(os.PRIO_PROCESS, pid) for pid in pids] == [min(19, own + 7)] * 2
        finally:
            await pool.close()

    asyncio.run(main())


def test_cpus_that_cannot_be_had_are_a_clear_error_and_leave_no_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pids: list[int] = []

    def refuse(pid: int, _cpus: object) -> None:
        pids.append(pid)
        raise OSError(22, "Invalid argument")

    monkeypatch.setattr(os, "sched_setaffinity", refuse)

    async def main() -> None:
        pool = EncoderPool(1, cpus=(77,))
        try:
            with pytest.raises(ConfigError, match=r"encoder_cpus = \[77\] cannot be had here"):
                await pool.start()
        finally:
            await pool.close()

    asyncio.run(main())
    with pytest.raises(ProcessLookupError):
        os.kill(pids[0], 0)


def test_encoder_starts_without_what_it_does_not_need() -> None:
    code = "import sys, fastcheck_dask.agent.encoder; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", code], capture_output=True, text=True, check=True)
    assert not {"asyncio", "ssl", "dask", "distributed", "zarr", "torch"} & set(done.stdout.split())
