"""The comm scheme: what comes back, and what is refused."""

from __future__ import annotations

import asyncio
import pickle
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, closing
from pathlib import Path
from typing import Any

import msgpack
import numpy as np
import pytest
from distributed.comm.core import Comm, CommClosedError, connect, listen
from fastcheck_codecs import checksum
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.errors import ConfigError, CorruptDataError, FastCheckError, TierError, UnknownFormatError
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.wire_tls import DataTls, open_comm

_FIXED = "<4sHHIIIQ"


async def _echo(comm: Comm) -> None:
    try:
        while True:
            await comm.write(await comm.read())
    except (CommClosedError, FastCheckError):
        comm.abort()


@asynccontextmanager
async def serving(
    handle: Callable[[Comm], Awaitable[None]] = _echo, tls: DataTls | None = None
) -> AsyncIterator[str]:
    listener = await listen(wire.listen_address("127.0.0.1", 0, tls=tls is not None), handle, tls=tls)
    try:
        yield listener.contact_address
    finally:
        listener.stop()


@asynccontextmanager
async def opened(address: str, tls: DataTls | None = None) -> AsyncIterator[wire.FcsComm]:
    comm = await open_comm(address, 5, tls)
    try:
        yield comm
    finally:
        comm.abort()


async def echoed(address: str, message: dict[str, Any], tls: DataTls | None = None) -> dict[str, Any]:
    async with opened(address, tls) as comm:
        await comm.write(message)
        return await comm.read()


def raw_message(header: bytes, *, frames: int = 0, payload: int = 0, **changed: int) -> bytes:
    return (
        struct.pack(
            _FIXED,
            b"FCSW",
            changed.get("version", wire.VERSION),
            changed.get("reserved", 0),
            changed.get("header_bytes", len(header)),
            frames,
            changed.get("crc", checksum(header)),
            payload,
        )
        + header
    )


HELLO = raw_message(msgpack.packb([[], {"protocol": "fcs", "version": 1}]))


@pytest.mark.parametrize("sizes", [[], [0], [1, 0, 7], [100_000, 3], [wire.FRAME_BYTES * 2 + 5, 1]])
def test_message_with_buffers_comes_back_in_arrays_of_its_own(sizes: list[int], tls: DataTls | None) -> None:
    buffers = [np.random.default_rng(n).integers(0, 256, n, dtype=np.uint8) for n in sizes]
    for buffer in buffers:
        buffer.flags.writeable = False

    async def main() -> dict[str, Any]:
        async with serving(tls=tls) as address:
            return await echoed(address, {"op": "x", "n": 2**63, "frames": buffers}, tls)

    got = asyncio.run(main())
    frames = got.pop("frames")
    assert got == {"op": "x", "n": 2**63}
    assert all(type(f) is np.ndarray and f.dtype == np.uint8 and f.base is None for f in frames)
    assert [f.tobytes() for f in frames] == [b.tobytes() for b in buffers]


plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=100, deadline=None)
@given(message=st.dictionaries(st.text().filter(lambda k: k != "frames"), plain, max_size=5))
def test_header_of_plain_values_comes_back_same(message: dict[str, Any]) -> None:
    head = wire.pack(message).head
    sizes, got = wire._unpack(head[struct.calcsize(_FIXED) :], wire.DEFAULT_LIMITS)
    assert (sizes, got) == ([], message)


@settings(max_examples=200, deadline=None)
@given(header=st.binary(max_size=60))
def test_header_of_random_bytes_is_read_or_refused_as_corrupt(header: bytes) -> None:
    try:
        sizes, message = wire._unpack(header, wire.DEFAULT_LIMITS)
    except CorruptDataError:
        return
    assert isinstance(sizes, list)
    assert isinstance(message, dict)


@pytest.mark.parametrize(
    "value", [object(), (1, 2), {1, 2}, 2**64, np.float32(1), b"bytes are sent as frames, not in headers"]
)
def test_message_with_value_that_is_not_plain_is_not_sent(value: object) -> None:
    with pytest.raises(TierError, match="cannot be sent"):
        wire.pack({"x": value})


