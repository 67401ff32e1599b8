"""Talks to one storage node over its data port."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

from distributed.comm.core import CommClosedError

from fastcheck_dask.config import Settings
from fastcheck_dask.errors import (
    ClosedError,
    CorruptDataError,
    FastCheckError,
    NodeRefusedError,
    NodeUnavailableError,
    TierError,
    from_wire,
)
from fastcheck_dask.tiers.descriptors import Descriptor, descriptors_from_wire
from fastcheck_dask.tiers.pacing import Pacer
from fastcheck_dask.tiers.patience import Patience
from fastcheck_dask.tiers.wire import (
    SMALL_BYTES,
    Bits,
    Buffer,
    FcsComm,
    Pace,
    Packed,
    location_of,
    pack,
)
from fastcheck_dask.tiers.wire_tls import DataTls, RefusedError, open_comm

#: Requests that may be in flight to one node.
_CONNECTIONS = 2
#: How long a node may go on saying that it is still at work.
_WORK_SECONDS = 900.0


class Read(NamedTuple):
    """What a node gave; payloads are as they came, neither their checksums nor digests are checked yet."""

    chunks: list[tuple[Descriptor, Bits]]
    #: Keys that the node does not have, the damaged ones included.
    missing: list[str]
    #: Keys whose payload was damaged in the node; it has dropped them.
    corrupt: list[str]


class _Pieces:
    """Moves the deadline of a message on with its pieces."""

    def __init__(self, patience: Patience, deadline: asyncio.Timeout) -> None:
        self._patience, self._deadline = patience, deadline
        self._now = asyncio.get_running_loop().time

    async def begin(self, nbytes: int) -> None:
        """Begin a piece."""
        self._deadline.reschedule(self._patience.next_piece(nbytes, self._now()))

    async def begin_after(self, wait: Pace, nbytes: int) -> None:
        """Begin a piece after a wait for this side, which counts against no deadline."""
        began = self._now()
        self._deadline.reschedule(None)
        await wait(nbytes)
        self._patience.held_back(self._now() - began)
        await self.begin(nbytes)


class PeerClient:
    """Client of one storage node, for one event loop.

    Each method sends one idempotent request, and raises `NodeUnavailableError` when the node cannot be
    reached, breaks the protocol, or is slower than `floor_bytes_per_second` with `grace_seconds` on top
    (`NodeRefusedError` when one does not let the other in);
    an error that the node answers is raised as it is. While a node works on a request it says so twice a
    second: only silence counts as failure. Cancelling closes the connection, and the node may or may not
    have done what was asked. At most two requests run at a time, more wait.

    Parameters
    ----------
    node : str
        Name of the node, for errors.
    address : str
        ``fcs://host:port``, or ``fcss://`` for TLS.
    floor_bytes_per_second : float
        A transfer slower than this has failed.
    grace_seconds : float
        Longest silence, also in the middle of a message.
    connect_seconds : float
        For connecting and the handshake together. A refused connection fails at once.
    pacer : Pacer, optional
        Holds back what is sent; the time that it takes is no part of any deadline.
    dscp : int, optional
        What packets are marked with, 0 to 63.
    tls : DataTls, optional
        What makes us a member; without it a node with TLS is not spoken to, and with it none without.
    """

    def __init__(
        self,
        node: str,
        address: str,
        *,
        floor_bytes_per_second: float = 10e6,
        grace_seconds: float = 2.0,
        connect_seconds: float = 2.0,
        pacer: Pacer | None = None,
        dscp: int | None = None,
        tls: DataTls | None = None,
    ) -> None:
        location_of(address)
        self.node, self.address = node, address
        #: Bytes on the wire over all connections, headers included; counted when a request is over.
        self.sent_bytes = 0
        self.received_bytes = 0
        self._floor = floor_bytes_per_second
        self._grace = grace_seconds
        self._connect_seconds = connect_seconds
        self._pacer = pacer
        self._dscp = dscp
        self._tls = tls
        self._slots = asyncio.Semaphore(_CONNECTIONS)
        self._idle: list[FcsComm] = []
        self._busy: set[FcsComm] = set()
        self._closed = False

    async def ping(self) -> dict[str, Any]:
        """Return name, used_bytes, limit_bytes, pending, and runs: each with [generation, token] or None."""
        return _fields(await self._request({"op": "ping"}))

    async def probe(self, data: Buffer, *, give_bytes: int) -> None:
        """Send bytes that the node drops, and have it answer with so many: how fast the link is."""
        reply = await self._request({"op": "probe", "give_bytes": give_bytes}, [data])
        if sum(frame.nbytes for frame in reply["frames"]) != give_bytes:
            raise NodeUnavailableError(self.node, f"did not answer with {give_bytes} bytes")

    async def begin(
        self,
        run: str,
        generation: int,
        token: str,
        *,
        shard: int,
        base: tuple[int, str] | None,
        keys: Sequence[str],
        reserve_bytes: int,
        order: int = 0,
        attempt: int = 0,
    ) -> list[str]:
        """Announce a save; return the keys that must be sent whole.

        Naming a `base` asserts that it was committed. `order` is that of the author's claim of the run, and
        `attempt` grows with each save that it begins anew: by it the node knows what comes late.
        `StaleBaseError` if the node does not hold the base or a later attempt has begun, `NodeFullError` if
        `reserve_bytes` do not fit, `FencedError` if an owner of higher order has begun a save.
        """
        reply = await self._request(
            {
                "op": "begin",
                "run": run,
                "generation": generation,
                "token": token,
                "shard": shard,
                "base": None if base is None else list(base),
                "keys": list(keys),
                "reserve_bytes": reserve_bytes,
                "order": order,
                "attempt": attempt,
            }
        )
        return _keys(reply, "absent")

    async def put(
        self, run: str, token: str, *, chunks: Sequence[Descriptor], frames: Sequence[Buffer]
    ) -> None:
        """Stage encoded chunks; `frames` may be reused when this returns."""
        _same_length(chunks, frames)
        await self._request(
            {"op": "put", "run": run, "token": token, "chunks": [c.to_wire() for c in chunks]}, frames
        )

    async def prepare(self, run: str, token: str, *, digest: str, manifest: Buffer, attempt: int = 0) -> None:
        """Vote for the commit: the node has every key, and keeps the save until it is decided."""
        message = {"op": "prepare", "run": run, "token": token, "digest": digest, "attempt": attempt}
        await self._request(message, [manifest])

    async def commit(self, run: str, generation: int, token: str) -> None:
        """Make a prepared save the committed generation."""
        await self._request(_at("commit", run, generation, token))

    async def abort(self, run: str, token: str, *, attempt: int = 0) -> None:
        """Drop a staged save, unless it was begun anew after that `attempt`."""
        await self._request({"op": "abort", "run": run, "token": token, "attempt": attempt})

    async def holds(self, run: str) -> dict[str, Any]:
        """Return what the node has of a run: committed, staged and pins."""
        return _fields(await self._request({"op": "holds", "run": run}))

    async def manifest(self, run: str, generation: int, token: str) -> Bits:
        """Return the bytes of a manifest."""
        reply = await self._request(_at("manifest", run, generation, token))
        if len(reply["frames"]) != 1:
            raise NodeUnavailableError(self.node, "answered without a manifest")
        found: Bits = reply["frames"][0]
        return found

    async def read(self, run: str, generation: int, token: str, *, keys: Sequence[str]) -> Read:
        """Return whole chunks; ask for at most about 64 MiB at a time. Asserts that `token` was committed."""
        reply = await self._request({**_at("read", run, generation, token), "keys": list(keys)})
        try:
            chunks = descriptors_from_wire(reply.get("chunks"))
        except CorruptDataError as error:
            raise NodeUnavailableError(self.node, f"answered nonsense: {error}") from error
        frames: list[Bits] = reply["frames"]
        missing, corrupt = _keys(reply, "missing"), _keys(reply, "corrupt")
        if {c.key for c in chunks} | set(missing) != set(keys) or [c.nbytes for c in chunks] != [
            f.nbytes for f in frames
        ]:
            raise NodeUnavailableError(self.node, "answered with other chunks than it was asked for")
        return Read(list(zip(chunks, frames, strict=True)), missing, corrupt)

    async def repair(
        self,
        run: str,
        generation: int,
        token: str,
        *,
        chunks: Sequence[Descriptor],
        frames: Sequence[Buffer],
    ) -> None:
        """Put whole chunks back into a generation that the node holds."""
        _same_length(chunks, frames)
        await self._request(
            {**_at("repair", run, generation, token), "chunks": [c.to_wire() for c in chunks]}, frames
        )

    async def adopt(
        self, run: str, generation: int, token: str, *, shard: int, manifest: Buffer, reserve_bytes: int
    ) -> list[str]:
        """Have the node hold a shard of a committed generation; return the chunks that it lacks.

        Asserts that the generation is the newest committed one. They are brought by :meth:`repair`, and what
        the node held of the run before becomes an older generation. `StaleBaseError` if it holds a newer
        one, `NodeFullError` if `reserve_bytes` are not free. Idempotent: what it has already is kept.
        """
        reply = await self._request(
            {**_at("adopt", run, generation, token), "shard": shard, "reserve_bytes": reserve_bytes},
            [manifest],
        )
        return _keys(reply, "absent")

    async def quarantine(self, run: str, generation: int, token: str, *, keys: Sequence[str]) -> None:
        """Tell the node that these chunks decode to wrong bits; it drops them."""
        await self._request({**_at("quarantine", run, generation, token), "keys": list(keys)})

    async def pin(self, run: str, generation: int, token: str) -> None:
        """Keep a generation readable until it is unpinned, whatever is committed after it."""
        await self._request(_at("pin", run, generation, token))

    async def unpin(self, run: str, generation: int, token: str) -> None:
        """Undo :meth:`pin`."""
        await self._request(_at("unpin", run, generation, token))

    async def persist(
        self,
        run: str,
        generation: int,
        token: str,
        *,
        location: str,
        directory: str,
        keys: Sequence[str],
        derived: Mapping[str, tuple[str, str, str]] | None = None,
        base: Mapping[str, Any] | None = None,
    ) -> tuple[int, list[str]]:
        """Have the node write chunks into the object tier; return the bytes written and the keys it lacks.

        `derived` tells, by key, of which chunk that the node holds a chunk is the cast, its dtype, and the
        digest of its bits. A node that does not know the field lacks those. `base` names a checkpoint of the
        object tier (the fields of a `BaseLink`) against which chunks may be written; a node that does not
        know it writes whole ones.
        """
        reply = await self._request(
            {
                **_at("persist", run, generation, token),
                "location": location,
                "directory": directory,
                "keys": list(keys),
                "derived": {key: list(of) for key, of in (derived or {}).items()},
                **({} if base is None else {"base": dict(base)}),
            }
        )
        written = reply.get("written_bytes")
        if type(written) is not int:
            raise NodeUnavailableError(self.node, "answered without written_bytes")
        return written, _keys(reply, "missing")

    async def ask(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Have the node serve an operation that it was started with, and return the fields of its reply."""
        return _fields(await self._request(dict(request)))

    async def drop(self, run: str) -> None:
        """Have the node forget a run."""
        await self._request({"op": "drop", "run": run})

    async def lease(self, run: str, seconds: float) -> bool:
        """Have the node keep a run for so long from now; say whether it holds anything of it."""
        return (await self._request({"op": "lease", "run": run, "seconds": float(seconds)})).get(
            "held"
        ) is True

    async def persisted(self, run: str, generation: int, token: str) -> None:
        """Tell the node that the object tier has a generation: it may be evicted when its lease has ended."""
        await self._request(_at("persisted", run, generation, token))

    async def status(self) -> dict[str, Any]:
        """Return bytes used, reserved and free, and of each run what is held, its lease and its damage."""
        return _fields(await self._request({"op": "status"}))

    async def close(self) -> None:
        """End all connections; requests in flight fail. Idempotent."""
        self._closed = True
        for comm in [*self._idle, *self._busy]:
            comm.abort()
        self._idle.clear()

    async def _request(self, message: dict[str, Any], frames: Sequence[Buffer] = ()) -> dict[str, Any]:
        packed = pack({**message, "frames": frames})
        async with self._slots:
            try:
                reply = await self._exchange_anew_if_stale(packed)
            except TimeoutError as error:
                why = f"{self.address} did not answer in time"
                raise NodeUnavailableError(self.node, ": ".join(filter(None, (why, str(error))))) from error
            except RefusedError as error:
                raise NodeRefusedError(self.node, f"{self.address}: {error}") from error
            except OSError as error:
                raise NodeUnavailableError(self.node, f"{self.address}: {_reason(error)}") from error
            except CorruptDataError as error:
                raise NodeUnavailableError(self.node, f"broke the protocol: {error}") from error
        if reply.get("status") == "ok":
            return reply
        raise self._error_in(reply)

    async def _exchange_anew_if_stale(self, packed: Packed) -> dict[str, Any]:
        """Send over an idle connection; over a new one if the node had closed that meanwhile."""
        while self._idle:
            comm = self._idle.pop()
            if comm.closed():
                continue
            try:
                return await self._exchange(comm, packed)
            except CommClosedError:
                self._check_open()
                break
        self._check_open()
        comm = await open_comm(self.address, self._connect_seconds, self._tls)
        comm.set_dscp(self._dscp)
        return await self._exchange(comm, packed)

    async def _exchange(self, comm: FcsComm, packed: Packed) -> dict[str, Any]:
        sent, received = comm.sent_bytes, comm.received_bytes
        self._busy.add(comm)
        try:
            async with self._patient(packed.payload_bytes) as pieces:
                await comm.send(packed, self._paced(packed, pieces))
            reply = await self._receive(comm)
        except BaseException:
            comm.abort()
            raise
        finally:
            self._busy.discard(comm)
            self.sent_bytes += comm.sent_bytes - sent
            self.received_bytes += comm.received_bytes - received
        if self._closed:
            comm.abort()
        else:
            self._idle.append(comm)
        return reply

    @asynccontextmanager
    async def _patient(self, nbytes: int) -> AsyncIterator[_Pieces]:
        """Bound the time of a message, and of each piece that it tells."""
        now = asyncio.get_running_loop().time
        patience = Patience(nbytes, floor_bytes_per_second=self._floor, grace_seconds=self._grace, now=now())
        try:
            async with asyncio.timeout_at(patience.next_piece(0, now())) as deadline:
                yield _Pieces(patience, deadline)
        except TimeoutError as error:
            raise TimeoutError(patience.told()) from error

    def _paced(self, packed: Packed, pieces: _Pieces) -> Pace:
        """Return what holds back the pieces of a message, and its deadline with them."""
        if self._pacer is None:
            return pieces.begin
        if packed.payload_bytes <= SMALL_BYTES:
            self._pacer.count(packed.payload_bytes)
            return pieces.begin
        return partial(pieces.begin_after, self._pacer.turn().wait)

    async def _receive(self, comm: FcsComm) -> dict[str, Any]:
        async with asyncio.timeout(_WORK_SECONDS):
            while True:
                async with asyncio.timeout(self._grace):
                    head = await comm.receive_head()
                async with self._patient(head.payload_bytes) as pieces:
                    reply = await comm.receive_payload(head, pieces.begin)
                if reply.get("status") != "working":
                    return reply

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"the client of storage node {self.node} is closed")

    def _error_in(self, reply: dict[str, Any]) -> FastCheckError:
        values = reply.get("error")
        try:
            if isinstance(values, list):
                return from_wire(values)
        except (TypeError, ValueError):
            pass
        return NodeUnavailableError(self.node, f"answered nonsense: {reply!r:.200}")


