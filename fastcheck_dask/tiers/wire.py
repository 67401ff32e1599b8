"""The comm scheme ``fcs://``: msgpack header, raw frames, never a pickle.

Importing this module registers the scheme with `distributed`. See ``docs/formats/wire.md``.
"""

from __future__ import annotations

import asyncio
import ipaddress
import logging
import socket
import struct
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from ssl import SSLError
from typing import Any, NamedTuple, NoReturn

import msgpack
import numpy as np
import numpy.typing as npt
from distributed.comm.core import Comm, CommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import TCP, TCPBackend, TCPConnector, TCPListener, convert_stream_closed_error
from fastcheck_codecs import checksum
from tornado.iostream import IOStream, StreamClosedError

from fastcheck_dask.errors import ConfigError, CorruptDataError, FastCheckError, TierError, UnknownFormatError
from fastcheck_dask.tiers.loop_share import LoopShare
from fastcheck_dask.tiers.pieces import cost_of, pieces_of

Bits = npt.NDArray[np.uint8]
#: What can be sent as a frame: anything C-contiguous that exports bytes; never copied.
Buffer = npt.NDArray[Any] | memoryview | bytes

#: Awaited before a piece of so many bytes is sent or received.
Pace = Callable[[int], Awaitable[None]]

SCHEME = "fcs"
#: The same over TLS; see `wire_tls`.
TLS_SCHEME = "fcss"
VERSION = 1
#: A buffer is announced in frames of at most this; it crosses in smaller pieces.
FRAME_BYTES = 16 * 2**20
#: How long a new connection may take to say what it is.
HANDSHAKE_SECONDS = 5.0

_MAGIC = b"FCSW"
#: version, reserved, header bytes, frames, crc32c of the header, payload bytes; after the magic.
_FIXED = struct.Struct("<HHIIIQ")
#: A message with at most so much payload is sent in one piece, and without waiting.
SMALL_BYTES = 64 * 2**10
_PLAIN = (bool, int, float, str)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Limits:
    """What a reader accepts, checked before anything is allocated."""

    header_bytes: int = 4 * 2**20
    frames: int = 4096
    message_bytes: int = 256 * 2**20
    depth: int = 16
    #: Entries of one list or mapping in a header.
    entries: int = 2**18


DEFAULT_LIMITS = Limits()


class Packed(NamedTuple):
    """A message ready to be written."""

    head: bytes
    buffers: list[memoryview]
    payload_bytes: int


class Head(NamedTuple):
    """What is known of a message before its payload is read."""

    message: dict[str, Any]
    sizes: list[int]
    payload_bytes: int


def pack(message: dict[str, Any], limits: Limits = DEFAULT_LIMITS) -> Packed:
    """Encode a message; its buffers, under the key ``"frames"``, are referenced and not copied.

    Raises
    ------
    TierError
        If the message is larger than `limits` allow, or holds a value that is not plain.
    """
    fields = dict(message)
    buffers = [_bytes_of(buffer) for buffer in fields.pop("frames", ())]
    sizes = [view.nbytes for view in buffers]
    try:
        _check_plain(fields, limits.depth - 1)
        header = msgpack.packb([sizes, fields], strict_types=True)
    except (TypeError, ValueError, OverflowError) as error:
        raise TierError(f"a message to a storage node holds what cannot be sent: {error}") from error
    payload, frames = sum(sizes), _frame_count(sizes)
    for what, got, most in (
        ("bytes of header", len(header), limits.header_bytes),
        ("frames", frames, limits.frames),
        ("bytes of payload", payload, limits.message_bytes),
    ):
        if got > most:
            raise TierError(f"a message has {got:,} {what}, at most {most:,} are sent; send several")
    head = _MAGIC + _FIXED.pack(VERSION, 0, len(header), frames, checksum(header), payload) + header
    return Packed(head, buffers, payload)


def _bytes_of(buffer: Buffer) -> memoryview:
    view = buffer.data if isinstance(buffer, np.ndarray) else memoryview(buffer)
    if not view.c_contiguous:
        raise TierError("only contiguous buffers can be sent")
    return view.cast("B") if view.nbytes else memoryview(b"")


