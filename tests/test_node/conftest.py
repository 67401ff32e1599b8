"""Encoded chunks, and an author who saves them generation after generation and remembers what was saved."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import xxhash
from fastcheck_codecs import PrefixIndex, XorDelta, checksum, encode_raw_into, max_encoded_nbytes

from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.tiers.descriptors import Descriptor

Bits = npt.NDArray[np.uint8]
Chunk = tuple[Descriptor, Bits]


def bits(seed: int, nbytes: int = 4096) -> Bits:
    values = np.random.default_rng(seed).normal(size=-(-nbytes // 4)).astype(np.float32)
    return values.view(np.uint8)[:nbytes].copy()


def described(key: str, raw: Bits, payload: Bits, dtype: str = "float32") -> Chunk:
    return (
        Descriptor(
            key, dtype, raw.size, xxhash.xxh3_128_hexdigest(raw.data), checksum(payload), payload.size
        ),
        payload,
    )


def whole(key: str, raw: Bits) -> Chunk:
    return described(key, raw, PrefixIndex(dtype="float32").encode(raw))


def uncompressed(key: str, raw: Bits) -> Chunk:
    out = np.empty(max_encoded_nbytes(raw.size), np.uint8)
    length = encode_raw_into(raw, out, dtype="float32")
    return described(key, raw, out[:length].copy())


def delta(key: str, raw: Bits, base: Bits, residual: str = "xor") -> Chunk:
    fitted = np.zeros(raw.size, np.uint8)
    n = min(raw.size, base.size)
    fitted[:n] = base[:n]
    return described(key, raw, XorDelta(base=fitted, dtype="float32", residual=residual).encode(raw))


def nudged(raw: Bits, seed: int) -> Bits:
    """Return the bits with a few values changed, as one training step does."""
    changed = raw.copy()
    where = np.random.default_rng(seed).integers(0, raw.size, max(1, raw.size // 64))
    changed[where] ^= 1
    return changed


@dataclass
class Author:
    """Saves into a `ShardStore` as the engine does into a node; `state` is what was committed last."""

    store: Any
    run: str = "run"
    generation: int = 0
    token: str = ""
    state: dict[str, Bits] = field(default_factory=dict)
    #: Whether chunks go as they are.
    raw: bool = False
    residual: str = "xor"
    #: Of its claim of the run.
    order: int = 0
    attempt: int = 0

    @property
    def name(self) -> tuple[str, int, str]:
        return self.run, self.generation, self.token

    def chunks(self, state: dict[str, Bits], whole_keys: set[str]) -> list[Chunk]:
        if self.raw:
            return [uncompressed(key, raw) for key, raw in state.items()]
        return [
            whole(key, raw)
            if key in whole_keys or key not in self.state
            else delta(key, raw, self.state[key], self.residual)
            for key, raw in state.items()
        ]

    def stage(self, state: dict[str, Bits], *, rebase: bool = False, token: str = "") -> tuple[int, str]:
        generation = self.generation + 1
        token = token or f"token-{generation}"
        base = None if rebase or not self.generation else (self.generation, self.token)
        absent = self.store.begin(
            self.run,
            generation,
            token,
            shard=0,
            base=base,
            keys=list(state),
            reserve_bytes=0,
            order=self.order,
            attempt=self.attempt,
        )
        self.store.put(self.run, token, self.chunks(state, set(absent)))
        return generation, token

    def prepare(self, token: str, manifest: bytes = b"{}") -> None:
        self.store.prepare(
            self.run,
            token,
            digest=hashlib.sha256(manifest).hexdigest(),
            manifest=np.frombuffer(manifest, np.uint8).copy(),
            attempt=self.attempt,
        )

    def save(self, state: dict[str, Bits], *, rebase: bool = False) -> None:
        generation, token = self.stage(state, rebase=rebase)
        self.prepare(token)
        self.store.commit(self.run, generation, token)
        self.generation, self.token, self.state = generation, token, dict(state)

    def loaded(self) -> dict[str, bytes]:
        """Return the bits that the store gives for everything in `state`."""
        found = self.store.read(*self.name, keys=list(self.state))
        assert found.missing == []
        return self.decoded(found.entries)

    @staticmethod
    def decoded(entries: Any) -> dict[str, bytes]:
        return decoded(entries)

    def saved(self) -> dict[str, bytes]:
        return {key: raw.tobytes() for key, raw in self.state.items()}


def decoded(entries: Any) -> dict[str, bytes]:
    return {
        e.descriptor.key: PrefixIndex(dtype=e.descriptor.dtype).decode(e.payload).tobytes() for e in entries
    }


def recounted(arrays: Any) -> int:
    """Return how many bytes distinct arrays take."""
    return sum({id(array): array.nbytes for array in arrays}.values())


class Chunks:
    """The functions above, for tests: they cannot import a conftest."""

    bits = staticmethod(bits)
    whole = staticmethod(whole)
    delta = staticmethod(delta)
    nudged = staticmethod(nudged)
    described = staticmethod(described)
    decoded = staticmethod(decoded)
    recounted = staticmethod(recounted)


@pytest.fixture
def chunks() -> type[Chunks]:
    return Chunks


@pytest.fixture
def store() -> ShardStore:
    return ShardStore("node-1", 10 * 2**20)


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def keeper(clock: FakeClock) -> ShardStore:
    """Return a store with a ring of two generations and room for it."""
    return ShardStore("node-1", 2**20, ring=2, clock=clock)


@pytest.fixture
def author(store: ShardStore) -> Author:
    return Author(store)


@pytest.fixture(scope="session")
def make_author() -> type[Author]:
    return Author


@pytest.fixture
def serve() -> Iterator[Callable[..., DataServer]]:
    """Return a function that starts a data server, which is closed after the test."""
    servers = []

    def start(store: ShardStore, open_store: Any = None, **options: Any) -> DataServer:
        server = DataServer(store, open_store, **options)
        servers.append(server)
        server.start()
        return server

    yield start
    for server in servers:
        server.close()
