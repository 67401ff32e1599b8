"""The client of a storage node: how it fails, and how soon. Operations are tested at the server."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from distributed.comm.core import CommClosedError, listen

from fastcheck_dask.errors import ClosedError, ConfigError, NodeUnavailableError, TierError, to_wire
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.pacing import PIECE_BYTES, Pacer
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire import FcsComm, listen_address, pack
from fastcheck_dask.tiers.wire_tls import DataTls

Answer = Callable[[FcsComm, dict[str, Any]], Awaitable[None]]
DESCRIPTOR = Descriptor("k", "float32", 4, "0" * 32, 0, 3)


#: TLS of the ports and clients of the test.
PORT: dict[str, DataTls | None] = {"tls": None}


@pytest.fixture(autouse=True)
def port(tls: DataTls | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(PORT, "tls", tls)


def client_of(address: str, **options: Any) -> PeerClient:
    return PeerClient("node-1", address, tls=PORT["tls"], **options)


@asynccontextmanager
async def node(answer: Answer, address: str | None = None, **options: Any) -> AsyncIterator[Any]:
    """Serve with `answer`, and give a client of it."""
    comms: list[FcsComm] = []

    async def handle(comm: FcsComm) -> None:
        comms.append(comm)
        try:
            while True:
                await answer(comm, await comm.read())
        except CommClosedError:
            comm.abort()

    tls = PORT["tls"]
    listener = await listen(address or listen_address("127.0.0.1", 0, tls=tls is not None), handle, tls=tls)
    client = client_of(listener.contact_address, **options)
    try:
        yield client
    finally:
        listener.stop()
        await client.close()
        for comm in comms:
            comm.abort()


async def ok(comm: FcsComm, request: dict[str, Any]) -> None:
    await comm.write({"status": "ok", "op": request["op"]})


async def silence(comm: FcsComm, request: dict[str, Any]) -> None:
    await asyncio.Event().wait()


def replying(*replies: dict[str, Any]) -> Answer:
    async def answer(comm: FcsComm, request: dict[str, Any]) -> None:
        for reply in replies:
            await comm.write(reply)

    return answer


def test_silent_node_is_unavailable_after_the_grace() -> None:
    async def main() -> float:
        loop = asyncio.get_running_loop()
        async with node(silence, grace_seconds=0.1) as client:
            began = loop.time()
            with pytest.raises(NodeUnavailableError, match="did not answer in time"):
                await client.ping()
            return loop.time() - began

    assert 0.1 <= asyncio.run(main()) < 5


@pytest.mark.parametrize("sending", [True, False])
def test_node_that_hangs_in_the_middle_of_a_large_message_is_noticed_after_the_grace(sending: bool) -> None:
    """Not when the time of the whole message is over, which at this floor is half a minute."""

    size = 64 * 2**20
    # Before: this takes longer than the grace on a slow machine, and has one loop with the client.
    reply = pack({"status": "ok", "frames": [bytes(size)]}).head + bytes(3 * PIECE_BYTES + 5)

    async def hangs(comm: FcsComm) -> None:
        try:
            await comm.receive_head()
            if not sending:
                await comm.stream.write(reply)
            await asyncio.Event().wait()
        except CommClosedError:
            comm.abort()

    async def main() -> None:
        tls = PORT["tls"]
        listener = await listen(listen_address("127.0.0.1", 0, tls=tls is not None), hangs, tls=tls)
        client = client_of(
            listener.contact_address, grace_seconds=1.0, floor_bytes_per_second=2 * PIECE_BYTES
        )
        try:
            with pytest.raises(NodeUnavailableError, match=f"of {size:,} bytes crossed in time"):
                await client.probe(bytes(size if sending else 1), give_bytes=size)
        finally:
            listener.stop()
            await client.close()

    asyncio.run(main())


def test_node_that_stops_in_the_middle_of_a_reply_is_unavailable() -> None:
    async def half(comm: FcsComm, request: dict[str, Any]) -> None:
        await comm.stream.write(b"FCSW\x01\x00")
        await silence(comm, request)

    async def main() -> None:
        async with node(half, grace_seconds=0.1) as client:
            with pytest.raises(NodeUnavailableError, match="in time"):
                await client.ping()

    asyncio.run(main())


def test_node_that_never_takes_the_payload_is_unavailable() -> None:
    async def main() -> None:
        async with node(silence, grace_seconds=0.1, floor_bytes_per_second=1e9) as client:
            with pytest.raises(NodeUnavailableError, match="in time"):
                # More than the buffers of two sockets hold.
                await asyncio.gather(*(_put(client, bytes(60 * 2**20)) for _ in range(2)))

    asyncio.run(main())


async def _put(client: PeerClient, data: bytes) -> None:
    await client.put("run", "t", chunks=[DESCRIPTOR], frames=[data])


def test_node_that_says_it_works_is_waited_for() -> None:
    answer = replying(*[{"status": "working"}] * 5, {"status": "ok", "name": "done"})

    async def main() -> None:
        async with node(answer) as client:
            assert (await client.ping())["name"] == "done"

    asyncio.run(main())


def test_refused_connection_fails_at_once() -> None:
    async def main() -> float:
        async with node(ok) as gone:
            address = gone.address
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(NodeUnavailableError, match="refused"):
            await client_of(address, connect_seconds=30).ping()
        return loop.time() - began

    assert asyncio.run(main()) < 5


def test_node_that_closes_midway_is_unavailable() -> None:
    async def close(comm: FcsComm, request: dict[str, Any]) -> None:
        comm.abort()

    async def main() -> None:
        async with node(close) as client:
            with pytest.raises(NodeUnavailableError):
                await client.ping()

    asyncio.run(main())


def test_client_outlives_a_restart_of_its_node() -> None:
    async def main() -> None:
        async with node(ok) as first:
            client = client_of(first.address)
            await client.ping()
        async with node(ok, client.address):
            await client.ping()
        await client.close()

    asyncio.run(main())


def test_two_requests_run_at_once_and_a_third_waits() -> None:
    async def main() -> None:
        arrived, go_on = asyncio.Semaphore(0), asyncio.Event()
        count = 0

        async def answer(comm: FcsComm, request: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            arrived.release()
            await go_on.wait()
            await ok(comm, request)

        async with node(answer, grace_seconds=20) as client:
            requests = [asyncio.create_task(client.ping()) for _ in range(3)]
            await arrived.acquire()
            await arrived.acquire()
            assert count == 2
            go_on.set()
            await asyncio.gather(*requests)
            assert count == 3

    asyncio.run(main())


def test_cancelled_request_frees_its_place() -> None:
    async def main() -> None:
        arrived, quiet = asyncio.Event(), True

        async def answer(comm: FcsComm, request: dict[str, Any]) -> None:
            if quiet:
                arrived.set()
                await silence(comm, request)
            await ok(comm, request)

        async with node(answer, grace_seconds=20) as client:
            for _ in range(3):
                arrived.clear()
                request = asyncio.create_task(client.ping())
                await arrived.wait()
                request.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await request
            quiet = False
            await client.ping()

    asyncio.run(main())


@pytest.mark.parametrize(
    "reply",
    [
        {},
        {"status": "error"},
        {"status": "error", "error": ["ShardCorruptError", "too few"]},
        {"status": "ok", "chunks": 5},
        {"status": "ok", "chunks": [[1]]},
        {"status": "ok", "chunks": [], "missing": []},
        {"status": "ok", "chunks": [DESCRIPTOR.to_wire()], "frames": []},
        {"status": "ok", "chunks": [DESCRIPTOR.to_wire()], "frames": [b"four"]},
        {"status": "ok", "chunks": [DESCRIPTOR._replace(key="z").to_wire()], "frames": [b"abc"]},
    ],
)
def test_reply_that_does_not_fit_the_request_is_unavailable(reply: dict[str, Any]) -> None:
    async def main() -> None:
        async with node(replying(reply)) as client:
            with pytest.raises(NodeUnavailableError, match="answered"):
                await client.read("run", 1, "t", keys=["k"])

    asyncio.run(main())


def test_peer_of_another_version_is_unavailable() -> None:
    async def garbage(comm: FcsComm, request: dict[str, Any]) -> None:
        await comm.stream.write(b"HTTP/1.1 400 Bad Request\r\n\r\n" * 3)

    async def main() -> None:
        async with node(garbage) as client:
            with pytest.raises(NodeUnavailableError, match="broke the protocol"):
                await client.ping()

    asyncio.run(main())


def test_error_reply_is_raised_and_the_connection_kept() -> None:
    error = NodeUnavailableError("elsewhere", "why")

    async def main() -> None:
        seen = set()

        async def answer(comm: FcsComm, request: dict[str, Any]) -> None:
            seen.add(comm.peer_address)
            await comm.write({"status": "error", "error": to_wire(error)})

        async with node(answer) as client:
            for _ in range(3):
                with pytest.raises(NodeUnavailableError, match="elsewhere"):
                    await client.ping()
        assert len(seen) == 1

    asyncio.run(main())


def test_request_that_cannot_be_sent_raises_before_connecting() -> None:
    async def main() -> None:
        client = PeerClient("node-1", "fcs://127.0.0.1:1")
        with pytest.raises(TierError, match="at most"):
            await client.put("run", "t", chunks=[DESCRIPTOR] * 5000, frames=[b"x"] * 5000)
        with pytest.raises(TierError, match="2 frames"):
            await client.put("run", "t", chunks=[DESCRIPTOR], frames=[b"x", b"y"])

    asyncio.run(main())


def test_closed_client_raises() -> None:
    async def main() -> None:
        async with node(ok) as client:
            await client.ping()
            await client.close()
            await client.close()
            with pytest.raises(ClosedError, match="node-1"):
                await client.ping()

    asyncio.run(main())


def test_close_ends_a_request_in_flight() -> None:
    async def main() -> None:
        arrived = asyncio.Event()

        async def answer(comm: FcsComm, request: dict[str, Any]) -> None:
            arrived.set()
            await silence(comm, request)

        async with node(answer, grace_seconds=60) as client:
            request = asyncio.create_task(client.ping())
            await arrived.wait()
            await client.close()
            with pytest.raises((NodeUnavailableError, ClosedError)):
                await asyncio.wait_for(request, 10)

    asyncio.run(main())


# Pacing


def test_time_that_pacing_takes_is_no_part_of_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        loop, pacer = asyncio.get_running_loop(), Pacer()
        now, waited = loop.time, []

        async def wait_until_free(seconds: float) -> float:
            # Longer than the deadline, which would have passed.
            waited.append(100.0)
            for _ in range(3):
                await asyncio.sleep(0)
            return 0.0

        monkeypatch.setattr(pacer, "wait_until_free", wait_until_free)
        async with node(ok, grace_seconds=20, floor_bytes_per_second=1e12, pacer=pacer) as client:
            await client.ping()
            monkeypatch.setattr(loop, "time", lambda: now() + sum(waited))
            await _put(client, bytes(40 * PIECE_BYTES))
        assert waited

    asyncio.run(main())


def test_node_that_hangs_is_unavailable_also_with_pacing() -> None:
    async def main() -> None:
        async with node(silence, grace_seconds=0.1, floor_bytes_per_second=1e9, pacer=Pacer(1e12)) as client:
            with pytest.raises(NodeUnavailableError, match="in time"):
                await asyncio.gather(*(_put(client, bytes(60 * 2**20)) for _ in range(2)))

    asyncio.run(main())


def test_large_messages_wait_while_the_network_is_busy_and_small_ones_do_not() -> None:
    async def main() -> None:
        pacer = Pacer()
        pacer.set_busy(True)
        async with node(ok, grace_seconds=20, pacer=pacer) as client:
            await client.ping()
            await _put(client, bytes(1000))
            large = asyncio.create_task(_put(client, bytes(3 * 2**20)))
            await client.ping()
            assert not large.done()
            sent = client.sent_bytes
            pacer.set_busy(False)
            await large
            assert client.sent_bytes - sent > 3 * 2**20

    asyncio.run(main())


def test_every_byte_of_a_message_is_counted_against_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        pacer = Pacer(1e12)
        taken: list[int] = []
        assert pacer._bucket is not None

        def take(nbytes: int) -> float:
            taken.append(nbytes)
            return 0.0

        monkeypatch.setattr(pacer._bucket, "take", take)
        async with node(ok, grace_seconds=20, pacer=pacer) as client:
            await _put(client, bytes(3 * 2**20 + 5))
            await _put(client, bytes(100))
        assert taken == [2**20, 2**20, 2**20, 5, 100]

    asyncio.run(main())


@pytest.mark.parametrize(("dscp", "tos"), [(None, 0), (8, 32), (46, 184)])
def test_dscp_marks_the_packets_of_the_client(dscp: int | None, tos: int) -> None:
    async def main() -> None:
        async with node(ok, dscp=dscp) as client:
            await client.ping()
            (comm,) = client._idle
            assert comm.stream.socket.getsockopt(socket.IPPROTO_IP, socket.IP_TOS) == tos

    asyncio.run(main())


def test_address_of_another_scheme_raises() -> None:
    with pytest.raises(ConfigError, match="fcs://host:port"):
        PeerClient("node-1", "tcp://127.0.0.1:1")
