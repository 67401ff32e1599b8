"""The data port with TLS: who is let in, who is told what, and what is handed to the TLS layer."""

from __future__ import annotations

import asyncio
import logging
import re
import shutil
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from distributed.comm.core import CommClosedError, listen
from tornado.iostream import SSLIOStream

from fastcheck_dask.config import settings
from fastcheck_dask.errors import ConfigError, NodeRefusedError, NodeUnavailableError
from fastcheck_dask.testing.certificates import Certificates
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.pacing import PIECE_BYTES
from fastcheck_dask.tiers.peer import PeerClient, clients_for
from fastcheck_dask.tiers.wire_tls import DataTls, open_comm


@pytest.fixture
def outsider(stranger: Certificates) -> DataTls:
    """Return TLS of another cluster."""
    cert, key = stranger.issue("outsider")
    return DataTls(str(stranger.ca), str(cert), str(key))


@asynccontextmanager
async def echoing(tls: DataTls | None) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve what was sent, and tell the address and all that came."""
    came: list[Any] = []

    async def handle(comm: wire.FcsComm) -> None:
        came.append(comm)
        try:
            while True:
                message = await comm.read()
                came.append(message)
                await comm.write({"status": "ok", **message})
        except CommClosedError:
            comm.abort()

    listener = await listen(wire.listen_address("127.0.0.1", 0, tls=tls is not None), handle, tls=tls)
    try:
        yield listener.contact_address, came
    finally:
        listener.stop()
        for comm in came:
            if isinstance(comm, wire.FcsComm):
                comm.abort()


async def refusal(address: str, tls: DataTls | None, *, refused: bool = True) -> str:
    """Return why a client is not let in."""
    client = PeerClient("node-1", address, tls=tls)
    try:
        with pytest.raises(NodeRefusedError if refused else NodeUnavailableError) as caught:
            await client.ping()
    finally:
        await client.close()
    return str(caught.value)


def without_certificate(member: DataTls) -> Any:
    """Return what connects without showing a certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(member.files.ca)
    return SimpleNamespace(client=context, files=member.files)


