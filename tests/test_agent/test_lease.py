"""The lease of a run is renewed with each commit, and while nothing is saved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fastcheck_dask.agent.lease import LeaseKeeper
from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.testing.fakes import FakeNodes


@pytest.fixture
def nodes() -> Iterator[FakeNodes]:
    with FakeNodes(3) as made:
        yield made


def record(*names: str) -> CommitRecord:
    addresses = tuple("fcs://127.0.0.1:1" for _ in names)
    return CommitRecord("run", 1, "t", "token", "0" * 64, names, addresses, 1, True, 1, 0.0)


async def until_leases(nodes: FakeNodes, *counts: int) -> None:
    async with asyncio.timeout(20):
        while any(node.calls.count("lease") < n for node, n in zip(nodes, counts, strict=True)):
            await asyncio.sleep(0)


def test_nodes_of_the_newest_commit_are_renewed_at_once_and_again(nodes: FakeNodes) -> None:
    async def main() -> None:
        keeper = LeaseKeeper("run", nodes.client, 3600.0)
        keeper.note(record("n0", "n1"))
        await until_leases(nodes, 1, 1, 0)
        keeper.note(record("n1", "n2"))
        await until_leases(nodes, 1, 2, 1)
        assert nodes["n0"].calls.count("lease") == 1
        await keeper.close()
        await keeper.close()
        assert [node.calls.count("lease") for node in nodes] == [1, 3, 2]
        # By the timer, although nothing is saved.
        quick = LeaseKeeper("run", nodes.client, 0.04)
        quick.note(record("n0"))
        await until_leases(nodes, 4, 0, 0)
        await quick.close()

    asyncio.run(main())
    assert all(client._closed for client in nodes.clients)


def test_node_that_is_down_does_not_keep_others_from_being_renewed(nodes: FakeNodes) -> None:
    async def main() -> None:
        nodes["n0"].down = True
        keeper = LeaseKeeper("run", nodes.client, 3600.0)
        keeper.note(record("n0", "n1"))
        await until_leases(nodes, 1, 1, 0)
        nodes["n0"].down = False
        keeper.note(record("n0", "n1"))
        await until_leases(nodes, 2, 2, 0)
        await keeper.close()

    asyncio.run(main())


def test_keeper_that_ends_at_once_has_renewed(nodes: FakeNodes) -> None:
    async def main() -> None:
        keeper = LeaseKeeper("run", nodes.client, 3600.0)
        await keeper.close()
        keeper.note(record("n0", "n1"))
        await keeper.close()

    asyncio.run(main())
    assert [node.calls.count("lease") for node in nodes] == [1, 1, 0]


def test_lease_reaches_the_store_for_as_long_as_was_asked(nodes: FakeNodes) -> None:
    store = nodes["n0"].store
    store.begin("run", 1, "token", shard=0, base=None, keys=["a"], reserve_bytes=0)

    async def main() -> None:
        keeper = LeaseKeeper("run", nodes.client, 500.0)
        keeper.note(record("n0"))
        await keeper.renew()
        await keeper.close()

    asyncio.run(main())
    lease = store.report()["runs"]["run"]["lease"]
    assert lease["asked"]
    assert 0 < lease["ends_seconds"] <= 500


def test_coordinator_is_told_by_the_timer_alone_and_at_the_end(nodes: FakeNodes) -> None:
    told: list[int] = []

    async def main() -> None:
        keeper = LeaseKeeper("run", nodes.client, 3600.0, lambda: told.append(1))
        for count in (1, 2, 3):
            keeper.note(record("n0"))
            await until_leases(nodes, count, 0, 0)
        assert len(told) == 1
        await keeper.close()
        assert len(told) == 2
        quick = LeaseKeeper("run", nodes.client, 0.04, lambda: told.append(1))
        quick.note(record("n0"))
        async with asyncio.timeout(20):
            while len(told) < 5:
                await asyncio.sleep(0)
        await quick.close()

    asyncio.run(main())
