"""The data port: who waits for whom, and what it survives."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import closing, suppress
from functools import partial
from typing import Any

import numpy as np
import pytest

from fastcheck_dask.errors import (
    ConfigError,
    NodeFullError,
    NodeUnavailableError,
    TierError,
)
from fastcheck_dask.node import data_server
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.node_client import client_of, save_over, with_client
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls, open_comm


@pytest.fixture
def serve(serve: Any, tls: DataTls | None) -> Any:
    """Have every test run on a plain port, and on one with TLS."""
    return partial(serve, tls=tls)


class Stuck:
    """An object tier that hangs until it is let go."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.go_on = threading.Event()

    def write(self, path: str, data: Any) -> None:
        self.reached.set()
        assert self.go_on.wait(30)


def test_node_at_work_says_so_and_answers_others(
    store: ShardStore, serve: Any, author: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "WORKING_SECONDS", 0.01)
    author.save({"a": chunks.bits(1)})
    stuck = Stuck()
    server = serve(store, lambda location: stuck)

    async def main() -> dict[str, Any]:
        comm = await open_comm(server.address, 10, server._tls)
        run, generation, token = author.name
        request = {"op": "persist", "run": run, "generation": generation, "token": token}
        await comm.write({**request, "location": "x", "directory": "d", "keys": ["a"]})
        for _ in range(3):
            assert (await comm.read())["status"] == "working"
        assert stuck.reached.is_set()
        client = client_of(server)
        assert (await client.ping())["name"] == "node-1"
        await client.close()
        stuck.go_on.set()
        while (reply := await comm.read())["status"] == "working":
            pass
        comm.abort()
        return reply

    try:
        assert asyncio.run(main())["status"] == "ok"
    finally:
        stuck.go_on.set()


@pytest.mark.parametrize(("dscp", "tos"), [(None, 0), (46, 184)])
def test_dscp_marks_the_packets_of_the_node(
    store: ShardStore, serve: Any, dscp: int | None, tos: int
) -> None:
    server = serve(store, dscp=dscp)

    async def use(client: PeerClient) -> None:
        await client.ping()
        (comm,) = server._comms
        assert comm.stream.socket.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == tos

    with_client(server, use)


