"""Nodes that fail in the middle of a repair: at each message, the one that gives or the one that takes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.engine.repair import repair_shard
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.master.repairing import RepairDuty
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, quick_client


class Master:
    """Repairs in this process, one round whenever it is told to."""

    in_force = True
    fencing_token = 0

    def __init__(self, coordinator: Coordinator) -> None:
        self.clock = FakeClock()
        coordinator.entries.apply(Create("epoch", b"{}"))
        repair = partial(repair_shard, client=quick_client)
        self._duty = RepairDuty(coordinator, quick_client, repair, clock=self.clock)

    def round(self) -> FastCheckError | None:
        """Do one round; return why something was not repaired."""
        self.clock.advance(1000.0)
        leadership: Any = self
        try:
            asyncio.run(self._duty.run(leadership))
        except FastCheckError as error:
            return error
        return None


@pytest.fixture
def master(faulty: FaultyCluster) -> Iterator[Master]:
    with closing(connect(faulty.coordinator)) as coordinator:
        yield Master(coordinator)


@pytest.mark.parametrize("persisted", [False, True])
@pytest.mark.parametrize(
    ("who", "op"),
    [("taker", "adopt"), ("taker", "repair"), ("giver", "manifest"), ("giver", "read")],
)
def test_node_lost_in_the_middle_of_a_repair(
    tmp_path: Path, faulty: FaultyCluster, master: Master, who: str, op: str, persisted: bool
) -> None:
    options = {"num_shards": 2, "persist_every": int(persisted)}
    with TrainingHost(tmp_path, faulty.coordinator, options) as host:
        manager = host.manager()
        host.save(manager, 1, level="object" if persisted else "peers")
        record = host.records()[-1]
        lost, giver = record.nodes[0], record.nodes[1]
        (spare,) = set(faulty.proxies) - set(record.nodes)
        faulty.unregister(lost)
        faulty.proxies[lost].cut()
        failing = faulty.proxies[spare if who == "taker" else giver]
        failing.hold(op)
        with ThreadPoolExecutor(1) as pool:
            repairing = pool.submit(master.round)
            failing.wait_held(op)
            failing.cut()
            error = repairing.result(60)
        after = host.records()[-1]
        if who == "taker":
            # Nothing is lost: the node that failed holds nothing of it yet.
            assert error is not None
            assert after == record
            assert_is_state(host.load_elsewhere(objects=False)[0], 1)
        elif persisted:
            # What the second one held, too, is in the object tier, and the others still give the rest.
            assert error is None
            assert after.nodes == (spare, *record.nodes[1:])
        else:
            assert after == record or op == "manifest"
        failing.release()
        failing.heal()
        while master.round() is not None:
            pass
        assert host.records()[-1].nodes == (spare, *record.nodes[1:])
        host.lose_memory()
        faulty.proxies[giver].cut()
        assert_is_state(host.load_elsewhere(objects=False)[0], 1)


def test_node_that_takes_over_starts_again_before_the_record_says_so(
    tmp_path: Path, faulty: FaultyCluster, master: Master
) -> None:
    with TrainingHost(tmp_path, faulty.coordinator, {"num_shards": 2, "persist_every": 0}) as host:
        host.save(host.manager(), 1)
        record = host.records()[-1]
        (spare,) = set(faulty.proxies) - set(record.nodes)
        faulty.unregister(record.nodes[2])
        faulty.proxies[record.nodes[2]].cut()
        faulty.proxies[spare].hold("repair")
        with ThreadPoolExecutor(1) as pool:
            repairing = pool.submit(master.round)
            faulty.proxies[spare].wait_held("repair")
            faulty.restart(spare)
            faulty.proxies[spare].release()
            assert repairing.result(60) is not None
        assert host.records()[-1] == record
        assert master.round() is None
        assert host.records()[-1].nodes == (*record.nodes[:2], spare)
        host.lose_memory()
        faulty.proxies[record.nodes[0]].cut()
        assert_is_state(host.load_elsewhere(objects=False)[0], 1)