def test_message_over_the_limit_is_refused_and_the_connection_stays(tls: DataTls | None) -> None:
    async def main() -> None:
        async with serving(tls=tls) as address, opened(address, tls) as comm:
            comm.limits = wire.Limits(message_bytes=100)
            with pytest.raises(TierError, match="101 bytes of payload"):
                await comm.write({"frames": [bytes(101)]})
            await comm.write({"frames": [bytes(100)]})
            assert (await comm.read())["frames"][0].nbytes == 100

    asyncio.run(main())


def test_buffer_not_contiguous_is_refused() -> None:
    with pytest.raises(TierError, match="contiguous"):
        wire.pack({"frames": [np.zeros(10, np.uint8)[::2]]})


deep = msgpack.packb([[], {"x": 0}])[:-1] + b"\x91" * 40 + b"\x00"
REFUSED = {
    "nothing of ours": b"\x00" * 64,
    "pickle": pickle.dumps({"op": "ping"}, protocol=5) + b"\x00" * 64,
    "http": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "other version": raw_message(b"\x92\x90\x80", version=2),
    "reserved field": raw_message(b"\x92\x90\x80", reserved=1),
    "huge header": raw_message(b"", header_bytes=2**32 - 1),
    "too many frames": raw_message(b"\x92\x90\x80", frames=4097),
    "huge payload": raw_message(b"\x92\x90\x80", frames=1, payload=2**63),
    "wrong checksum": raw_message(b"\x92\x90\x80", crc=1),
    "not msgpack": raw_message(b"\xc1\xc1"),
    "half a header": raw_message(b"\x92\x90"),
    "more than a header": raw_message(b"\x92\x90\x80\x80"),
    "extension type": raw_message(msgpack.packb([[], {"x": msgpack.ExtType(5, b"abc")}])),
    "time stamp": raw_message(msgpack.packb([[], {"x": msgpack.Timestamp(1)}])),
    "bytes": raw_message(msgpack.packb([[], {"x": b"abc"}])),
    "key not text": raw_message(msgpack.packb([[], {1: 2}])),
    "too deep": raw_message(deep),
    "huge list": raw_message(b"\x92\x90\xdd\xff\xff\xff\xff"),
    "frames as a field": raw_message(msgpack.packb([[], {"frames": []}])),
    "not a mapping": raw_message(msgpack.packb([[], []])),
    "sizes contradict": raw_message(msgpack.packb([[5], {}]), frames=1, payload=6),
    "frames contradict": raw_message(msgpack.packb([[5], {}]), frames=2, payload=5),
    "negative size": raw_message(msgpack.packb([[-1, 1], {}]), frames=2, payload=0),
    "size is true": raw_message(msgpack.packb([[True], {}]), frames=1, payload=1),
}


@pytest.mark.parametrize("after_handshake", [False, True])
@pytest.mark.parametrize("data", REFUSED.values(), ids=REFUSED.keys())
def test_peer_that_breaks_the_protocol_is_dropped_and_the_server_lives(
    data: bytes, after_handshake: bool, tls: DataTls | None
) -> None:
    def attack(address: str) -> bytes:
        host, port = wire.location_of(address).split(":")
        plain = socket.create_connection((host, int(port)), timeout=10)
        with closing(plain if tls is None else tls.client.wrap_socket(plain)) as peer:
            if after_handshake:
                peer.sendall(HELLO)
            if after_handshake or tls is not None:
                # Over TLS the server speaks first, to members.
                assert peer.recv(65536).startswith(b"FCSW")
            peer.sendall(data)
            try:
                return peer.recv(65536)
            except (ConnectionResetError, ssl.SSLEOFError):
                return b""

    async def main() -> None:
        async with serving(tls=tls) as address:
            assert await asyncio.to_thread(attack, address) == b""
            assert (await echoed(address, {"still": "here"}, tls))["still"] == "here"

    asyncio.run(main())


class Bomb:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return (Path.touch, (self.path,))


