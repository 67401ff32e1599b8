"""How soon does a storage node answer a ping while it is at work, against one that has nothing to do?

Two nodes, each in a process of its own; another process gives one of them work, and this one asks both in
turn. What the machine does besides shows at the idle one. The aim is 100 ms at the 99th percentile.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from pathlib import Path

import numpy as np
import xxhash
from fastcheck_codecs import PrefixIndex, XorDelta, checksum, encode_raw_into, max_encoded_nbytes

from benchmarks.machine import console, describe, table
from fastcheck_dask.layout.manifest import digest_of_manifest
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire import Bits

SECONDS = 6.0
PAUSE_SECONDS = 0.005
CHUNKS = 32
CHUNK_BYTES = 8 * 2**20
#: Chunks of one message; a node may get eight of them at a time.
BATCH = 4
SMALL_CHUNKS = 30_000
AIM_SECONDS = 0.1

Chunk = tuple[Descriptor, Bits]
Work = Callable[[Sequence[PeerClient]], AsyncIterator[None]]


def _described(key: str, raw: Bits, payload: Bits) -> Chunk:
    digest = xxhash.xxh3_128_hexdigest(raw.data)
    return Descriptor(key, "float32", raw.size, digest, checksum(payload), payload.size), payload


def _bits(seed: int, nbytes: int) -> Bits:
    return np.random.default_rng(seed).standard_normal(nbytes // 4, np.float32).view(np.uint8)


def _raw(key: str, bits: Bits) -> Chunk:
    out = np.empty(max_encoded_nbytes(bits.size), np.uint8)
    return _described(key, bits, out[: encode_raw_into(bits, out, dtype="float32")])


async def _save(
    clients: Sequence[PeerClient],
    generation: int,
    chunks: Sequence[Chunk],
    *,
    base: tuple[int, str] | None = None,
    run: str = "run",
) -> tuple[int, str]:
    """Save chunks as a generation, over all connections; return its name."""
    token = f"token{generation}"
    keys = [descriptor.key for descriptor, _ in chunks]
    nbytes = sum(payload.nbytes for _, payload in chunks)
    await clients[0].begin(
        run, generation, token, shard=0, base=base, keys=keys, reserve_bytes=nbytes, attempt=generation
    )
    batch = BATCH if nbytes > BATCH * CHUNK_BYTES else 2000
    batches = [chunks[start : start + batch] for start in range(0, len(chunks), batch)]
    await asyncio.gather(
        *(
            clients[number % len(clients)].put(
                run, token, chunks=[d for d, _ in part], frames=[p for _, p in part]
            )
            for number, part in enumerate(batches)
        )
    )
    manifest = np.full(1000, generation % 256, np.uint8)
    digest = digest_of_manifest(manifest.tobytes())
    await clients[0].prepare(run, token, digest=digest, manifest=manifest, attempt=generation)
    await clients[0].commit(run, generation, token)
    return generation, token


async def saves(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Save whole chunks again and again."""
    chunks = [_raw(f"k{number}", _bits(number, CHUNK_BYTES)) for number in range(CHUNKS)]
    generation = 0
    while True:
        generation += 1
        await _save(clients, generation, chunks)
        yield


