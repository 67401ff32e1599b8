"""The data port: what its operations do, and what it survives."""

from __future__ import annotations

import asyncio
import hashlib
import socket
import threading
from collections.abc import Callable, Coroutine
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xxhash
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.errors import (
    ConfigError,
    CorruptDataError,
    FencedError,
    NodeFullError,
    NodeUnavailableError,
    ShardUnavailableError,
    StaleBaseError,
    TierError,
    TierFullError,
)
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.stripes import Layout, Stripe
from fastcheck_dask.node import data_server, merger
from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls, open_comm

Use = Callable[[PeerClient], Coroutine[Any, Any, Any]]


@pytest.fixture
def serve(serve: Any, tls: DataTls | None) -> Any:
    """Have every test run on a plain port, and on one with TLS."""
    return partial(serve, tls=tls)


def client_of(server: DataServer, **options: Any) -> PeerClient:
    return PeerClient("node-1", server.address, tls=server._tls, **{"grace_seconds": 20.0, **options})


def with_client(server: DataServer, use: Use, **options: Any) -> Any:
    async def main() -> Any:
        client = client_of(server, **options)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def save(client: PeerClient, generation: int, chunks: Any, *, base: Any = None) -> str:
    token = f"token-{generation}"
    await client.begin(
        "run", generation, token, shard=0, base=base, keys=[d.key for d, _ in chunks], reserve_bytes=0
    )
    await client.put("run", token, chunks=[d for d, _ in chunks], frames=[p for _, p in chunks])
    manifest = b'{"a": "manifest"}'
    await client.prepare("run", token, digest=hashlib.sha256(manifest).hexdigest(), manifest=manifest)
    await client.commit("run", generation, token)
    return token


def test_save_and_read_over_the_wire(store: ShardStore, serve: Any, chunks: Any) -> None:
    server = serve(store)
    first, second = chunks.bits(1), chunks.nudged(chunks.bits(1), 1)

    async def use(client: PeerClient) -> None:
        token = await save(client, 1, [chunks.whole("a", first)])
        await save(client, 2, [chunks.delta("a", second, first)], base=(1, token))
        assert bytes(await client.manifest("run", 2, "token-2")) == b'{"a": "manifest"}'
        got = await client.read("run", 2, "token-2", keys=["a", "absent"])
        assert (got.missing, got.corrupt) == (["absent"], [])
        (descriptor, payload), *rest = got.chunks
        assert rest == []
        assert wire.checksum(payload) == descriptor.crc32c
        assert chunks.decoded([store.read("run", 2, "token-2", keys=["a"]).entries[0]]) == {
            "a": second.tobytes()
        }
        assert (await client.ping())["runs"] == {"run": [2, "token-2"]}
        assert (await client.holds("run"))["committed"] == [2, "token-2"]

    with_client(server, use)


def test_hundred_deltas_then_read_sends_one_checkpoint(
    store: ShardStore, serve: Any, author: Any, chunks: Any
) -> None:
    state = {"a": chunks.bits(1, 100_000), "b": chunks.bits(2, 50_000)}
    author.save(state)
    for number in range(100):
        state = {key: chunks.nudged(raw, number) for key, raw in state.items()}
        author.save(state)

    async def use(client: PeerClient) -> tuple[int, int]:
        await client.ping()
        before = client.received_bytes
        got = await client.read(*author.name, keys=["a", "b"])
        return client.received_bytes - before, sum(p.nbytes for _, p in got.chunks)

    received, payload = with_client(serve(store), use)
    assert payload <= 150_000 * 1.01
    assert payload < received < payload + 1000


def test_errors_come_back_typed(store: ShardStore, serve: Any, chunks: Any) -> None:
    async def use(client: PeerClient) -> None:
        with pytest.raises(ShardUnavailableError, match="node-1 does not hold generation 1"):
            await client.read("run", 1, "t", keys=[])
        with pytest.raises(StaleBaseError):
            await client.commit("run", 1, "t")
        with pytest.raises(TierFullError) as full:
            await client.begin("run", 1, "t", shard=0, base=None, keys=[], reserve_bytes=2**40)
        assert full.value.wanted_bytes == 2**40
        with pytest.raises(ConfigError):
            await client.drop("../run")
        with pytest.raises(CorruptDataError, match="generation"):
            await client.commit("run", -1, "t")
        with pytest.raises(TierError, match="operation 'explode'"):
            await client._request({"op": "explode"})
        with pytest.raises(CorruptDataError, match="keys must be"):
            await client._request({"op": "read", "run": "r", "generation": 1, "token": "t", "keys": [1]})
        assert (await client.ping())["name"] == "node-1"

    with_client(serve(store), use)


