"""Faults at a chosen moment: a proxy that reads what a storage node is asked, and nodes behind proxies."""

from __future__ import annotations

import socket
import struct
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Final, Literal, Self

import msgpack

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import NodeInfo, Registration
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.merge_queue import MergeQueue
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.tcp_proxy import Listener, hang_up
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.wire import location_of

#: Magic, version, reserved, header bytes, frames, crc32c of the header, payload bytes.
_HEAD: Final = struct.Struct("<4sHHIIIQ")
_PIECE: Final = 2**16
#: A test that waits longer than this for something that should happen has failed.
_PATIENCE_SECONDS: Final = 20.0

Direction = Literal["request", "reply"]


class _Gone(Exception):  # noqa: N818  (no error: how a pump ends)
    """A connection ended."""


class _Pair:
    """One connection through the proxy: the client's socket and the node's."""

    def __init__(self, client: socket.socket, node: socket.socket | None) -> None:
        self.client, self.node = client, node
        #: Operation of the request that was forwarded last.
        self.op = ""

    def close(self) -> None:
        hang_up(sock for sock in (self.client, self.node) if sock is not None)


class GatedProxy:
    """A TCP proxy before the data port of one storage node, which sees the operation of each request.

    Any thread may call any method. The proxy listens on a loopback port of its own, also while the node is
    away; every thread and socket of it ends with `close` or the block.

    Parameters
    ----------
    target : str
        Data-port address of the node, ``fcs://host:port``.

    Notes
    -----
    A request is counted when its header has come; what is held is its whole message, and nothing of it has
    reached the other side. Answers that only say that the node is at work are forwarded as replies.
    """

    def __init__(self, target: str) -> None:
        self._changed = threading.Condition()
        self._target = _location(target)
        self._requests: Counter[str] = Counter()
        self._held: Counter[tuple[Direction, str]] = Counter()
        self._holds: dict[tuple[Direction, str], int] = {}
        self._corruptions: dict[tuple[Direction, str], int] = {}
        self._mode: Literal["forward", "blackhole", "cut"] = "forward"
        self._pairs: set[_Pair] = set()
        self._closed = False
        #: Bytes that crossed the proxy, headers included.
        self.to_node_bytes = 0
        self.from_node_bytes = 0
        #: How many messages were damaged.
        self.corrupted = 0
        self._listener = Listener(self._serve, name="fault-proxy")
        #: ``fcs://host:port`` of the proxy: what clients are told instead of the node's address.
        self.address = f"fcs://{self._listener.location}"

    # ---- what a test sees

    def count(self, op: str) -> int:
        """Return how many requests of an operation have come."""
        with self._changed:
            return self._requests[op]

    def wait_for(self, op: str, count: int = 1, *, seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait until `count` requests of an operation have come; `TimeoutError` if they do not."""
        self._wait(lambda: self._requests[op] >= count, seconds, f"{count} x {op}")

    def wait_held(self, op: str, *, reply: bool = False, seconds: float = _PATIENCE_SECONDS) -> None:
        """Wait until a message of an operation is being held; `TimeoutError` if none is."""
        key: tuple[Direction, str] = ("reply" if reply else "request", op)
        self._wait(lambda: self._held[key] > 0, seconds, f"a held {key[0]} of {op}")

    def _wait(self, found: Callable[[], bool], seconds: float, what: str) -> None:
        with self._changed:
            if not self._changed.wait_for(found, seconds):
                raise TimeoutError(f"the proxy {self.address} saw {dict(self._requests)}, not {what}")

    # ---- what a test does

    def hold(self, op: str, *, reply: bool = False, skip: int = 0) -> None:
        """Stop each message of an operation, after letting `skip` of them pass, until `release`."""
        with self._changed:
            self._holds["reply" if reply else "request", op] = skip

    def release(self) -> None:
        """Let pass what is held, and hold nothing any more."""
        with self._changed:
            self._holds.clear()
            self._changed.notify_all()

    def corrupt(self, op: str, *, reply: bool = True, times: int = 1) -> None:
        """Flip one bit in the payload of the next messages of an operation that have one.

        A message without payload passes unharmed: its header has a checksum of its own.
        """
        with self._changed:
            self._corruptions["reply" if reply else "request", op] = times

    def corrupt_header(self, op: str, *, reply: bool = True) -> None:
        """Flip one bit in the header of the next message of an operation."""
        with self._changed:
            self._corruptions["reply" if reply else "request", f"{op}#header"] = 1

    def cut(self) -> None:
        """Close every connection and end new ones at once, as when the node has died."""
        self._set_mode("cut")

    def blackhole(self) -> None:
        """Go on accepting connections and data, and forward and answer nothing, as when the node hangs."""
        self._set_mode("blackhole")

    def heal(self, target: str | None = None) -> None:
        """Forward again; to another address if one is given. Connections that were swallowed are closed."""
        with self._changed:
            self._target = self._target if target is None else _location(target)
            self._mode = "forward"
            self._drop_pairs()
            self._changed.notify_all()

    def _set_mode(self, mode: Literal["blackhole", "cut"]) -> None:
        with self._changed:
            self._mode = mode
            if mode == "cut":
                self._drop_pairs()
            self._changed.notify_all()

    def _drop_pairs(self) -> None:
        for pair in self._pairs:
            pair.close()

    def close(self) -> None:
        """End everything. Idempotent."""
        with self._changed:
            self._closed = True
            self._drop_pairs()
            self._changed.notify_all()
        self._listener.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- its threads

    def _serve(self, client: socket.socket) -> None:
        pair = self._connect(client)
        if pair is None:
            client.close()
            return
        if pair.node is not None:
            self._listener.spawn(self._pump, pair, "reply")
        self._pump(pair, "request")

    def _connect(self, client: socket.socket) -> _Pair | None:
        with self._changed:
            mode, target = self._mode, self._target
        node: socket.socket | None = None
        if mode == "forward":
            try:
                node = socket.create_connection(target, timeout=_PATIENCE_SECONDS)
            except OSError:
                return None
            node.settimeout(None)
            for sock in (client, node):
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        pair = _Pair(client, node)
        with self._changed:
            if self._closed or self._mode == "cut":
                if node is not None:
                    node.close()
                return None
            self._pairs.add(pair)
        return pair

    def _pump(self, pair: _Pair, direction: Direction) -> None:
        source, sink = (pair.client, pair.node) if direction == "request" else (pair.node, pair.client)
        assert source is not None
        try:
            while True:
                self._one_message(pair, direction, source, sink)
        except (_Gone, OSError):
            pair.close()
        finally:
            source.close()
            with self._changed:
                if pair.node is None or direction == "reply":
                    self._pairs.discard(pair)

    def _one_message(
        self, pair: _Pair, direction: Direction, source: socket.socket, sink: socket.socket | None
    ) -> None:
        head = _exactly(source, _HEAD.size)
        header_bytes, payload_bytes = _HEAD.unpack(head)[3], _HEAD.unpack(head)[6]
        header = bytearray(_exactly(source, header_bytes))
        if direction == "request":
            pair.op = _op_of(bytes(header))
        payload_damage = self._pass(pair, direction, header, payload_bytes)
        self._forward(direction, sink, head + bytes(header))
        left = payload_bytes
        while left:
            piece = bytearray(_some(source, min(left, _PIECE)))
            left -= len(piece)
            if payload_damage:
                piece[len(piece) // 2] ^= 1
                payload_damage = False
            self._forward(direction, sink, bytes(piece))

    def _pass(self, pair: _Pair, direction: Direction, header: bytearray, payload_bytes: int) -> bool:
        """Count a message and hold it if it has to be; return whether to damage its payload."""
        key: tuple[Direction, str] = (direction, pair.op)
        with self._changed:
            if direction == "request":
                self._requests[pair.op] += 1
                self._changed.notify_all()
            if self._holds.get(key) == 0:
                self._held[key] += 1
                self._changed.notify_all()
                self._changed.wait_for(lambda: key not in self._holds or self._ended(pair))
                self._held[key] -= 1
            elif key in self._holds:
                self._holds[key] -= 1
            if self._take_corruption(direction, f"{pair.op}#header"):
                header[len(header) // 2] ^= 1
            return payload_bytes > 0 and self._take_corruption(*key)

    def _take_corruption(self, direction: Direction, op: str) -> bool:
        left = self._corruptions.get((direction, op), 0)
        if left:
            self._corruptions[direction, op] = left - 1
            self.corrupted += 1
        return left > 0

    def _ended(self, pair: _Pair) -> bool:
        return self._closed or self._mode == "cut" or pair not in self._pairs

    def _forward(self, direction: Direction, sink: socket.socket | None, data: bytes) -> None:
        with self._changed:
            swallowed = self._mode == "blackhole" or sink is None
            if self._closed or self._mode == "cut":
                raise _Gone
            if not swallowed and direction == "request":
                self.to_node_bytes += len(data)
            elif not swallowed:
                self.from_node_bytes += len(data)
        if not swallowed:
            assert sink is not None
            sink.sendall(data)


class FaultyCluster:
    """Storage nodes of this process, each behind a `GatedProxy`, as a run sees them.

    Only the address of the proxy is registered, so a node can lose its memory, die and come back without
    the coordinator noticing: the run has to find out by itself.

    Parameters
    ----------
    folder : Path
        For the coordinator's database.
    nodes : int
        Number of nodes, named ``n0``, ``n1`` and so on, each in a rack of its own.
    memory_bytes : int
        Limit of each node.
    """

    def __init__(self, folder: Path, nodes: int = 4, *, memory_bytes: int = 2**30) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        #: What managers are given.
        self.coordinator = f"sqlite:///{folder}/coordinator.db"
        self._memory_bytes = memory_bytes
        self._limits: dict[str, int] = {}
        self._session = connect(self.coordinator)
        self.proxies: dict[str, GatedProxy] = {}
        self.stores: dict[str, ShardStore] = {}
        self._running: dict[str, tuple[DataServer, MergeQueue]] = {}
        self._registrations: dict[str, Registration] = {}
        try:
            for number in range(nodes):
                self.add(f"n{number}", rack=f"r{number}")
        except BaseException:
            self.close()
            raise

    def add(self, name: str, *, rack: str = "default", memory_bytes: int | None = None) -> None:
        """Start one more node and register it; with another limit than the others if one is given."""
        self._limits[name] = self._memory_bytes if memory_bytes is None else memory_bytes
        self.proxies[name] = GatedProxy(self._start(name))
        info = NodeInfo(name, self.proxies[name].address, rack, f"host-{name}", self._limits[name])
        self._registrations[name] = self._session.register(info)

    def _start(self, name: str) -> str:
        store = ShardStore(name, self._limits[name])
        queue = MergeQueue(store)
        server = DataServer(store, open_store)
        server.start()
        self.stores[name] = store
        self._running[name] = (server, queue)
        return server.address

    def _stop(self, name: str) -> None:
        server, queue = self._running.pop(name)
        server.close()
        queue.close()

    def restart(self, name: str) -> None:
        """Have a node die and come back at once, with empty memory and the address that is registered."""
        self._stop(name)
        self.proxies[name].heal(self._start(name))

    def unregister(self, name: str) -> None:
        """Have the coordinator notice that a node is gone."""
        self._registrations.pop(name).close()

    def release(self) -> None:
        """Let pass what any proxy holds."""
        for proxy in self.proxies.values():
            proxy.release()

    @property
    def received_bytes(self) -> int:
        """Bytes that all nodes together have sent to clients."""
        return sum(proxy.from_node_bytes for proxy in self.proxies.values())

    def close(self) -> None:
        """End everything. Idempotent."""
        for proxy in self.proxies.values():
            proxy.close()
        for name in list(self._running):
            self._stop(name)
        self._session.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def flip_in_process(pid: int, pattern: bytes, *, at: int) -> int:
    """Flip one bit of every copy of `pattern` in the memory of another process; return how many there were.

    Parameters
    ----------
    pid : int
        A child of this process, or one that it may trace.
    pattern : bytes
        At least 64 bytes that occur nowhere else by chance.
    at : int
        Which byte of the pattern.
    """
    if len(pattern) < 64:
        raise ValueError(f"a pattern of {len(pattern)} bytes may occur by chance; at least 64 are wanted")
    found = 0
    regions = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    with Path(f"/proc/{pid}/mem").open("r+b", buffering=0) as memory:
        for region in regions:
            span, rights = region.split()[:2]
            if not rights.startswith("rw"):
                continue
            start, end = (int(part, 16) for part in span.split("-"))
            try:
                memory.seek(start)
                content = memory.read(end - start)
            except (OSError, OverflowError):
                continue
            offset = content.find(pattern)
            while offset >= 0:
                memory.seek(start + offset + at)
                memory.write(bytes([pattern[at] ^ 1]))
                found += 1
                offset = content.find(pattern, offset + 1)
    return found


def wait_until(condition: Callable[[], bool], what: str, *, seconds: float = _PATIENCE_SECONDS) -> None:
    """Wait for something in another process that has no event; `TimeoutError` if it does not come."""
    deadline, pause = Deadline.after(seconds), threading.Event()
    while not condition():
        if deadline.passed:
            raise TimeoutError(f"{what} did not come in {seconds} s")
        pause.wait(0.02)


def _location(address: str) -> tuple[str, int]:
    host, _, port = location_of(address).rpartition(":")
    return host, int(port)


def _op_of(header: bytes) -> str:
    try:
        _, message = msgpack.unpackb(header)
        return str(message.get("op", "hello"))
    except (ValueError, TypeError, AttributeError):
        return "?"


def _some(sock: socket.socket, count: int) -> bytes:
    data = sock.recv(count)
    if not data:
        raise _Gone
    return data


def _exactly(sock: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count:
        parts += _some(sock, count - len(parts))
    return bytes(parts)
