"""One client of a data server in this process, and a save through it."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from fastcheck_dask.node.data_server import DataServer
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire import Buffer

Use = Callable[[PeerClient], Coroutine[Any, Any, Any]]


def client_of(server: DataServer, **options: Any) -> PeerClient:
    """Return a patient client of a server."""
    return PeerClient("node-1", server.address, tls=server._tls, **{"grace_seconds": 20.0, **options})


def with_client(server: DataServer, use: Use, **options: Any) -> Any:
    """Run what uses a client, and close that."""

    async def main() -> Any:
        client = client_of(server, **options)
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


async def save_over(
    client: PeerClient,
    generation: int,
    chunks: Sequence[tuple[Descriptor, Buffer]],
    *,
    base: tuple[int, str] | None = None,
) -> str:
    """Save chunks as the generation of a run named ``run``; return the token."""
    token = f"token-{generation}"
    await client.begin(
        "run", generation, token, shard=0, base=base, keys=[d.key for d, _ in chunks], reserve_bytes=0
    )
    await client.put("run", token, chunks=[d for d, _ in chunks], frames=[p for _, p in chunks])
    manifest = b'{"a": "manifest"}'
    await client.prepare("run", token, digest=hashlib.sha256(manifest).hexdigest(), manifest=manifest)
    await client.commit("run", generation, token)
    return token
