"""To which stored checkpoints a new one refers for the chunks that did not change, and writes nothing."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from fastcheck_dask.engine.encode import Bits, digest
from fastcheck_dask.engine.plan import Content
from fastcheck_dask.engine.save import Snapshot
from fastcheck_dask.tiers.commit_marker import BaseLink
from fastcheck_dask.tiers.slot import Slot
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

#: Gives the digests of the chunks with these keys, as far as there are such.
Digests = Callable[[Collection[str]], Mapping[str, str]]
#: The share of a checkpoint's bytes that another one must have to be referred to: it is kept for that, whole.
LEAST_SHARE = 0.1


def worth(bytes_by_holder: Mapping[BaseLink, int], total_bytes: int, *, limit: int) -> tuple[BaseLink, ...]:
    """Choose the checkpoints to refer to; pure.

    Parameters
    ----------
    bytes_by_holder : mapping of BaseLink to int
        Raw bytes of the chunks that need not be written if it is referred to.
    total_bytes : int
        Raw bytes of the new checkpoint.
    limit : int
        Most that are chosen: those that spare most.

    Returns
    -------
    tuple of BaseLink
        Oldest first.
    """
    enough = {link: nbytes for link, nbytes in bytes_by_holder.items() if nbytes >= LEAST_SHARE * total_bytes}
    chosen = sorted(enough, key=lambda link: (-enough[link], link.generation))[:limit]
    return tuple(sorted(chosen, key=lambda link: link.generation))


def references(
    newest: StoredCheckpoint,
    digests: Digests,
    sizes: Mapping[str, int],
    *,
    limit: int,
    older: Collection[str] = (),
) -> tuple[BaseLink, ...]:
    """Say to which checkpoints one refers that follows `newest` and is stored without deltas.

    Only checkpoints without a base are referred to, and directly: what they hold is whole, and nothing else
    is needed to read it. For what is not going to be written in any case, any is.

    Parameters
    ----------
    newest : StoredCheckpoint
        The newest in the object tier.
    digests : callable
        Of the new checkpoint.
    sizes : mapping of str to int
        Raw bytes of its chunks.
    limit : int
        Most checkpoints, but for those that have what is older.
    older : collection of str
        Keys of the chunks that are left as they are in `newest`.

    Raises
    ------
    ShardUnavailableError, CorruptDataError
        If a checkpoint that `newest` needs is gone or damaged.
    """
    wanted = {newest.holder_of(key).link for key in older}
    holders = {}
    for key in (sizes.keys() & newest.manifest.chunks.keys()) - set(older):
        holder = newest.holder_of(key)
        if holder.marker.base is None:
            holders[key] = holder.link
    found = digests(holders.keys())
    spared: dict[BaseLink, int] = {}
    for key, link in holders.items():
        if found.get(key) == newest.manifest.digests[key]:
            spared[link] = spared.get(link, 0) + sizes[key]
    wanted.update(worth(spared, sum(sizes.values()), limit=limit))
    return tuple(sorted(wanted, key=lambda link: link.generation))


def digests_in(snapshot: Snapshot, keys: Collection[str]) -> dict[str, str]:
    """Return digests of chunks of a snapshot that lies in its slot."""
    return digests_of(snapshot.content, Slot(snapshot.slot, readonly=True).data, keys)


def digests_of(content: Content, bits: Bits, keys: Collection[str]) -> dict[str, str]:
    """Return digests of chunks in memory that is laid out as a slot is."""
    pieces = {key: content.piece(key) for key in keys}
    return {key: digest(bits[start : start + nbytes]) for key, (start, nbytes) in pieces.items()}