def _frame_count(sizes: Sequence[int]) -> int:
    return sum(max(1, -(-size // FRAME_BYTES)) for size in sizes)


def _refuse_extension(code: int, data: bytes) -> NoReturn:
    raise ValueError(f"msgpack extension {code} ({len(data)} bytes) is not allowed")


def _unpack(header: bytes, limits: Limits) -> tuple[list[int], dict[str, Any]]:
    """Decode a header; `CorruptDataError` for whatever is not plain, too deep or too long."""
    try:
        document = msgpack.unpackb(
            header,
            strict_map_key=True,
            max_array_len=limits.entries,
            max_map_len=limits.entries,
            max_bin_len=0,
            ext_hook=_refuse_extension,
        )
        _check_plain(document, limits.depth)
        sizes, message = document
    except (ValueError, TypeError, RecursionError, msgpack.UnpackException) as error:
        raise CorruptDataError(f"header of {len(header)} bytes cannot be read: {error}") from error
    if not isinstance(message, dict) or not isinstance(sizes, list):
        raise CorruptDataError("a header must be a list of sizes and a mapping")
    if any(type(size) is not int or size < 0 for size in sizes):
        raise CorruptDataError("a buffer size is not a natural number")
    if "frames" in message:
        raise CorruptDataError('"frames" is not a field: buffers follow the header')
    return sizes, message


def _check_plain(value: object, depth: int) -> None:
    if value is None or isinstance(value, _PLAIN):
        return
    if depth == 0:
        raise ValueError("nested too deeply")
    if isinstance(value, dict):
        if not all(isinstance(key, str) for key in value):
            raise ValueError("a mapping has a key that is not text")
        value = list(value.values())
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} is not a plain value")
    for entry in value:
        _check_plain(entry, depth - 1)


class FcsComm(TCP):
    """A connection, for one reader and one writer at a time; a failed or cancelled call aborts it."""

    limits: Limits = DEFAULT_LIMITS

    def __init__(
        self,
        stream: IOStream,
        local_addr: str,
        peer_addr: str,
        deserialize: bool = True,
    ) -> None:
        super().__init__(stream, local_addr, peer_addr, deserialize)
        #: Everything that crossed the connection, headers included.
        self.sent_bytes = 0
        self.received_bytes = 0

    async def write(  # the base class names the parameters
        self,
        msg: dict[str, Any],
        serializers: object = None,  # noqa: ARG002
        on_error: object = None,  # noqa: ARG002
    ) -> int:
        """Send a message; returns its bytes once the kernel has them."""
        return await self.send(pack(msg, self.limits))

    async def send(self, packed: Packed, pace: Pace | None = None) -> int:
        """Send a packed message. Its buffers may be reused only after the peer has answered.

        With `pace`, it is awaited with the size of each piece of a large message before that is sent.
        """
        stream, share = self._live_stream(), LoopShare.of_running_loop()
        with self._aborting():
            if packed.payload_bytes <= SMALL_BYTES:
                await stream.write(b"".join([packed.head, *packed.buffers]))
            else:
                await stream.write(packed.head)
                for piece in pieces_of(packed.buffers):
                    if pace is not None:
                        await pace(sum(view.nbytes for view in piece))
                    await share.take(cost_of(piece))
                    await stream.write(piece[0] if len(piece) == 1 else b"".join(piece))
        total = len(packed.head) + packed.payload_bytes
        self.sent_bytes += total
        return total

    async def read(self, deserializers: object = None) -> dict[str, Any]:  # noqa: ARG002
        """Receive a message; its buffers stand under ``"frames"``."""
        return await self.receive_payload(await self.receive_head())

    async def receive_head(self) -> Head:
        """Receive a message up to its payload.

        Raises
        ------
        UnknownFormatError
            If the peer does not speak this protocol, or another version.
        CorruptDataError
            If the header is damaged or breaks a limit.
        CommClosedError
            If the connection ended. In all three cases it is closed now.
        """
        stream = self._live_stream()
        with self._aborting():
            magic = await stream.read_bytes(len(_MAGIC))
            if magic != _MAGIC:
                raise UnknownFormatError(
                    f"{self.peer_address} does not speak {SCHEME}: it began with {magic!r}"
                )
            version, reserved, header_bytes, frames, crc, payload = _FIXED.unpack(
                await stream.read_bytes(_FIXED.size)
            )
            if version != VERSION or reserved != 0:
                raise UnknownFormatError(
                    f"{self.peer_address} speaks {SCHEME} version {version}, here {VERSION}"
                )
            for what, got, most in (
                ("bytes of header", header_bytes, self.limits.header_bytes),
                ("frames", frames, self.limits.frames),
                ("bytes of payload", payload, self.limits.message_bytes),
            ):
                if got > most:
                    raise CorruptDataError(f"{self.peer_address} announced {got:,} {what}, limit {most:,}")
            header = await stream.read_bytes(header_bytes)
            if checksum(header) != crc:
                raise CorruptDataError(f"header from {self.peer_address} failed its checksum")
            if header_bytes <= SMALL_BYTES:
                sizes, message = _unpack(header, self.limits)
            else:
                # Hundreds of thousands of keys: the loop has others to serve meanwhile.
                sizes, message = await asyncio.to_thread(_unpack, header, self.limits)
            if sum(sizes) != payload or _frame_count(sizes) != frames:
                raise CorruptDataError(f"header from {self.peer_address} contradicts itself about its frames")
        self.received_bytes += len(_MAGIC) + _FIXED.size + header_bytes
        return Head(message, sizes, payload)

    async def receive_payload(self, head: Head, pace: Pace | None = None) -> dict[str, Any]:
        """Receive the payload of a message, each buffer into one fresh uint8 array of its own.

        With `pace`, it is awaited with the size of each piece before that is received.
        """
        stream, share = self._live_stream(), LoopShare.of_running_loop()
        received: list[Bits] = []

        def targets() -> Iterator[memoryview]:
            for size in head.sizes:
                received.append(np.empty(size, np.uint8))
                yield received[-1].data

        with self._aborting():
            for piece in pieces_of(targets()):
                if pace is not None:
                    await pace(sum(view.nbytes for view in piece))
                # Bytes that wait in the kernel are read without leaving this task: let others run.
                if head.payload_bytes > SMALL_BYTES:
                    await share.take(cost_of(piece))
                await _read_into(stream, piece)
        self.received_bytes += head.payload_bytes
        head.message["frames"] = received
        return head.message

    def set_dscp(self, dscp: int | None) -> None:
        """Mark what this end sends from now on; None leaves the marks to the system."""
        if dscp is None:
            return
        sock = self._live_stream().socket
        if sock.family == socket.AF_INET6:
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_TCLASS, dscp << 2)
        else:
            sock.setsockopt(socket.IPPROTO_IP, socket.IP_TOS, dscp << 2)

    def _live_stream(self) -> IOStream:
        if self.stream is None:
            raise CommClosedError(f"connection to {self.peer_address} is closed")
        return self.stream

    @contextmanager
    def _aborting(self) -> Iterator[None]:
        """End the connection when a call fails midway: nobody knows what is left in the stream."""
        try:
            yield
        except (StreamClosedError, SSLError) as error:
            self.abort()
            convert_stream_closed_error(self, error)  # type: ignore[no-untyped-call]
        except BaseException:
            self.abort()
            raise

    def handshake_info(self) -> dict[str, Any]:
        """Return the first message of either side."""
        return {"protocol": SCHEME, "version": VERSION}

    @staticmethod
    def handshake_configuration(local: dict[str, Any], remote: dict[str, Any]) -> dict[str, Any]:  # noqa: ARG004
        """Check the peer's first message; there is nothing to negotiate."""
        if remote.get("protocol") != SCHEME:
            raise UnknownFormatError(f"the peer does not speak {SCHEME}")
        return {}


async def _read_into(stream: IOStream, views: Sequence[memoryview]) -> None:
    """Fill buffers from a stream; several with one read."""
    if len(views) == 1:
        await stream.read_into(views[0])  # type: ignore[arg-type]
        return
    joined = np.empty(sum(view.nbytes for view in views), np.uint8).data
    await stream.read_into(joined)  # type: ignore[arg-type]
    at = 0
    for view in views:
        view[:] = joined[at : at + view.nbytes]
        at += view.nbytes


class FcsConnector(TCPConnector):
    """Opens connections; one attempt each."""

    prefix = f"{SCHEME}://"
    comm_class = FcsComm

    async def shake_hands(self, comm: FcsComm) -> None:
        """Speak first, and hear the node's answer."""
        await comm.write(comm.handshake_info())
        comm.handshake_configuration({}, await comm.read())


class FcsListener(TCPListener):
    """Accepts connections, and drops whatever does not begin with our handshake."""

    prefix = f"{SCHEME}://"
    comm_class = FcsComm

    async def start(self) -> None:
        """Listen; `OSError` if the port cannot be had."""
        if self.port:
            # tornado leaks its socket when the port is taken: let that show on one of ours.
            family = socket.AF_INET6 if ":" in self.ip else socket.AF_INET
            socket.create_server((self.ip, self.port), family=family).close()
        await super().start()  # type: ignore[no-untyped-call]

    async def on_connection(
        self,
        comm: Comm,
        handshake_overrides: dict[str, Any] | None = None,  # noqa: ARG002
    ) -> None:
        """Listen before speaking: a foreign client gets not one byte."""
        assert isinstance(comm, FcsComm)
        try:
            async with asyncio.timeout(HANDSHAKE_SECONDS):
                await self.shake_hands(comm)
        except (FastCheckError, TimeoutError) as error:
            comm.abort()
            logger.warning(
                "dropped a connection from %s: %s", comm.peer_address, str(error) or "no handshake"
            )
            raise CommClosedError(f"{comm.peer_address} failed the handshake") from error

    async def shake_hands(self, comm: FcsComm) -> None:
        """Hear the client's first message, and answer it."""
        comm.handshake_configuration({}, await comm.read())
        await comm.write(comm.handshake_info())


class FcsBackend(TCPBackend):
    """What `distributed` looks up for ``fcs://``."""

    _connector_class = FcsConnector
    _listener_class = FcsListener


backends[SCHEME] = FcsBackend()


async def open_comm(
    address: str, seconds: float, connector: FcsConnector | None = None, **connection_args: Any
) -> FcsComm:
    """Connect and shake hands, in one attempt of at most `seconds`.

    Raises
    ------
    OSError
        At once if the connection is refused.
    TimeoutError
        If it took longer (a stopped peer still accepts connections, for the kernel does it).
    FastCheckError
        If the peer speaks something else.
    """
    location, connector = location_of(address), connector or FcsConnector()
    async with asyncio.timeout(seconds):
        comm: FcsComm = await connector.connect(location, **connection_args)  # type: ignore[no-untyped-call]
        try:
            await connector.shake_hands(comm)
        except BaseException:
            comm.abort()
            raise
    return comm


def location_of(address: str) -> str:
    """Return ``host:port`` of a data-port address; `ConfigError` if it is not one."""
    scheme, separator, location = address.partition("://")
    known = scheme in (SCHEME, TLS_SCHEME)
    if not known or not separator or not location.rpartition(":")[2].isdigit():
        raise ConfigError(f"a data-port address is {SCHEME}://host:port or {TLS_SCHEME}://, got {address!r}")
    return location


def is_loopback(host: str) -> bool:
    """Say whether what listens there is reached from this machine alone."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def listen_address(host: str, port: int, *, insecure: bool = False, tls: bool = False) -> str:
    """Return the address to listen on; `ConfigError` for other than loopback unless `tls` or `insecure`."""
    if not (insecure or tls or is_loopback(host)):
        raise ConfigError(
            f"the data port would listen on {host}, where whoever reaches it can read and "
            "replace checkpoints; "
            "give it TLS (fastcheck.data.tls-ca, tls-cert and tls-key), use a loopback host, or say insecure "
            "(--insecure) if the network is trusted"
        )
    if not 0 <= port < 2**16:
        raise ConfigError(f"a port is 0 to 65535, got {port}")
    shown = f"[{host}]" if ":" in host else host
    return f"{TLS_SCHEME if tls else SCHEME}://{shown}:{port}"