def test_pickle_in_a_stock_handshake_is_not_run(tmp_path: Path) -> None:
    exploded = tmp_path / "exploded"

    async def main() -> None:
        async with serving() as address:
            stock = address.replace("fcs://", "tcp://")
            with pytest.raises(OSError, match=r"."):
                await asyncio.wait_for(
                    connect(stock, timeout=2, handshake_overrides={"x": Bomb(exploded)}), 10
                )
            assert (await echoed(address, {"still": "here"}))["still"] == "here"

    asyncio.run(main())
    assert not exploded.exists()


def test_silent_peer_is_dropped(monkeypatch: pytest.MonkeyPatch, tls: DataTls | None) -> None:
    monkeypatch.setattr(wire, "HANDSHAKE_SECONDS", 0.05)

    def wait_for_the_end(address: str) -> bytes:
        host, port = wire.location_of(address).split(":")
        with closing(socket.create_connection((host, int(port)), timeout=10)) as peer:
            return peer.recv(1)

    async def main() -> None:
        async with serving(tls=tls) as address:
            assert await asyncio.to_thread(wait_for_the_end, address) == b""

    asyncio.run(main())


def test_open_comm_when_refused_fails_at_once() -> None:
    with closing(socket.socket()) as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]

    async def main() -> float:
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(OSError, match="refused"):
            await wire.open_comm(f"fcs://127.0.0.1:{port}", 30)
        return loop.time() - began

    assert asyncio.run(main()) < 5


def test_open_comm_to_stopped_peer_times_out() -> None:
    with closing(socket.create_server(("127.0.0.1", 0))) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(TimeoutError):
            asyncio.run(wire.open_comm(f"fcs://127.0.0.1:{port}", 0.1))


def test_open_comm_to_foreign_server_raises() -> None:
    async def answer_http(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        writer.close()

    async def main() -> None:
        async with await asyncio.start_server(answer_http, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            with pytest.raises(UnknownFormatError, match="does not speak fcs"):
                await wire.open_comm(f"fcs://127.0.0.1:{port}", 5)

    asyncio.run(main())


def test_cancelled_read_closes_the_connection(tls: DataTls | None) -> None:
    async def main() -> None:
        async with serving(tls=tls) as address, opened(address, tls) as comm:
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.05):
                    await comm.read()
            assert comm.closed()
            with pytest.raises(CommClosedError):
                await comm.write({})

    asyncio.run(main())


def test_counters_agree_on_both_ends(tls: DataTls | None) -> None:
    seen: list[tuple[int, int]] = []

    async def once(comm: Comm) -> None:
        assert isinstance(comm, wire.FcsComm)
        await comm.write(await comm.read())
        seen.append((comm.sent_bytes, comm.received_bytes))
        comm.abort()

    async def main() -> tuple[int, int]:
        async with serving(once, tls) as address, opened(address, tls) as comm:
            await comm.write({"frames": [bytes(200_000)]})
            await comm.read()
            return comm.received_bytes, comm.sent_bytes

    assert asyncio.run(main()) == seen[0]
    assert seen[0][0] > 200_000


@pytest.mark.parametrize("host", ["127.0.0.1", "127.20.1.2", "localhost", "::1"])
def test_listen_address_loopback_is_allowed(host: str) -> None:
    assert wire.listen_address(host, 0).startswith("fcs://")


@pytest.mark.parametrize("host", ["0.0.0.0", "10.0.0.1", "::", "storage-1.example", ""])
def test_listen_address_other_host_needs_insecure(host: str) -> None:
    with pytest.raises(ConfigError, match="insecure"):
        wire.listen_address(host, 0)
    assert wire.listen_address(host, 7, insecure=True).endswith(":7")
    assert wire.listen_address(host, 7, tls=True).startswith("fcss://")


@pytest.mark.parametrize("address", ["tcp://h:1", "h:1", "fcs://h", "fcs:h:1", ""])
def test_location_of_other_address_raises(address: str) -> None:
    with pytest.raises(ConfigError, match="fcs://host:port"):
        wire.location_of(address)