def test_begin_without_room_merges_waiting_deltas_first(serve: Any, make_author: Any, chunks: Any) -> None:
    store = ShardStore("node-1", 100_000)
    author = make_author(store)
    state = {"a": np.zeros(30_000, np.uint8)}
    author.save(state)
    author.save({"a": chunks.bits(3, 30_000)})
    author.save({"a": chunks.bits(4, 30_000)})
    waiting = store.used_bytes
    assert store.status()["pending"] == 1

    async def use(client: PeerClient) -> None:
        await client.begin(
            "run", 4, "t", shard=0, base=author.name[1:], keys=["a"], reserve_bytes=100_000 - waiting + 1
        )

    with_client(serve(store), use)
    assert store.status()["pending"] == 0


def test_repair_quarantine_pin_and_drop_over_the_wire(
    store: ShardStore, serve: Any, author: Any, chunks: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    name = author.name

    async def use(client: PeerClient) -> None:
        await client.pin(*name)
        await client.quarantine(*name, keys=["a"])
        assert (await client.read(*name, keys=["a"])).missing == ["a"]
        descriptor, payload = chunks.whole("a", chunks.bits(1))
        await client.repair(*name, chunks=[descriptor], frames=[payload])
        assert (await client.read(*name, keys=["a"])).missing == []
        assert (await client.holds("run"))["pins"] == [[1, "token-1"]]
        await client.unpin(*name)
        await client.abort("run", "nothing")
        await client.drop("run")
        assert await client.holds("run") == {
            "committed": None,
            "staged": [],
            "pins": [],
            "ring": [],
        }

    with_client(serve(store), use)


def test_adopt_over_the_wire_takes_its_keys_from_the_manifest(serve: Any, chunks: Any) -> None:
    state = {f"w{number}": chunks.bits(number) for number in range(3)}
    arrays = tuple(ArraySpec(key, "float32", (1024,), (1024,)) for key in state)
    stripes = (Stripe(0, ("w0/c/0", "w1/c/0")), Stripe(1, (None, "w2/c/0")))
    digests = {f"{key}/c/0": chunks.whole(key, raw)[0].digest for key, raw in state.items()}
    digests |= {"%parity/0": "0" * 32, "%parity/1": "1" * 32}
    layout = Layout(2, True, stripes)
    manifest = Manifest("run", 4, "tag", "t", 0.0, {}, arrays, digests, layout, ("n0", "n1", "n2"))
    store = ShardStore("node-1", 2**20)

    async def use(client: PeerClient) -> None:
        data = manifest.to_bytes()
        for shard, keys in ((1, ["w1/c/0", "w2/c/0"]), (2, ["%parity/0", "%parity/1"])):
            assert await client.adopt("run", 4, "t", shard=shard, manifest=data, reserve_bytes=1) == keys
        assert bytes(await client.manifest("run", 4, "t")) == data
        descriptor, payload = chunks.whole("w1/c/0", state["w1"])
        await client.repair("run", 4, "t", chunks=[descriptor], frames=[payload])
        assert (await client.read("run", 4, "t", keys=["w1/c/0"])).missing == []
        with pytest.raises(CorruptDataError, match="not that of generation 5"):
            await client.adopt("run", 5, "t", shard=1, manifest=data, reserve_bytes=1)

    with_client(serve(store), use)


def test_lease_persisted_and_status_over_the_wire(serve: Any, make_author: Any, chunks: Any) -> None:
    store = ShardStore("node-1", 2**20, ring=1)
    author = make_author(store)
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1), "b": chunks.bits(2)})
    store.quarantine(*author.name, ["b"])

    async def use(client: PeerClient) -> dict[str, Any]:
        assert await client.lease("run", 50)
        assert not await client.lease("other", 50)
        with pytest.raises(CorruptDataError, match="a lease has"):
            await client.lease("run", -1)
        with pytest.raises(CorruptDataError, match="a lease has"):
            await client.lease("run", float("nan"))
        await client.persisted(*author.name)
        with pytest.raises(ShardUnavailableError):
            await client.manifest("run", 7, "t")
        await client.begin("new", 1, "t", shard=0, base=None, keys=["k"], reserve_bytes=1000)
        return await client.status()

    status = with_client(serve(store, report_more=lambda: {"scrub": {"passes": 3}}), use)
    run = status["runs"]["run"]
    assert (status["used_bytes"], status["reserved_bytes"]) == (store.used_bytes, 1000)
    assert (status["limit_bytes"], status["scrub"]) == (2**20, {"passes": 3})
    assert status["ring"]["generations"] == 1
    assert 0 < status["ring"]["used_bytes"] < status["ring"]["limit_bytes"]
    assert (run["committed"], run["ring"], run["persisted"]) == ([2, "token-2"], [[1, "token-1"]], 2)
    assert run["lease"]["asked"]
    assert 0 < run["lease"]["ends_seconds"] <= 50
    assert run["damaged"] == [{"generation": 2, "token": "token-2", "count": 1, "keys": ["b"]}]
    (staged,) = status["runs"]["new"]["staged"]
    assert (staged["reserved_bytes"], staged["prepared"]) == (1000, False)
    assert status["runs"]["new"]["persisted"] is None


