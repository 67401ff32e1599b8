"""The prober against real data servers and nodes that do not answer."""

from __future__ import annotations

import asyncio

import pytest

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.placement import probe
from fastcheck_dask.placement.outlook import MEASURED_FROM_BYTES
from fastcheck_dask.placement.probe import Prober
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient


@pytest.fixture
def servers():
    made = [DataServer(ShardStore(f"n{i}", 1000), open_store) for i in range(3)]
    for server in made:
        server.start()
    yield [NodeInfo(f"n{i}", server.address, "r", "h", 1000) for i, server in enumerate(made)]
    for server in made:
        server.close()


def test_ask_some_learns_latency_and_load_and_forgets_who_is_gone(servers):
    async def main():
        prober = Prober(PeerClient)
        gone = NodeInfo("gone", "fcs://127.0.0.1:1", "r", "h", 1000)
        prober.wake([*servers, gone])
        await prober.ask_some()
        assert prober.outlooks.keys() == {"n0", "n1", "n2"}
        assert all(0 < o.latency_seconds < 10 and o.used_share == 0.0 for o in prober.outlooks.values())
        prober.transferred({"n0": (MEASURED_FROM_BYTES, 2.0)})
        assert prober.outlooks["n0"].seconds_per_byte == 2.0 / MEASURED_FROM_BYTES
        prober.wake(servers[:1])
        await prober.ask_some()
        assert prober.outlooks.keys() == {"n0"}
        await prober._close()

    asyncio.run(main())


def test_run_stops_asking_when_nothing_is_saved_and_starts_again(servers, monkeypatch):
    monkeypatch.setattr(probe, "PROBE_SECONDS", 0.0)

    async def main():
        clock = FakeClock()
        prober = Prober(PeerClient, clock=clock)
        asked = asyncio.Event()
        ask_some, closed = prober.ask_some, prober._close
        resting = asyncio.Event()

        async def asking():
            await ask_some()
            asked.set()

        async def closing():
            await closed()
            resting.set()

        prober.ask_some, prober._close = asking, closing
        running = asyncio.create_task(prober.run())
        for _ in range(2):
            prober.wake(servers)
            await asked.wait()
            clock.advance(probe.IDLE_SECONDS)
            await resting.wait()
            assert not prober._awake.is_set()
            assert prober._clients == {}
            asked.clear()
            resting.clear()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        assert resting.is_set()

    asyncio.run(asyncio.wait_for(main(), 30))
