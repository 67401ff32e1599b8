"""The doubles do what the real ones do."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import inspect
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.errors import (
    CoordinationError,
    CorruptDataError,
    FencedError,
    NodeUnavailableError,
    TierError,
)
from fastcheck_dask.testing.fakes import FakeCoordinator, FakeNode, FakeNodes
from fastcheck_dask.tiers.wire import DEFAULT_LIMITS

RECORD = CommitRecord(
    run="run-1",
    generation=1,
    tag="epoch1",
    token="token-1",
    manifest_digest="ab" * 32,
    nodes=("n0", "n1"),
    addresses=("fcs://h:1", "fcs://h:2"),
    shards=1,
    parity=True,
    raw_bytes=12,
    created_unix=1.5,
)


def conformance_tests():
    """Return the tests of the conformance suites that need no process and no address."""
    found = {}
    for suite in ("test_conformance", "test_commit_conformance"):
        path = Path(__file__).parents[1] / "test_coordination" / f"{suite}.py"
        spec = importlib.util.spec_from_file_location(f"{suite}_of_coordinators", path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        found |= {name: test for name, test in vars(module).items() if suits_the_fake(name, test)}
    return found


def suits_the_fake(name, test):
    if not name.startswith("test_") or "fork" in name:
        return False
    taken = set(inspect.signature(test).parameters)
    return "coordinator" in taken and taken <= {"coordinator", "other", "record", "node", "wrong"}


globals().update(conformance_tests())


@pytest.fixture
def coordinator():
    return FakeCoordinator()


@pytest.fixture
def other(coordinator):
    return coordinator.another()


@pytest.fixture
def record():
    return lambda **fields: replace(RECORD, **fields)


@pytest.fixture
def node():
    return lambda name, **fields: replace(NodeInfo(name, "fcs://h:1", "r1", "h", 1 << 30), **fields)


def test_conformance_suite_was_found():
    assert len(conformance_tests()) > 20


def test_fake_coordinator_unreachable_raises_everywhere(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    coordinator.unreachable = True
    for call in (
        coordinator.nodes,
        lambda: coordinator.latest("run-1"),
        lambda: coordinator.commit(record(), claim),
    ):
        with pytest.raises(CoordinationError, match="does not answer"):
            call()
    coordinator.unreachable = False
    assert coordinator.commits("run-1") == ()


@pytest.mark.parametrize("done", [False, True])
def test_fake_coordinator_commit_fault_is_raised_once(coordinator, record, done):
    claim = coordinator.claim("run-1", "a")
    coordinator.commit_faults.append((CoordinationError("lost"), done))
    with pytest.raises(CoordinationError, match="lost"):
        coordinator.commit(record(), claim)
    assert bool(coordinator.commits("run-1")) is done
    assert coordinator.commit(record(), claim) == record()


# Nodes


def ask(nodes, call):
    async def main():
        client = nodes.client("n0", "")
        try:
            return await call(client)
        finally:
            await client.close()

    return asyncio.run(main())


def begin(client):
    return client.begin("run", 1, "token", shard=0, base=None, keys=["k"], reserve_bytes=0)


def test_fake_node_answers_through_the_real_handlers():
    with FakeNodes(1) as nodes:
        assert ask(nodes, begin) == ["k"]
        assert ask(nodes, lambda c: c.holds("run"))["staged"] == [[1, "token", False]]
        assert ask(nodes, lambda c: c.ping())["name"] == "n0"
        assert nodes["n0"].calls == ["begin", "holds", "ping"]
        with pytest.raises(TierError, match="never came"):
            ask(nodes, lambda c: c.prepare("run", "token", digest=_sha(b"m"), manifest=b"m"))


def _sha(data):
    return hashlib.sha256(data).hexdigest()


def test_fake_node_faults_before_and_after():
    with FakeNodes(1) as nodes:
        fake = nodes["n0"]
        fake.fail("begin", NodeUnavailableError("n0", "before"))
        with pytest.raises(NodeUnavailableError, match="before"):
            ask(nodes, begin)
        assert fake.store.holds("run")["staged"] == []
        fake.heal()
        fake.fail("begin", NodeUnavailableError("n0", "after"), after=True, skip=1)
        assert ask(nodes, begin) == ["k"]
        with pytest.raises(NodeUnavailableError, match="after"):
            ask(nodes, begin)
        assert fake.store.holds("run")["staged"] == [[1, "token", False]]
        fake.restart()
        fake.heal()
        assert ask(nodes, lambda c: c.holds("run"))["staged"] == []


def test_fake_node_down_is_unavailable_and_not_registered():
    with FakeNodes(2) as nodes:
        nodes["n0"].down = True
        assert [info.name for info in nodes.infos] == ["n1"]
        with pytest.raises(NodeUnavailableError):
            ask(nodes, begin)


def test_fake_client_refuses_what_the_wire_refuses():
    with FakeNodes(1) as nodes:
        frames = [b"x"] * (DEFAULT_LIMITS.frames + 1)
        with pytest.raises(TierError, match="frames"):
            ask(nodes, lambda c: c._request({"op": "put"}, frames))
        assert nodes["n0"].calls == []


def test_fake_client_frames_are_copies():
    seen = []
    with FakeNodes(1) as nodes:
        nodes["n0"].before["put"] = lambda request: seen.append(request["frames"][0])
        data = np.arange(8, dtype=np.uint8)
        with pytest.raises(CorruptDataError):
            ask(nodes, lambda c: c._request({"op": "put", "run": "r", "token": "t", "chunks": []}, [data]))
    data[:] = 0
    assert seen[0].tolist() == list(range(8))


def test_fake_nodes_close_ends_their_threads():
    before = set(threading.enumerate())
    fake = FakeNode("n0")
    asyncio.run(fake.serve({"op": "holds", "run": "r"}))
    workers = [t for t in set(threading.enumerate()) - before if t.name.startswith("fastcheck-store")]
    assert workers
    fake.close()
    fake.close()
    for worker in workers:
        worker.join(30)
        assert not worker.is_alive()


def test_coordinator_unreachable_its_entries_are_too_and_the_session_lives_on(coordinator, other):
    coordinator.entries.apply(Create("a", b"", ephemeral=True))
    coordinator.unreachable = True
    assert not coordinator.entries.connected
    with pytest.raises(CoordinationError):
        coordinator.entries.get("a")
    assert other.entries.get("a").session == coordinator.entries.session
    coordinator.unreachable = False
    assert coordinator.entries.connected


def test_coordinator_relocates_as_the_real_ones(coordinator, other, record):
    read = record()
    coordinator.commit(read, coordinator.claim(read.run, "a"))
    moved = read.held_by(tuple(f"{name}-next" for name in read.nodes), read.addresses)
    with pytest.raises(FencedError):
        other.relocate(read, moved, fencing_token=0)
    other.entries.apply(Create("epoch", b""))
    assert other.relocate(read, moved, fencing_token=0) == moved == coordinator.latest(read.run)
