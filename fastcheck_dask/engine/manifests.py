"""Get a manifest from the storage nodes, each of which keeps a copy."""

from __future__ import annotations

from collections.abc import Callable

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import CorruptDataError, FastCheckError
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.tiers.peer import PeerClient


async def manifest_from_nodes(
    record: CommitRecord, client: Callable[[str, str], PeerClient], *, causes: list[str]
) -> tuple[Manifest, bytes] | None:
    """Return the manifest of a committed generation and its bytes, from the first node that has it intact.

    Parameters
    ----------
    record : CommitRecord
        Names the nodes and the digest.
    client : callable
        Opens a node by name and address.
    causes : list of str
        Receives what the nodes said that did not give it.
    """
    for name, address in zip(record.nodes, record.addresses, strict=True):
        node = client(name, address)
        try:
            data = bytes(await node.manifest(record.run, record.generation, record.token))
            if digest_of_manifest(data) != record.manifest_digest:
                raise CorruptDataError(f"the manifest of node {name} is damaged")
            return Manifest.from_bytes(data, where=f"manifest of node {name}"), data
        except FastCheckError as error:
            causes.append(str(error))
        finally:
            await node.close()
    return None
