"""Give storage nodes that live, and lost single chunks, a good copy again."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Set

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.encode import Region, encoded_whole
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.peer import PeerClient

log = logging.getLogger(__name__)


async def give_copies(
    damaged_at: Mapping[int, Iterable[str]],
    good: Set[str],
    manifest: Manifest,
    *,
    record: CommitRecord,
    client: Callable[[str, str], PeerClient],
    bits: Region,
) -> None:
    """Send nodes what they lack, as far as it is here; what cannot be given is logged.

    Parameters
    ----------
    damaged_at : mapping of int to iterable of str
        By shard, the chunks that its node has lost.
    good : set of str
        Data chunks whose bits are here.
    manifest, record : Manifest, CommitRecord
        The checkpoint, and its nodes.
    client : callable
        Makes a client of a node's name and address.
    bits : callable
        Gives the bits of a good chunk.
    """
    for shard, keys in damaged_at.items():
        made = [key for key in sorted(keys) if _can_make(key, manifest, good)]
        if not made:
            continue
        node = client(record.nodes[shard], record.addresses[shard])
        try:
            for key in made:
                descriptor, payload = await asyncio.to_thread(encoded_whole, manifest, key, bits)
                await node.repair(
                    manifest.run, manifest.generation, manifest.token, chunks=[descriptor], frames=[payload]
                )
                log.warning("chunk %s on %s was repaired", key, record.nodes[shard])
        except FastCheckError as error:
            log.warning("chunk %s on %s was not repaired: %s", key, record.nodes[shard], error)
        finally:
            await node.close()


def _can_make(key: str, manifest: Manifest, good: Set[str]) -> bool:
    """Say whether the bits of a data or parity chunk are here, or can be made of what is."""
    if key in manifest.chunks:
        return key in good
    assert manifest.layout is not None
    stripe, _ = manifest.layout.position[key]
    return all(member in good for member in stripe.members if member is not None)
