"""The data port of a storage node: its own thread and event loop, so that Dask can come and go."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any, TypeVar

import numpy as np
from distributed.comm.core import Comm, CommClosedError, listen

from fastcheck_dask.errors import (
    CorruptDataError,
    FastCheckError,
    NodeFullError,
    TierError,
    TierFullError,
    to_wire,
)
from fastcheck_dask.ids import check_name
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.node.casts import Wanted, encoded_cast
from fastcheck_dask.node.deltas import Bases, link_from_wire, smaller
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.tiers.descriptors import Descriptor, descriptors_from_wire
from fastcheck_dask.tiers.store import ObjectStore
from fastcheck_dask.tiers.wire import DEFAULT_LIMITS, Bits, FcsComm, listen_address, pack
from fastcheck_dask.tiers.wire_tls import DataTls

#: How often a client that waits is told that the node is at work.
WORKING_SECONDS = 0.5
#: Slower transfers than this are ended, so that a stopped client cannot keep buffers and readers for ever.
FLOOR_BYTES_PER_SECOND = 1e6
GRACE_SECONDS = 30.0
#: What a node gives to who measures the link.
PROBE_LIMIT_BYTES = 16 * 2**20
#: Connections at a time; each may bring one message into memory.
COMM_LIMIT = 128
#: Longest lease, in seconds: a year.
_LEASE_LIMIT = 366 * 86400.0

T = TypeVar("T")

_Request = dict[str, Any]
_Reply = dict[str, Any]

logger = logging.getLogger(__name__)


class DataServer:
    """Serves one store over ``fcs://``, or ``fcss://`` with TLS.

    Requests are decoded into calls of the store, which run in threads: the loop only moves bytes, and
    answers `ping` itself. Every error becomes a reply; what breaks the protocol loses its connection.

    Parameters
    ----------
    store : ShardStore
        Outlives the server.
    open_store : callable
        Opens an object tier by its location, for `persist`.
    host, port
        Where to listen; port 0 takes any.
    insecure : bool
        Whether `host` may be other than loopback without TLS (`ConfigError` if not).
    operations : mapping of str to callable, optional
        What else is served here: each gets the request and returns the fields of the reply, in a thread of a
        pool of their own, and should be quick.
    report_more : callable
        Returns what `status` says besides what the store does, as plain values.
    dscp : int, optional
        What packets are marked with, 0 to 63.
    tls : DataTls, optional
        Has only members of a CA let in.
    """

    def __init__(
        self,
        store: ShardStore,
        open_store: Callable[[str], ObjectStore],
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        insecure: bool = False,
        operations: Mapping[str, Callable[[Mapping[str, Any]], Mapping[str, Any]]] | None = None,
        report_more: Callable[[], dict[str, Any]] = dict,
        dscp: int | None = None,
        tls: DataTls | None = None,
    ) -> None:
        self._dscp = dscp
        self._store = store
        self._operations = operations or {}
        self._report_more = report_more
        self._open_store = open_store
        self._wanted = listen_address(host, port, insecure=insecure, tls=tls is not None)
        self._tls = tls
        #: ``fcs://host:port`` or ``fcss://host:port``, once started.
        self.address = ""
        self._work = ThreadPoolExecutor(8, thread_name_prefix="fastcheck-store")
        # Writing to a hung object tier must not take the threads that saves and loads need.
        self._bases = Bases()
        self._persist_work = ThreadPoolExecutor(2, thread_name_prefix="fastcheck-persist")
        # Nor may saves and loads keep the master from answering.
        self._operations_work = ThreadPoolExecutor(2, thread_name_prefix="fastcheck-operations")
        self._comms: set[FcsComm] = set()
        #: Connections over which each save, by run and token, has come.
        self._savers: Counter[tuple[str, str]] = Counter()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stopping: asyncio.Event | None = None
        self._started = threading.Event()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._main, name="fastcheck-data", daemon=True)

    def start(self) -> None:
        """Listen; returns when connections are accepted. `TierError` if the port cannot be had."""
        self._thread.start()
        self._started.wait()
        if self._failure is not None:
            self._thread.join()
            raise TierError(
                f"the data port {self._wanted} cannot be opened: {self._failure}"
            ) from self._failure

    def close(self) -> None:
        """End all connections and the thread. Work that has begun goes on in its thread. Idempotent."""
        loop, stopping = self._loop, self._stopping
        if loop is not None and stopping is not None and self._thread.is_alive():
            loop.call_soon_threadsafe(stopping.set)
            self._thread.join()
        self._work.shutdown(wait=False, cancel_futures=True)
        self._persist_work.shutdown(wait=False, cancel_futures=True)
        self._operations_work.shutdown(wait=False, cancel_futures=True)

    def _main(self) -> None:
        try:
            asyncio.run(self._serve())
        except Exception as error:  # boundary of the thread: start() raises it, or it is logged
            self._failure = error
            if self._started.is_set():
                logger.exception("the data server of node %s ended", self._store.name)
        finally:
            self._started.set()

    async def _serve(self) -> None:
        self._loop, self._stopping = asyncio.get_running_loop(), asyncio.Event()
        listener = await listen(self._wanted, self._serve_comm, tls=self._tls)  # type: ignore[no-untyped-call]
        self.address = listener.contact_address
        self._started.set()
        try:
            await self._stopping.wait()
        finally:
            listener.stop()
            for comm in list(self._comms):
                comm.abort()

    async def _serve_comm(self, comm: Comm) -> None:
        assert isinstance(comm, FcsComm)
        if len(self._comms) >= COMM_LIMIT:
            logger.warning("dropped a connection from %s: %d are open", comm.peer_address, COMM_LIMIT)
            comm.abort()
            return
        self._comms.add(comm)
        saves: set[tuple[str, str]] = set()
        try:
            comm.set_dscp(self._dscp)
            while not comm.closed():
                head = await comm.receive_head()
                async with asyncio.timeout(_seconds_for(head.payload_bytes)):
                    request = await comm.receive_payload(head)
                self._note_saver(request, saves)
                await self._serve_request(comm, request)
        except CommClosedError:
            logger.debug("connection from %s ended", comm.peer_address)
        except (FastCheckError, TimeoutError, MemoryError) as error:
            logger.warning("dropped the connection from %s: %s", comm.peer_address, str(error) or "too slow")
        finally:
            comm.abort()
            self._comms.discard(comm)
            self._forget_saver(saves)

    def _note_saver(self, request: _Request, saves: set[tuple[str, str]]) -> None:
        """Remember which saves come over a connection."""
        run, token = request.get("run"), request.get("token")
        if request.get("op") in ("begin", "put") and isinstance(run, str) and isinstance(token, str):
            if (run, token) not in saves:
                self._savers[run, token] += 1
            saves.add((run, token))

    def _forget_saver(self, saves: set[tuple[str, str]]) -> None:
        """Have the saves expire soon whose last connection this was."""
        for run, token in saves:
            self._savers[run, token] -= 1
            if not self._savers[run, token]:
                del self._savers[run, token]
                with suppress(RuntimeError):  # a server that ends forgets all of them
                    self._operations_work.submit(self._orphan, run, token)

    def _orphan(self, run: str, token: str) -> None:
        # In a thread: the lock of the store may be taken. Its author may be back meanwhile.
        if (run, token) not in self._savers:
            self._store.orphan(run, token)

    async def _serve_request(self, comm: FcsComm, request: _Request) -> None:
        reading = request.get("op") == "read"
        with self._store.reading() if reading else nullcontext():
            answer = asyncio.ensure_future(self._answer(request, pack))
            try:
                while not (await asyncio.wait({answer}, timeout=WORKING_SECONDS))[0]:
                    async with asyncio.timeout(GRACE_SECONDS):
                        await comm.write({"status": "working"})
                reply = answer.result()
                async with asyncio.timeout(_seconds_for(reply.payload_bytes)):
                    await comm.send(reply)
            finally:
                answer.cancel()

    async def _answer(self, request: _Request, encode: Callable[[_Reply], T]) -> T:
        """Serve a request, and encode the reply in the same thread: with many keys that takes time, too."""
        op = request.get("op")
        try:
            if op == "ping":
                return encode({"status": "ok", **self._store.status()})
            pool, serve = self._handler(op)
            return await asyncio.get_running_loop().run_in_executor(
                pool, lambda: encode({"status": "ok", **serve(request)})
            )
        except Exception as error:  # boundary of the request: every error is the client's to handle
            if not isinstance(error, FastCheckError):
                logger.exception("node %s: %s failed", self._store.name, op)
            if isinstance(error, MemoryError):
                # The system has less than the node was promised; another node may have it.
                error = NodeFullError(self._store.name, sum(f.nbytes for f in request.get("frames", ())), 0)
            return encode({"status": "error", "error": to_wire(error)})

    def _handler(self, op: object) -> tuple[Executor, Callable[[_Request], Mapping[str, Any]]]:
        """Return what serves an operation, and where it runs."""
        handler = _HANDLERS.get(op) if isinstance(op, str) else None
        if handler is not None:
            return self._persist_work if op == "persist" else self._work, partial(handler, self)
        if isinstance(op, str) and op in self._operations:
            return self._operations_work, self._operations[op]
        raise TierError(f"a storage node does not know the operation {op!r:.80}")

    # ---- operations

    def _probe(self, request: _Request) -> _Reply:
        nbytes = _natural(request, "give_bytes")
        if nbytes > PROBE_LIMIT_BYTES:
            raise TierError(f"at most {PROBE_LIMIT_BYTES:,} bytes are given to a probe, not {nbytes:,}")
        return {"frames": [np.zeros(nbytes, np.uint8)]}

    def _begin(self, request: _Request) -> _Reply:
        run, generation, token = _name(request)
        base = _field(request, "base", list, optional=True)
        if base is not None and [type(part) for part in base] != [int, str]:
            raise CorruptDataError(f"base is [generation, token], got {base!r:.80}")

        def begin() -> list[str]:
            return self._store.begin(
                run,
                generation,
                token,
                shard=_natural(request, "shard"),
                base=None if base is None else (base[0], base[1]),
                keys=_texts(request, "keys"),
                reserve_bytes=_natural(request, "reserve_bytes"),
                order=_natural(request, "order"),
                attempt=_natural(request, "attempt"),
            )

        try:
            return {"absent": begin()}
        except TierFullError:
            # Waiting deltas are memory, too.
            self._store.drain(run)
            return {"absent": begin()}

    def _put(self, request: _Request) -> _Reply:
        self._store.put(_run(request), _field(request, "token", str), _chunks(request))
        return {}

    def _prepare(self, request: _Request) -> _Reply:
        frames: list[Bits] = request["frames"]
        if len(frames) != 1:
            raise CorruptDataError(f"prepare brings one manifest, got {len(frames)}")
        self._store.prepare(
            _run(request),
            _field(request, "token", str),
            digest=_field(request, "digest", str),
            manifest=frames[0],
            attempt=_natural(request, "attempt"),
        )
        return {}

    def _commit(self, request: _Request) -> _Reply:
        self._store.commit(*_name(request))
        return {}

    def _abort(self, request: _Request) -> _Reply:
        run, token = _run(request), _field(request, "token", str)
        self._store.abort(run, token, attempt=_natural(request, "attempt"))
        return {}

    def _holds(self, request: _Request) -> _Reply:
        return self._store.holds(_run(request))

    def _manifest(self, request: _Request) -> _Reply:
        return {"frames": [self._store.manifest(*_name(request))]}

    def _read(self, request: _Request) -> _Reply:
        found = self._store.read(
            *_name(request), keys=_texts(request, "keys"), limit_bytes=DEFAULT_LIMITS.message_bytes
        )
        return {
            "chunks": [entry.descriptor.to_wire() for entry in found.entries],
            "missing": found.missing,
            "corrupt": found.corrupt,
            "frames": [entry.payload for entry in found.entries],
        }

    def _repair(self, request: _Request) -> _Reply:
        self._store.repair(*_name(request), _chunks(request))
        return {}

    def _adopt(self, request: _Request) -> _Reply:
        frames: list[Bits] = request["frames"]
        if len(frames) != 1:
            raise CorruptDataError(f"adopt brings one manifest, got {len(frames)}")
        run, generation, token = _name(request)
        manifest = Manifest.from_bytes(frames[0].data, where=f"manifest for node {self._store.name}")
        if (manifest.run, manifest.generation, manifest.token) != (run, generation, token):
            raise CorruptDataError(f"the manifest is not that of generation {generation} ({token}) of {run}")
        absent = self._store.adopt(
            run,
            generation,
            token,
            manifest=frames[0],
            wanted=manifest.wanted_on(_natural(request, "shard")),
            reserve_bytes=_natural(request, "reserve_bytes"),
        )
        return {"absent": absent}

    def _quarantine(self, request: _Request) -> _Reply:
        self._store.quarantine(*_name(request), _texts(request, "keys"))
        return {}

    def _pin(self, request: _Request) -> _Reply:
        self._store.pin(*_name(request))
        return {}

    def _unpin(self, request: _Request) -> _Reply:
        self._store.unpin(*_name(request))
        return {}

    def _persist(self, request: _Request) -> _Reply:
        directory = _field(request, "directory", str)
        keys = _texts(request, "keys")
        casts = _field(request, "derived", dict, optional=True) or {}
        derived = {key: Wanted.from_wire(value) for key, value in casts.items()}
        for path in (directory, *keys):
            if not path or any(part in ("", ".", "..") for part in path.split("/")):
                raise TierError(f"{path!r:.200} cannot be part of a path in the object tier")
        store = self._open_store(_field(request, "location", str))
        named = _field(request, "base", dict, optional=True)
        base = None if named is None else self._bases.open(store, link_from_wire(named))
        written, missing = 0, []
        for key in keys:
            found = self._payload(_name(request), key, derived.get(key))
            if found is None:
                missing.append(key)
                continue
            payload = found[0] if base is None else smaller(*found, key=key, base=base)
            store.write(f"{directory}/{key}", payload)
            written += payload.nbytes
        return {"written_bytes": written, "missing": missing}

    def _payload(
        self, name: tuple[str, int, str], key: str, wanted: Wanted | None
    ) -> tuple[Bits, str] | None:
        """Return a whole payload, stored or made of a stored one, and its dtype; None if none is intact."""
        found = self._store.read(*name, keys=[key if wanted is None else wanted.source])
        for entry in found.entries:
            if wanted is None:
                return entry.payload, entry.descriptor.dtype
            try:
                return encoded_cast(entry, wanted), wanted.dtype
            except CorruptDataError as error:
                logger.warning("node %s cannot make chunk %s: %s", self._store.name, key, error)
        return None

    def _drop(self, request: _Request) -> _Reply:
        self._store.drop(_run(request))
        return {}

    def _lease(self, request: _Request) -> _Reply:
        seconds: float = _field(request, "seconds", float)
        if not 0 <= seconds <= _LEASE_LIMIT:
            raise CorruptDataError(f"a lease has 0 to {_LEASE_LIMIT:.0f} seconds, got {seconds}")
        return {"held": self._store.lease(_run(request), seconds)}

    def _persisted(self, request: _Request) -> _Reply:
        self._store.persisted(*_name(request))
        return {}

    def _status(self, _request: _Request) -> _Reply:
        return {**self._store.report(), **self._report_more()}


_HANDLERS: dict[str, Callable[[DataServer, _Request], _Reply]] = {
    "probe": DataServer._probe,
    "begin": DataServer._begin,
    "put": DataServer._put,
    "prepare": DataServer._prepare,
    "commit": DataServer._commit,
    "abort": DataServer._abort,
    "holds": DataServer._holds,
    "manifest": DataServer._manifest,
    "read": DataServer._read,
    "repair": DataServer._repair,
    "adopt": DataServer._adopt,
    "quarantine": DataServer._quarantine,
    "pin": DataServer._pin,
    "unpin": DataServer._unpin,
    "persist": DataServer._persist,
    "drop": DataServer._drop,
    "lease": DataServer._lease,
    "persisted": DataServer._persisted,
    "status": DataServer._status,
}


def _seconds_for(nbytes: int) -> float:
    return nbytes / FLOOR_BYTES_PER_SECOND + GRACE_SECONDS


def _field(request: _Request, name: str, kind: type, *, optional: bool = False) -> Any:
    value = request.get(name)
    if (optional and value is None) or type(value) is kind:
        return value
    raise CorruptDataError(f"{name} must be of type {kind.__name__}, got {value!r:.80}")


def _natural(request: _Request, name: str) -> int:
    value: int = _field(request, name, int)
    if value < 0:
        raise CorruptDataError(f"{name} must not be negative, got {value}")
    return value


def _texts(request: _Request, name: str) -> list[str]:
    values: list[str] = _field(request, name, list)
    if not all(isinstance(value, str) for value in values) or len(set(values)) != len(values):
        raise CorruptDataError(f"{name} must be distinct texts")
    return values


def _run(request: _Request) -> str:
    return check_name(request.get("run"), "a run")


def _name(request: _Request) -> tuple[str, int, str]:
    return _run(request), _natural(request, "generation"), _field(request, "token", str)


def _chunks(request: _Request) -> list[tuple[Descriptor, Bits]]:
    descriptors = descriptors_from_wire(request.get("chunks"))
    frames: list[Bits] = request["frames"]
    if len(descriptors) != len(frames):
        raise CorruptDataError(f"{len(descriptors)} chunk descriptors came with {len(frames)} frames")
    return list(zip(descriptors, frames, strict=True))
