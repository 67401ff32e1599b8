"""The data port: what its operations do, and what it survives."""

from __future__ import annotations

import asyncio
import hashlib
import threading
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
    ShardUnavailableError,
    StaleBaseError,
    TierError,
    TierFullError,
)
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.stripes import Layout, Stripe
from fastcheck_dask.node import merger
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.node_client import client_of, save_over, with_client
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls


@pytest.fixture
def serve(serve: Any, tls: DataTls | None) -> Any:
    """Have every test run on a plain port, and on one with TLS."""
    return partial(serve, tls=tls)


def test_save_and_read_over_the_wire(store: ShardStore, serve: Any, chunks: Any) -> None:
    server = serve(store)
    first, second = chunks.bits(1), chunks.nudged(chunks.bits(1), 1)

    async def use(client: PeerClient) -> None:
        token = await save_over(client, 1, [chunks.whole("a", first)])
        await save_over(client, 2, [chunks.delta("a", second, first)], base=(1, token))
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