def test_author_whose_last_connection_breaks_is_an_orphan(
    store: ShardStore, serve: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    orphans: list[tuple[str, str]] = []
    left = threading.Event()

    def orphan(run: str, token: str) -> None:
        orphans.append((run, token))
        left.set()

    monkeypatch.setattr(store, "orphan", orphan)
    server = serve(store)

    async def begin(client: PeerClient, token: str, run: str = "run") -> None:
        await client.begin(run, 1, token, shard=0, base=None, keys=["a"], reserve_bytes=10)

    async def main() -> None:
        first, second = (client_of(server) for _ in range(2))
        await begin(first, "t1")
        await begin(second, "t1")
        await begin(second, "t2", "other")
        await first.close()
        # The other connection goes on.
        await second.ping()
        await begin(second, "t1")
        assert orphans == []
        await second.close()
        assert await asyncio.to_thread(left.wait, 20)

    asyncio.run(main())
    server.close()
    assert sorted(orphans) == [("other", "t2"), ("run", "t1")]
    assert not server._savers


def test_two_live_jobs_with_one_run_id_are_told_apart(store: ShardStore, serve: Any, chunks: Any) -> None:
    server = serve(store)
    chunk, other = chunks.whole("a", chunks.bits(1)), chunks.whole("a", chunks.bits(2))

    async def use(older: PeerClient) -> None:
        newer = client_of(server)
        arguments: dict[str, Any] = {"shard": 0, "base": None, "keys": ["a"], "reserve_bytes": 0}
        manifest = {"digest": hashlib.sha256(b"{}").hexdigest(), "manifest": b"{}"}
        await older.begin("run", 1, "older", **arguments, order=1)
        await older.put("run", "older", chunks=[chunk[0]], frames=[chunk[1]])
        await newer.begin("run", 1, "newer", **arguments, order=2)
        with pytest.raises(StaleBaseError):
            await older.prepare("run", "older", **manifest)
        with pytest.raises(FencedError):
            await older.begin("run", 1, "older", **arguments, order=1)
        await newer.put("run", "newer", chunks=[other[0]], frames=[other[1]])
        await newer.prepare("run", "newer", **manifest)
        await newer.commit("run", 1, "newer")
        with pytest.raises(StaleBaseError):
            await older.commit("run", 1, "older")
        await newer.close()

    with_client(server, use)
    found = store.read("run", 1, "newer", keys=["a"])
    assert chunks.decoded(found.entries) == {"a": chunks.bits(2).tobytes()}


@pytest.mark.parametrize("busy", ["merge", "scrub"])
def test_node_answers_while_it_merges_or_scrubs(
    store: ShardStore, serve: Any, author: Any, chunks: Any, monkeypatch: pytest.MonkeyPatch, busy: str
) -> None:
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    reached, go_on = threading.Event(), threading.Event()
    name = {"merge": "merge", "scrub": "is_intact"}[busy]
    real = getattr(merger, name)

    def slow(argument: Any) -> Any:
        reached.set()
        assert go_on.wait(30)
        return real(argument)

    monkeypatch.setattr(merger, name, slow)

    def work() -> None:
        if busy == "merge":
            store.drain("run")
        else:
            store.check("run", author.name[1:], "a")

    async def use(client: PeerClient) -> None:
        assert await asyncio.to_thread(reached.wait, 30)
        for _ in range(3):
            assert (await client.ping())["name"] == "node-1"
        assert (await client.status())["used_bytes"] == store.used_bytes

    thread = threading.Thread(target=work)
    thread.start()
    try:
        with_client(serve(store), use)
    finally:
        go_on.set()
        thread.join(30)
    assert author.loaded() == author.saved()


def test_persist_writes_payloads_as_they_are(
    store: ShardStore, serve: Any, author: Any, chunks: Any, tmp_path: Path
) -> None:
    author.save({"w/c/0": chunks.bits(1), "w/c/1": chunks.bits(2)})

    async def use(client: PeerClient) -> tuple[int, list[str]]:
        return await client.persist(
            *author.name, location=str(tmp_path), directory="00000001-t", keys=["w/c/0", "w/c/1", "w/c/2"]
        )

    tmp_path.mkdir(exist_ok=True)
    written, missing = with_client(serve(store, open_store), use)
    entries = store.read(*author.name, keys=["w/c/0", "w/c/1"]).entries
    assert missing == ["w/c/2"]
    assert written == sum(e.payload.nbytes for e in entries)
    for entry in entries:
        assert (tmp_path / "00000001-t" / entry.descriptor.key).read_bytes() == entry.payload.tobytes()


def test_persist_makes_derived_chunks_and_lacks_those_that_it_cannot_make(
    store: ShardStore, serve: Any, author: Any, chunks: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    author.save({"m/c/0": chunks.bits(1), "m/c/1": chunks.bits(2)})
    made = cast(chunks.bits(1), "bfloat16")
    derived = {
        "w/c/0": ("m/c/0", "bfloat16", xxhash.xxh3_128_hexdigest(made)),
        "w/c/1": ("m/c/1", "bfloat16", "0" * 32),
        "w/c/2": ("m/c/2", "bfloat16", "0" * 32),
    }

    async def use(client: PeerClient) -> tuple[int, list[str]]:
        where = {"location": str(tmp_path), "directory": "d"}
        return await client.persist(*author.name, **where, keys=["m/c/0", *derived], derived=derived)

    written, missing = with_client(serve(store, open_store), use)
    assert missing == ["w/c/1", "w/c/2"]
    assert "cannot make chunk w/c/1: the bfloat16 cast of chunk m/c/1 has digest" in caplog.text
    payload = np.frombuffer((tmp_path / "d/w/c/0").read_bytes(), np.uint8)
    assert PrefixIndex(dtype="bfloat16").decode(payload).tobytes() == made.tobytes()
    assert written == payload.size + (tmp_path / "d/m/c/0").stat().st_size
    assert not (tmp_path / "d/w/c/1").exists()


@pytest.mark.parametrize("path", ["../x", "/etc", "a//b", "a/./b", ""])
def test_persist_out_of_its_directory_is_refused(
    store: ShardStore, serve: Any, author: Any, chunks: Any, tmp_path: Path, path: str
) -> None:
    author.save({"a": chunks.bits(1)})

    async def use(client: PeerClient) -> None:
        for directory, key in [(path, "a"), ("d", path)]:
            with pytest.raises(TierError, match="cannot be part of a path"):
                await client.persist(*author.name, location=str(tmp_path), directory=directory, keys=[key])

    with_client(serve(store, open_store), use)


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
        token = await save(client, 1, [chunks.whole("a", first)])
        await client.abort("run", "another")
        await save(client, 2, [chunks.delta("a", second, first)], base=(1, token))
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
            await save(client, 1, [chunks.whole("a", chunks.bits(1))])

    with_client(serve(store), use)