async def loads(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Read all chunks again and again, over all connections at once."""
    chunks = [_raw(f"k{number}", _bits(number, CHUNK_BYTES)) for number in range(CHUNKS)]
    name = await _save(clients, 1, chunks)
    keys = [descriptor.key for descriptor, _ in chunks]
    batches = [keys[start : start + BATCH] for start in range(0, CHUNKS, BATCH)]
    while True:
        reads = (clients[i % len(clients)].read("run", *name, keys=part) for i, part in enumerate(batches))
        await asyncio.gather(*reads)
        yield


async def merges(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Save deltas as fast as they are merged."""
    before = [_bits(number, CHUNK_BYTES) for number in range(CHUNKS)]
    name = await _save(
        clients,
        1,
        [_described(f"k{n}", b, PrefixIndex(dtype="float32").encode(b)) for n, b in enumerate(before)],
    )
    # There and back: two sets of deltas are enough, and nothing is encoded meanwhile.
    after = [b.copy() for b in before]
    for bits in after:
        bits[::40] ^= 1
    ways = [
        [
            _described(f"k{n}", new, XorDelta(base=old, dtype="float32").encode(new))
            for n, (old, new) in enumerate(zip(*pair, strict=True))
        ]
        for pair in ((before, after), (after, before))
    ]
    generation = 1
    while True:
        name = await _save(clients, generation + 1, ways[(generation + 1) % 2], base=name)
        generation += 1
        yield


async def scrubs(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Have something to be scrubbed, which the node does by itself all the time."""
    async for _ in loads(clients):
        while True:
            yield
            await asyncio.sleep(1.0)


async def repairs(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Bring whole chunks back, which the node decodes to verify them."""
    chunks = [
        _described(f"k{n}", b, PrefixIndex(dtype="float32").encode(b))
        for n, b in ((n, _bits(n, CHUNK_BYTES)) for n in range(CHUNKS))
    ]
    name = await _save(clients, 1, chunks)
    keys = [descriptor.key for descriptor, _ in chunks]
    while True:
        await clients[0].quarantine("run", *name, keys=keys)
        await asyncio.gather(
            *(
                clients[i % len(clients)].repair("run", *name, chunks=[d], frames=[p])
                for i, (d, p) in enumerate(chunks)
            )
        )
        yield


async def small_chunks(clients: Sequence[PeerClient]) -> AsyncIterator[None]:
    """Save very many chunks of 64 bytes, and ask for the status all the time."""
    chunks = [_raw(f"layer.{number}.weight/c/0", _bits(number, 64)) for number in range(SMALL_CHUNKS)]
    generation = 0
    while True:
        generation += 1
        await asyncio.gather(_save(clients, generation, chunks), *(client.status() for client in clients))
        yield


KINDS: dict[str, Work] = {
    "saves": saves,
    "loads": loads,
    "merges": merges,
    "scrubbing": scrubs,
    "repairs": repairs,
    f"{SMALL_CHUNKS:,} chunks, and status": small_chunks,
}


def work(kind: str, address: str, ready: object, rounds: object) -> None:
    """Give a node work until killed; counts its rounds. Runs in a process of its own."""

    async def go() -> None:
        clients = [PeerClient("busy", address, grace_seconds=60.0, connect_seconds=60.0) for _ in range(4)]
        async for _ in KINDS[kind](clients):
            rounds.value += 1  # type: ignore[attr-defined]
            ready.set()  # type: ignore[attr-defined]

    asyncio.run(go())


async def _ask(addresses: Sequence[str], seconds: float) -> list[list[float]]:
    """Ping all nodes in turn for a while; return how long each answer took, by node."""
    clients = [PeerClient("node", address, grace_seconds=60.0) for address in addresses]
    took: list[list[float]] = [[] for _ in clients]
    until = time.monotonic() + seconds
    async with contextlib.AsyncExitStack() as stack:
        for client in clients:
            stack.push_async_callback(client.close)
            await client.ping()
        while time.monotonic() < until:
            for client, times in zip(clients, took, strict=True):
                began = time.perf_counter()
                await client.ping()
                times.append(time.perf_counter() - began)
                await asyncio.sleep(PAUSE_SECONDS)
    return took


def measure(kind: str, folder: Path) -> list[str]:
    """Return one row of the table."""
    options = {"scrub_seconds": 0.01} if kind == "scrubbing" else {}
    with (
        StorageCluster(folder / "busy", 1, memory_bytes=2**31, **options) as busy,
        StorageCluster(folder / "idle", 1) as idle,
    ):
        context = multiprocessing.get_context("spawn")
        ready, rounds = context.Event(), context.Value("L", 0)
        worker = context.Process(target=work, args=(kind, busy.address("n0"), ready, rounds), daemon=True)
        worker.start()
        try:
            while not ready.wait(1.0):
                if not worker.is_alive():
                    raise RuntimeError(f"the process that does {kind} ended: see above")
            before = rounds.value
            taken = asyncio.run(_ask([busy.address("n0"), idle.address("n0")], SECONDS))
            done = rounds.value - before
        finally:
            worker.kill()
            worker.join()
    at_work, calm = (np.percentile(times, (50, 99, 100)) for times in taken)
    row = [f"{value * 1e3:.1f}" for value in (*calm, *at_work)]
    return [
        kind,
        str(done),
        *row,
        f"{at_work[1] / calm[1]:.1f}",
        "yes" if at_work[1] <= AIM_SECONDS else "no",
    ]


def main(kinds: Sequence[str] = ()) -> None:
    """Print the table."""
    rows = []
    with tempfile.TemporaryDirectory() as name:
        for number, kind in enumerate(kinds or KINDS):
            rows.append(measure(kind, Path(name) / str(number)))
    table(
        f"Pings for {SECONDS:g} s each: milliseconds (aim: p99 at most {AIM_SECONDS * 1e3:g})",
        ["busy with", "rounds", "idle: p50", "p99", "max", "busy: p50", "p99", "max", "ratio of p99", "aim"],
        rows,
    )


if __name__ == "__main__":
    console.print(describe())
    main(sys.argv[1:])