def test_reply_over_the_message_limit_is_a_typed_error(
    store: ShardStore, serve: Any, author: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    author.save({"a": chunks.bits(1)})
    monkeypatch.setattr(data_server, "DEFAULT_LIMITS", wire.Limits(message_bytes=100))

    async def use(client: PeerClient) -> None:
        with pytest.raises(TierError, match="at once"):
            await client.read(*author.name, keys=["a"])

    with_client(serve(store), use)


def test_garbage_costs_its_connection_only(store: ShardStore, serve: Any) -> None:
    server = serve(store)
    host, port = wire.location_of(server.address).split(":")
    with closing(socket.create_connection((host, int(port)), timeout=10)) as peer:
        peer.sendall(b"\x80\x05garbage" * 10)
        with suppress(ConnectionResetError):
            # Over TLS an alert, and no more.
            assert server._tls or peer.recv(1) == b""

    async def use(client: PeerClient) -> None:
        assert (await client.ping())["used_bytes"] == 0

    with_client(server, use)


def test_connection_too_many_is_dropped(
    store: ShardStore, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(data_server, "COMM_LIMIT", 1)
    server = serve(store)

    async def use(client: PeerClient) -> None:
        await client.ping()
        second = client_of(server, grace_seconds=2.0)
        with pytest.raises(NodeUnavailableError):
            await second.ping()
        await client.ping()

    with_client(server, use)


def test_server_on_a_port_in_use_raises(store: ShardStore, serve: Any) -> None:
    port = int(serve(store).address.rpartition(":")[2])
    with pytest.raises(TierError, match="cannot be opened"):
        DataServer(store, open_store, port=port).start()


def test_server_on_other_than_loopback_needs_tls_or_insecure(store: ShardStore, member: DataTls) -> None:
    with pytest.raises(ConfigError, match=r"fastcheck.data.tls-ca.*insecure"):
        DataServer(store, open_store, host="0.0.0.0")
    server = DataServer(store, open_store, host="0.0.0.0", tls=member)
    server.start()
    server.close()
    assert server.address.startswith("fcss://")


def test_closed_server_leaves_no_thread_and_refuses(store: ShardStore, serve: Any) -> None:
    server = serve(store)

    async def use(client: PeerClient) -> None:
        await client.ping()
        await asyncio.to_thread(server.close)
        with pytest.raises(NodeUnavailableError, match="node-1"):
            await client.ping()

    with_client(server, use)
    assert not [t for t in threading.enumerate() if t.name == "fastcheck-data"]


# ---- what the event loop does itself


def test_ping_is_answered_while_the_store_is_locked(store: ShardStore, serve: Any) -> None:
    """Commits of very many chunks hold the lock for a while: a ping does not wait for it."""
    server = serve(store)
    locked, release = threading.Event(), threading.Event()

    def hold() -> None:
        with store._holdings.locked():
            locked.set()
            release.wait(60)

    async def use(client: PeerClient) -> None:
        reporting = asyncio.create_task(client.status())
        await asyncio.sleep(0)
        for _ in range(3):
            assert (await client.ping())["name"] == store.name
        assert not reporting.done()
        release.set()
        assert (await reporting)["name"] == store.name

    holder = threading.Thread(target=hold)
    holder.start()
    try:
        assert locked.wait(20)
        with_client(server, use)
    finally:
        release.set()
        holder.join()


def test_loop_does_nothing_with_chunks_itself(
    store: ShardStore, serve: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever checks, decodes or counts chunks runs in other threads than the loop's."""
    on_loop: set[str] = set()

    def noted(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        def noting(*args: Any, **kwargs: Any) -> Any:
            if threading.current_thread().name == "fastcheck-data":
                on_loop.add(name)
            return call(*args, **kwargs)

        return noting

    public = [n for n, call in vars(ShardStore).items() if callable(call) and not n.startswith("_")]
    for name in public:
        monkeypatch.setattr(store, name, noted(name, getattr(store, name)))
    monkeypatch.setattr(data_server, "pack", noted("pack", wire.pack))
    monkeypatch.setattr(data_server, "descriptors_from_wire", noted("d", data_server.descriptors_from_wire))

    async def use(client: PeerClient) -> None:
        first, second = chunks.bits(1), chunks.nudged(chunks.bits(1), 1)
        token = await save_over(client, 1, [chunks.whole("a", first)])
        await client.abort("run", "another")
        await save_over(client, 2, [chunks.delta("a", second, first)], base=(1, token))
        name = ("run", 2, "token-2")
        await client.pin(*name)
        await client.manifest(*name)
        (chunk,) = (await client.read(*name, keys=["a"])).chunks
        await client.quarantine(*name, keys=["a"])
        await client.repair(*name, chunks=[chunk[0]], frames=[chunk[1]])
        await client.unpin(*name)
        await client.holds("run")
        await client.status()
        await client.lease("run", 5.0)
        await client.persisted(*name)
        await client.drop("run")
        await client.ping()

    with_client(serve(store), use)
    # `reading` only counts; a ping is answered at once, and packed.
    assert on_loop <= {"reading", "status", "pack"}
    assert "status" in on_loop


# ---- the system has no memory


def test_no_memory_for_what_arrives_the_connection_is_dropped_and_the_node_goes_on(
    store: ShardStore, serve: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    empty = np.empty

    def refused(size: Any, *args: Any, **kwargs: Any) -> Any:
        if size == 100_003:
            raise MemoryError("Unable to allocate 98 KiB")
        return empty(size, *args, **kwargs)

    async def use(client: PeerClient) -> None:
        monkeypatch.setattr(np, "empty", refused)
        with pytest.raises(NodeUnavailableError):
            await client.probe(bytes(100_003), give_bytes=1)
        assert (await client.ping())["name"] == store.name

    with_client(serve(store), use)
    assert any("Unable to allocate" in record.getMessage() for record in caplog.records)


def test_no_memory_to_serve_a_request_is_told_as_a_full_node(
    store: ShardStore, serve: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_args: Any, **_kwargs: Any) -> Any:
        raise MemoryError

    async def use(client: PeerClient) -> None:
        monkeypatch.setattr(store, "put", refused)
        with pytest.raises(NodeFullError, match=r"is too small: [1-9]"):
            await save_over(client, 1, [chunks.whole("a", chunks.bits(1))])

    with_client(serve(store), use)
