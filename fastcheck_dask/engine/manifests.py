"""Get a manifest from the storage nodes, each of which keeps a copy."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.pace import first_answer
from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.tiers.peer import PeerClient

#: How long a node is waited for before the next one is asked, too.
PATIENCE_SECONDS = 0.25


async def manifest_from_nodes(
    record: CommitRecord, client: Callable[[str, str], PeerClient], *, causes: list[str]
) -> tuple[Manifest, bytes] | None:
    """Return the manifest of a committed generation and its bytes, from the first node that has it intact.

    A node that is slow is not waited for: the next one is asked, too.

    Parameters
    ----------
    record : CommitRecord
        Names the nodes and the digest.
    client : callable
        Opens a node by name and address.
    causes : list of str
        Receives what the nodes said that did not give it.
    """

    async def ask(name: str, address: str) -> tuple[Manifest, bytes]:
        node = client(name, address)
        try:
            data = bytes(await node.manifest(record.run, record.generation, record.token))
        finally:
            await node.close()
        if digest_of_manifest(data) != record.manifest_digest:
            raise CorruptDataError(f"the manifest of node {name} is damaged")
        return Manifest.from_bytes(data, where=f"manifest of node {name}"), data

    nodes = zip(record.nodes, record.addresses, strict=True)
    found, errors = await first_answer(
        [partial(ask, *node) for node in nodes], patience_seconds=PATIENCE_SECONDS
    )
    causes += map(str, errors)
    return found