def showing(of: DataTls, trusting: DataTls) -> Any:
    """Return what shows a certificate of one CA and believes in another."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.load_verify_locations(trusting.files.ca)
    assert of.files.cert is not None
    context.load_cert_chain(of.files.cert, of.files.key)
    return SimpleNamespace(client=context, files=of.files)


@pytest.mark.parametrize("server_has", [True, False])
def test_only_one_side_with_tls_is_told_at_once_which_settings(member: DataTls, server_has: bool) -> None:
    async def main() -> None:
        async with echoing(member if server_has else None) as (address, came):
            said = await refusal(address, None if server_has else member)
            assert came == []
            assert ("speaks TLS" if server_has else "speaks no TLS") in said
            assert "fastcheck.data.tls-ca" in said
            assert ("fastcheck.data.tls-key here, too" if server_has else "--data-tls-ca") in said

    asyncio.run(main())


@pytest.mark.parametrize(
    ("who", "told", "logged"),
    [
        (
            "nobody",
            r"refuses our certificate .*\(fastcheck.data.tls-cert\): certificate required",
            "shows no",
        ),
        ("impostor", "refuses our certificate .*outsider.pem .*: unknown ca", "unable to get local issuer"),
        ("outsider", r"certificate is refused by the CA .*\(fastcheck.data.tls-ca\)", "it refuses ours"),
    ],
)
def test_who_has_no_certificate_of_the_ca_is_not_let_in_and_said_once(
    member: DataTls, outsider: DataTls, caplog: pytest.LogCaptureFixture, who: str, told: str, logged: str
) -> None:
    clients: dict[str, Callable[[], Any]] = {
        "nobody": lambda: without_certificate(member),
        "impostor": lambda: showing(outsider, member),
        "outsider": lambda: outsider,
    }

    async def main() -> None:
        async with echoing(member) as (address, came):
            for _ in range(4):
                said = await refusal(address, clients[who]())
                assert re.search(told, said), said
            client = PeerClient("node-1", address, tls=member)
            assert (await client.ping())["op"] == "ping"
            await client.close()
            # The member's connection and its one request: nothing of the others got as far.
            assert len(came) == 2

    with caplog.at_level(logging.INFO, logger="fastcheck_dask"):
        asyncio.run(main())
    warnings = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(warnings) == 1
    assert logged in warnings[0]


def test_plain_bytes_to_a_port_with_tls_are_dropped(
    member: DataTls, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with echoing(member) as (address, came):
            # As if the registry had lied.
            await refusal(address.replace("fcss:", "fcs:"), None, refused=False)
            assert came == []

    asyncio.run(main())
    assert "does not speak TLS" in caplog.text


def test_server_without_tls_at_an_address_with_it_is_told(member: DataTls) -> None:
    async def main() -> None:
        async with echoing(None) as (address, _):
            said = await refusal(address.replace("fcs:", "fcss:"), member)
            assert "does not speak TLS as it should" in said

    asyncio.run(main())


def test_port_that_is_only_looked_at_is_not_in_the_log(
    member: DataTls, caplog: pytest.LogCaptureFixture
) -> None:
    async def main() -> None:
        async with echoing(member) as (address, _):
            host, _, port = wire.location_of(address).partition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
            writer.write_eof()
            # The end comes after an alert.
            await reader.read()
            writer.close()
            await writer.wait_closed()

    asyncio.run(main())
    assert caplog.records == []


def test_members_speak_tls_1_3_and_need_no_host_names(authority: Certificates, member: DataTls) -> None:
    cert, key = authority.issue("elsewhere", host="DNS:elsewhere")
    elsewhere = DataTls(str(authority.ca), str(cert), str(key))

    async def main() -> None:
        async with echoing(elsewhere) as (address, _):
            comm = await open_comm(address, 5, member)
            assert comm.stream.socket.version() == "TLSv1.3"
            comm.abort()

    asyncio.run(main())


def test_certificates_replaced_while_a_node_runs_are_taken_by_the_next_connection(
    tmp_path: Path, member: DataTls, outsider: DataTls
) -> None:
    def install(of: DataTls) -> None:
        for name in ("ca", "cert", "key"):
            shutil.copy(getattr(of.files, name), tmp_path / name)

    async def main() -> None:
        install(member)
        moving = DataTls(*(str(tmp_path / name) for name in ("ca", "cert", "key")))
        async with echoing(moving) as (address, _):
            old = await open_comm(address, 5, member)
            install(outsider)
            new = await open_comm(address, 5, outsider)
            for comm in (old, new):
                await comm.write({"op": "x"})
                assert (await comm.read())["op"] == "x"
                comm.abort()
            assert "refuse" in await refusal(address, member)

    asyncio.run(main())


def test_largest_message_crosses_in_pieces(member: DataTls, monkeypatch: pytest.MonkeyPatch) -> None:
    """TLS takes no buffer of 2 GiB or more in one call; here none is ever much larger than a piece."""
    handed: list[int] = []
    write = SSLIOStream.write_to_fd

    def write_to_fd(self: SSLIOStream, data: memoryview) -> int:
        handed.append(len(data))
        return write(self, data)

    monkeypatch.setattr(SSLIOStream, "write_to_fd", write_to_fd)
    rest = wire.DEFAULT_LIMITS.message_bytes - 100
    buffers = [np.arange(100, dtype=np.uint8), np.random.default_rng(7).integers(0, 256, rest, np.uint8)]

    async def main() -> None:
        async with echoing(member) as (address, _):
            comm = await open_comm(address, 5, member)
            await comm.write({"frames": buffers})
            got = (await comm.read())["frames"]
            comm.abort()
            assert all(np.array_equal(one, other) for one, other in zip(got, buffers, strict=True))

    asyncio.run(main())
    assert sum(handed) >= 2 * wire.DEFAULT_LIMITS.message_bytes
    assert max(handed) <= PIECE_BYTES


# Settings


def test_data_tls_of_settings_is_whole_or_nothing(member: DataTls) -> None:
    files = {f"data_tls_{name}": getattr(member.files, name) for name in ("ca", "cert", "key")}
    assert DataTls.of(settings()) is None
    found = DataTls.of(settings(**files))
    assert found is not None
    assert found.files == member.files
    for missing in files:
        name = missing.replace("_", "-").replace("data-", "fastcheck.data.")
        with pytest.raises(ConfigError, match=f"takes all of .*; {name} is not given"):
            DataTls.of(settings(**{key: file for key, file in files.items() if key != missing}))


def test_data_tls_wrong_files_are_told_before_anything_is_opened(
    authority: Certificates, stranger: Certificates, tmp_path: Path
) -> None:
    cert, key = map(str, authority.issue("fine"))
    with pytest.raises(ConfigError, match=r"fine.pem \(fastcheck.data.tls-cert\) is refused by the CA"):
        clients_for(settings(data_tls_ca=stranger.ca, data_tls_cert=cert, data_tls_key=key))
    missing = tmp_path / "missing.pem"
    with pytest.raises(ConfigError, match=r"missing.pem \(fastcheck.data.tls-ca\) cannot be read"):
        clients_for(settings(data_tls_ca=missing, data_tls_cert=cert, data_tls_key=key))
