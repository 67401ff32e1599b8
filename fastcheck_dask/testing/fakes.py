"""Doubles of what is slow or elsewhere: storage nodes, a coordinator and encoders in this process.

They do what the real ones do, with the real store, codecs and rules of a commit; only sockets, processes and
files are missing. Faults are injected by name of the operation.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any

import numpy as np

from fastcheck_dask.coordination.base import Abort, CommitRecord, Decision, Health, HealthState, NodeInfo
from fastcheck_dask.coordination.candidacy import EPOCH
from fastcheck_dask.coordination.commits import (
    bounded,
    check_abort,
    check_commit,
    conflicting_mark,
    fenced,
    in_use,
    judge,
    judge_relocation,
)
from fastcheck_dask.errors import (
    ClosedError,
    ConfigError,
    CoordinationError,
    NodeUnavailableError,
)
from fastcheck_dask.ids import check_name
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.entries import MemoryEntries, SharedEntries
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.store import ObjectStore
from fastcheck_dask.tiers.wire import Bits, Buffer, pack

#: Gets the request, before or after the node did what it says; raises what the client is to see.
Fault = Callable[[dict[str, Any]], None]


class FakeNode:
    """A storage node without process and port: the real store behind the real request handlers.

    Attributes
    ----------
    store : ShardStore
        What it holds.
    down : bool
        Whether it answers at all.
    calls : list of str
        The operations asked of it, in order.
    before, after : dict of str to Fault
        Faults by operation; one in `after` makes the reply of what was done be lost.
    """

    def __init__(
        self,
        name: str,
        *,
        limit_bytes: int = 2**30,
        opener: Callable[[str], ObjectStore] = open_store,
    ) -> None:
        self.name = name
        self._limit_bytes, self._opener = limit_bytes, opener
        self.down = False
        self.calls: list[str] = []
        self.before: dict[str, Fault] = {}
        self.after: dict[str, Fault] = {}
        self._server: DataServer | None = None
        self.restart()

    @property
    def info(self) -> NodeInfo:
        """What its registration says."""
        return NodeInfo(self.name, self.address, f"rack-{self.name}", f"host-{self.name}", self._limit_bytes)

    @property
    def address(self) -> str:
        """An address that nobody listens at."""
        return "fcs://127.0.0.1:1"

    def restart(self) -> None:
        """Lose everything, as when the machine goes down and comes back."""
        self.close()
        self.store = ShardStore(self.name, self._limit_bytes)
        self._server = DataServer(self.store, self._opener)

    def fail(self, op: str, error: BaseException, *, after: bool = False, skip: int = 0) -> None:
        """Raise `error` for `op`, `skip` calls from now; `after` it was done, or instead."""
        left = [skip]

        def fault(_request: dict[str, Any]) -> None:
            if left[0] == 0:
                raise error
            left[0] -= 1

        (self.after if after else self.before)[op] = fault

    def heal(self) -> None:
        """Remove all faults."""
        self.down = False
        self.before.clear()
        self.after.clear()

    async def serve(self, request: dict[str, Any]) -> dict[str, Any]:
        """Answer a request as the data port does."""
        op = request["op"]
        self.calls.append(op)
        if self.down:
            raise NodeUnavailableError(self.name, "is down")
        if op in self.before:
            self.before[op](request)
        assert self._server is not None
        reply: dict[str, Any] = await self._server._answer(request, dict)
        if op in self.after:
            self.after[op](request)
        return reply

    def close(self) -> None:
        """End its threads. Idempotent."""
        if self._server is not None:
            self._server.close()
            self._server = None


class FakeClient(PeerClient):
    """A client that reaches its node without a socket; frames are copied and limits checked all the same."""

    def __init__(self, node: FakeNode) -> None:
        super().__init__(node.name, node.address)
        self._node = node

    async def _request(self, message: dict[str, Any], frames: Sequence[Buffer] = ()) -> dict[str, Any]:
        self._check_open()
        packed = pack({**message, "frames": frames})
        self.sent_bytes += packed.payload_bytes
        reply = await self._node.serve({**message, "frames": [_copy(view) for view in packed.buffers]})
        back = pack(reply)
        self.received_bytes += back.payload_bytes
        if reply["status"] != "ok":
            raise self._error_in(reply)
        return {**reply, "frames": [_copy(view) for view in back.buffers]}


def _copy(view: memoryview) -> Bits:
    return np.frombuffer(bytearray(view), np.uint8)


class FakeNodes:
    """Some storage nodes, named ``n0``, ``n1`` and so on; their threads end with the block."""

    def __init__(
        self, count: int, *, limit_bytes: int = 2**30, opener: Callable[[str], ObjectStore] = open_store
    ) -> None:
        names = [f"n{number}" for number in range(count)]
        self._by_name = {name: FakeNode(name, limit_bytes=limit_bytes, opener=opener) for name in names}
        self.clients: list[FakeClient] = []

    def __getitem__(self, name: str) -> FakeNode:
        return self._by_name[name]

    def __iter__(self) -> Iterator[FakeNode]:
        return iter(self._by_name.values())

    def client(self, name: str, _address: str) -> PeerClient:
        """Return a new client of a node."""
        client = FakeClient(self._by_name[name])
        self.clients.append(client)
        return client

    @property
    def infos(self) -> tuple[NodeInfo, ...]:
        """The registrations of those that are not down."""
        return tuple(node.info for node in self._by_name.values() if not node.down)

    def close(self) -> None:
        """End all threads. Idempotent."""
        for node in self._by_name.values():
            node.close()

    def __enter__(self) -> FakeNodes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@dataclass
class _Shared:
    lock: threading.Condition = field(default_factory=threading.Condition)
    nodes: dict[str, tuple[NodeInfo, FakeCoordinator]] = field(default_factory=dict)
    #: Run to owner, session and fencing token.
    claims: dict[str, tuple[str, FakeCoordinator, int]] = field(default_factory=dict)
    fences: dict[str, int] = field(default_factory=dict)
    decisions: dict[str, dict[int, Decision]] = field(default_factory=dict)
    entries: SharedEntries = field(default_factory=SharedEntries)


class FakeCoordinator:
    """A coordinator in memory. Each instance is a session; :meth:`another` opens one more.

    Attributes
    ----------
    unreachable : bool
        Whether every call raises `CoordinationError`.
    commit_faults : list of (error, done)
        The next commits raise these, one each, after they took effect if `done`.
    """

    def __init__(self, shared: _Shared | None = None) -> None:
        self._shared = _Shared() if shared is None else shared
        self._closed = False
        self._entries = self._shared.entries.session()
        self.commit_faults: list[tuple[BaseException, bool]] = []
        #: Commits that were asked for.
        self.asked: list[CommitRecord] = []

    @property
    def entries(self) -> MemoryEntries:
        """Small shared entries, in the same session."""
        return self._entries

    @property
    def unreachable(self) -> bool:
        """Whether nothing is answered; the session and what is ephemeral live on."""
        return self._entries.unreachable

    @unreachable.setter
    def unreachable(self, value: bool) -> None:
        self._entries.unreachable = value

    def another(self) -> FakeCoordinator:
        """Return another session with the same coordinator."""
        return FakeCoordinator(self._shared)

    def register(self, info: NodeInfo) -> FakeRegistration:
        """Announce a storage node; see `Coordinator`."""
        self._check()
        check_name(info.name, "a node's name")
        bounded(info.to_bytes(), f"the description of node {info.name}")
        with self._shared.lock:
            if info.name in self._shared.nodes:
                raise CoordinationError(f"a storage node named {info.name!r} is registered and alive")
            self._shared.nodes[info.name] = info, self
        return FakeRegistration(self, info.name)

    def nodes(self) -> tuple[NodeInfo, ...]:
        """Return the live storage nodes, sorted by name."""
        self._check()
        with self._shared.lock:
            return tuple(info for _, (info, _) in sorted(self._shared.nodes.items()))

    def claim(self, run: str, owner: str, *, wait_seconds: float = 0.0, takeover: bool = False) -> FakeClaim:
        """Own a run; see `Coordinator`."""
        check_name(run, "run")
        self._check()
        shared = self._shared
        with shared.lock:
            if not takeover and not shared.lock.wait_for(lambda: run not in shared.claims, wait_seconds):
                raise in_use(run, shared.claims[run][0])
            token = shared.fences[run] = shared.fences.get(run, 0) + 1
            shared.claims[run] = owner, self, token
        return FakeClaim(self, run, token)

    def owner(self, run: str) -> str | None:
        """Return who owns a run now; see `Coordinator`."""
        self._check()
        check_name(run, "run")
        with self._shared.lock:
            found = self._shared.claims.get(run)
        return None if found is None else str(found[0])

    def runs(self) -> tuple[str, ...]:
        """Return the names of all runs; see `Coordinator`."""
        self._check()
        with self._shared.lock:
            return tuple(sorted(self._shared.fences))

    def commit(self, record: CommitRecord, claim: Any) -> CommitRecord:
        """Publish a generation; see `Coordinator`."""
        self._check()
        self.asked.append(record)
        error, done = self.commit_faults.pop(0) if self.commit_faults else (None, True)
        if error is not None and not done:
            raise error
        check_commit(record, claim)
        with self._shared.lock:
            stored = self._shared.decisions.setdefault(record.run, {})
            owner, *binding = self._shared.claims.get(record.run, ("", None, 0))
            found = judge(
                record,
                stored=stored.get(record.generation),
                latest=max((g for g, one in stored.items() if isinstance(one, CommitRecord)), default=None),
                in_force=binding == [self, claim.fencing_token],
                owner=owner,
            )
            if found is None:
                found = stored[record.generation] = record
        if error is not None:
            raise error
        return found

    def abort(self, run: str, generation: int, *, token: str, reason: str) -> Decision:
        """Decide that a generation will not be committed; see `Coordinator`."""
        self._check()
        wanted = Abort(run, generation, token, reason)
        check_abort(wanted)
        with self._shared.lock:
            return self._shared.decisions.setdefault(run, {}).setdefault(generation, wanted)

    def newest_decided(self, run: str) -> int:
        """Return the greatest generation that was committed or aborted, 0 if there is none."""
        self._check()
        with self._shared.lock:
            return max(self._shared.decisions.get(run, {}), default=0)

    def mark_persisted(self, run: str, generation: int, token: str) -> None:
        """Note that the object tier has a generation; see `Coordinator`."""
        self._check()
        with self._shared.lock:
            stored = self._shared.decisions.get(run, {})
            if (found := stored.get(generation)) is not None:
                if isinstance(found, Abort) or found.token != token:
                    raise conflicting_mark(run, generation)
                stored[generation] = found.as_persisted()

    def relocate(self, record: CommitRecord, moved: CommitRecord, *, fencing_token: int) -> CommitRecord:
        """Say that other nodes hold the newest generation of a run; see `Coordinator`."""
        with self._shared.lock:
            found, epoch = self.latest(record.run), self.entries.get(EPOCH)
            stored = judge_relocation(
                record,
                moved,
                stored=found,
                masters_token=None if epoch is None else epoch.version,
                fencing_token=fencing_token,
            )
            if stored is not None:
                return stored
            assert found is not None
            changed = found.held_by(moved.nodes, moved.addresses)
            self._shared.decisions[record.run][record.generation] = changed
            return changed

    def latest(self, run: str) -> CommitRecord | None:
        """Return the newest committed generation of a run."""
        return (self.commits(run) or (None,))[-1]

    def commits(self, run: str) -> tuple[CommitRecord, ...]:
        """Return all committed generations of a run, oldest first."""
        self._check()
        with self._shared.lock:
            decisions = [one for _, one in sorted(self._shared.decisions.get(run, {}).items())]
        return tuple(one for one in decisions if isinstance(one, CommitRecord))

    @property
    def layout_version(self) -> int:
        """Version of the layout; see `Coordinator`."""
        return 1

    def health(self) -> Health:
        """Say how the connection is; see `Coordinator`."""
        state: HealthState = "closed" if self._closed else "suspended" if self.unreachable else "connected"
        why = "it is unreachable" if state == "suspended" else ""
        return Health(state, 0.0, "memory", f"{id(self):#x}", why)

    def close(self) -> None:
        """End the session. Idempotent."""
        self._closed = True
        self._entries.close()
        with self._shared.lock:
            for table in (self._shared.nodes, self._shared.claims):
                for key in [key for key, entry in table.items() if entry[1] is self]:
                    del table[key]
            self._shared.lock.notify_all()

    def _check(self) -> None:
        if self._closed:
            raise ClosedError("the session with the coordinator is closed")
        if self.unreachable:
            raise CoordinationError("the coordinator does not answer")


class FakeRegistration:
    """A node's place in the registry of a `FakeCoordinator`."""

    def __init__(self, session: FakeCoordinator, name: str) -> None:
        self._session, self._name, self._closed = session, name, False

    def restore(self) -> None:
        """Do nothing: these sessions do not end by themselves."""

    def update(self, info: NodeInfo) -> None:
        """Replace what the registry says of the node."""
        self._session._check()
        if self._closed:
            raise ClosedError(f"the registration of {self._name!r} is closed")
        if info.name != self._name:
            raise ConfigError(f"the registration is of {self._name!r}, not of {info.name!r}")
        with self._session._shared.lock:
            self._session._shared.nodes[self._name] = info, self._session

    def close(self) -> None:
        """Leave the registry. Idempotent."""
        if not self._closed:
            self._closed = True
            with self._session._shared.lock:
                self._session._shared.nodes.pop(self._name, None)


class FakeClaim:
    """Ownership of a run with a `FakeCoordinator`."""

    def __init__(self, session: FakeCoordinator, run: str, fencing_token: int) -> None:
        self._session = session
        self.run, self.fencing_token = run, fencing_token
        self.order = fencing_token

    def check(self) -> None:
        """Raise `FencedError` unless the run is still owned."""
        self._session._check()
        with self._session._shared.lock:
            owner, *binding = self._session._shared.claims.get(self.run, ("", None, 0))
        if binding != [self._session, self.fencing_token]:
            raise fenced(self.run, owner)

    def close(self) -> None:
        """Give the run back. Idempotent."""
        shared = self._session._shared
        with shared.lock:
            if shared.claims.get(self.run, ("", None, 0))[1:] == (self._session, self.fencing_token):
                del shared.claims[self.run]
                shared.lock.notify_all()