def clients_for(settings: Settings, pacer: Pacer | None = None) -> Callable[[str, str], PeerClient]:
    """Return what makes a client of a node's name and address, with the deadlines and TLS of the settings.

    Raises
    ------
    ConfigError
        If a file for TLS cannot be used.
    """
    return partial(
        PeerClient,
        floor_bytes_per_second=settings.floor_bytes_per_second,
        grace_seconds=settings.grace_seconds,
        connect_seconds=settings.connect_seconds,
        pacer=pacer,
        dscp=settings.dscp,
        tls=DataTls.of(settings),
    )


def _at(op: str, run: str, generation: int, token: str) -> dict[str, Any]:
    return {"op": op, "run": run, "generation": generation, "token": token}


def _fields(reply: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in reply.items() if name not in ("status", "frames")}


def _keys(reply: dict[str, Any], name: str) -> list[str]:
    found = reply.get(name, [])
    if not isinstance(found, list) or not all(isinstance(key, str) for key in found):
        raise TierError(f"the node answered {name} = {found!r:.200}, not a list of keys")
    return found


def _same_length(chunks: Sequence[Descriptor], frames: Sequence[Buffer]) -> None:
    if len(chunks) != len(frames):
        raise TierError(f"{len(chunks)} chunk descriptors for {len(frames)} frames")


def _reason(error: OSError) -> str:
    """Say what the system said: what `distributed` puts around it names its own objects."""
    cause: BaseException = error
    while isinstance(cause, CommClosedError) and isinstance(cause.__cause__, OSError):
        cause = cause.__cause__
    return (cause.strerror if isinstance(cause, OSError) else None) or str(cause)
