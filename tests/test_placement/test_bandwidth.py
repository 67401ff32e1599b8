"""Rates of links that are made up, and of a real one; the number of shards that follows."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import NodeUnavailableError
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.placement import bandwidth
from fastcheck_dask.placement.bandwidth import (
    LARGEST_PIECE_BYTES,
    PIECE_BYTES,
    PIECE_SECONDS,
    QUICK_BYTES,
    SHARDS_CAP,
    Bandwidths,
    measure,
    measure_out,
)
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient


def found(out, *to_node):
    return Bandwidths({f"n{i}": rate for i, rate in enumerate(to_node)}, {}, out, 0.0)


@pytest.mark.parametrize(
    ("out", "to_node", "shards"),
    [
        (375.0, [125.0] * 4, 3),
        (380.0, [124.0, 126.0, 125.0, 90.0], 3),
        (125.0, [125.0] * 4, 1),
        (60.0, [125.0] * 4, 1),
        (200.0, [125.0] * 4, 2),
        (9000.0, [125.0] * 9, SHARDS_CAP),
    ],
)
def test_shards_take_together_what_goes_out(out, to_node, shards):
    assert found(out, *to_node).shards == shards


@given(st.floats(1, 1e12), st.lists(st.floats(1, 1e12), min_size=1, max_size=6))
def test_shards_any_rates_are_within_bounds(out, to_node):
    assert 1 <= found(out, *to_node).shards <= SHARDS_CAP


@pytest.mark.parametrize(
    ("ratio", "current", "shards"),
    [
        (3.0, None, 3),
        (3.0, 0, 3),
        (3.0, 2, 3),
        (2.39, 2, 2),
        (2.41, 2, 3),
        (1.95, 3, 3),
        (1.89, 3, 2),
        (9.0, 7, SHARDS_CAP),
        (4.9, 5, 5),
    ],
)
def test_shards_in_use_stay_unless_clearly_too_many_or_few(ratio, current, shards):
    assert found(100.0 * ratio, 100.0).shards_after(current) == shards


def test_measure_nodes_that_do_not_answer_is_an_error():
    with pytest.raises(NodeUnavailableError):
        asyncio.run(measure([NodeInfo("gone", "fcs://127.0.0.1:1", "r", "h", 1)], PeerClient))


def test_measure_real_nodes_gives_rates_both_ways(monkeypatch):
    monkeypatch.setattr(bandwidth, "WARM_UP_SECONDS", 0.0)
    monkeypatch.setattr(bandwidth, "MEASURED_SECONDS", 0.02)
    servers = [DataServer(ShardStore(f"n{i}", 1000), open_store) for i in range(2)]
    for server in servers:
        server.start()
    try:
        nodes = [NodeInfo(f"n{i}", s.address, "r", "h", 1) for i, s in enumerate(servers)]
        rates = asyncio.run(measure(nodes, PeerClient))
    finally:
        for server in servers:
            server.close()
    assert rates.to_node.keys() == rates.from_node.keys() == {"n0", "n1"}
    assert min(*rates.to_node.values(), *rates.from_node.values(), rates.out, rates.into) > 1e5
    assert 1 <= rates.shards <= 2 or rates.out > rates.one


@pytest.mark.parametrize("rate", [1e5, 1e6, 12.5e6, 125e6, 5e9])
def test_rate_is_that_of_the_link_whatever_it_is(rate):
    class Link:
        at = 0.0
        moved = 0

        def now(self):
            return self.at

        async def transfer(self, nbytes):
            await asyncio.sleep(0)
            self.at += nbytes / rate
            self.moved += nbytes

    link = Link()
    assert asyncio.run(bandwidth._rate([link.transfer], clock=link)) == pytest.approx(rate, rel=0.3)
    quick = {"warm_up_seconds": 0.1, "seconds": 0.25, "limit_bytes": QUICK_BYTES}
    link.moved, before = 0, link.at
    assert asyncio.run(bandwidth._rate([link.transfer], clock=link, **quick)) == pytest.approx(rate, rel=0.3)
    # What is on its way when the time is over, or the limit reached, still arrives.
    assert link.moved <= QUICK_BYTES + 2 * LARGEST_PIECE_BYTES
    on_its_way = max(PIECE_BYTES / rate, min(LARGEST_PIECE_BYTES / rate, 4 * PIECE_SECONDS))
    assert link.at - before <= 0.35 + 2 * on_its_way


def test_measure_out_sends_no_more_than_its_limit_and_fetches_nothing(monkeypatch):
    monkeypatch.setattr(bandwidth, "QUICK_BYTES", 2**20)
    server = DataServer(ShardStore("n0", 1000), open_store)
    server.start()
    clients = []

    def client(name, address):
        clients.append(PeerClient(name, address))
        return clients[-1]

    try:
        rates = asyncio.run(measure_out([NodeInfo("n0", server.address, "r", "h", 1)], client))
    finally:
        server.close()
    assert rates.to_node["n0"] > 0 < rates.out
    assert (rates.from_node, rates.into) == ({}, 0.0)
    # Twice, and what was on its way in two lanes.
    assert clients[0].sent_bytes < 2 * (2**20 + 2 * LARGEST_PIECE_BYTES)
    assert clients[0].received_bytes < 2**16
