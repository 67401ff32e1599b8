"""Sending: several things at once, jobs bounded in number, and the first error."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import pytest

from fastcheck_dask.engine.sending import send_jobs, together
from fastcheck_dask.errors import (
    TierError,
)


def test_together_first_error_cancels_others_and_is_raised():
    ended = []

    async def waits():
        try:
            await asyncio.Event().wait()
        finally:
            ended.append("waits")

    async def fails():
        raise TierError("first")

    async def run():
        await together([waits(), fails(), waits()])

    with pytest.raises(TierError, match="first"):
        asyncio.run(run())
    assert ended == ["waits", "waits"]


def test_together_results_come_in_order():
    async def give(value):
        return value

    async def run():
        return await together(give(value) for value in (3, 1, 2))

    assert asyncio.run(run()) == [3, 1, 2]


def test_send_jobs_holds_at_most_parallel_jobs_and_sends_each_once(rig, states):
    run = rig()
    saved = run.save(states.of(1))
    jobs = run.encoder.jobs[:]
    run.encoder.jobs.clear()
    jobs = [replace(job, tasks=(task,)) for job in jobs for task in job.tasks]
    held, most, sent = 0, 0, []

    async def send(chunks):
        nonlocal held, most
        held += 1
        most = max(most, held)
        await asyncio.sleep(0)
        sent.extend(chunk.key for chunk in chunks)
        held -= 1

    asyncio.run(send_jobs(run.encoder, jobs, send, run.base.slot, None))
    assert sorted(sent) == sorted(saved.manifest.digests)
    assert most == run.encoder.parallel
