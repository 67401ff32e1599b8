"""Which lost chunks can be computed from parity, and what has to be read for it. Pure."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass

from fastcheck_dask.layout.parity import Bits, rebuild
from fastcheck_dask.layout.stripes import Layout, Stripe, parity_nbytes


@dataclass(frozen=True)
class Erasure:
    """A stripe, and the data chunks of it that are missed."""

    stripe: Stripe
    lost: tuple[str, ...]


def erasures_of(layout: Layout, keys: Iterable[str]) -> list[Erasure]:
    """Return the stripes of data chunks that are missed."""
    lost: dict[int, tuple[Stripe, list[str]]] = {}
    for key in keys:
        stripe = layout.position[key][0]
        lost.setdefault(stripe.id, (stripe, []))[1].append(key)
    return [Erasure(stripe, tuple(of_stripe)) for stripe, of_stripe in lost.values()]


def rebuildable_now(
    layout: Layout,
    keys: Iterable[str],
    sizes: Mapping[str, int],
    *,
    awaited: Collection[str],
    given_up: Collection[str] = (),
    budget_bytes: int,
) -> list[Erasure]:
    """Choose data chunks that can be rebuilt from parity while others are still on their way.

    Parameters
    ----------
    layout : Layout
        Of the checkpoint.
    keys : iterable of str
        The chunks that are missed.
    sizes : mapping of str to int
        Raw bytes of the data chunks.
    awaited : collection of str
        Chunks that are not there: a stripe that needs another one of them has to wait.
    given_up : collection of str
        Of these, those that do not come any more.
    budget_bytes : int
        Most raw bytes of the chunks that are rebuilt, each as long as its parity, unless one stripe has more.

    Returns
    -------
    list of Erasure
        The chunks by their stripes; empty without parity.
    """
    group: list[Erasure] = []
    size = 0
    missed = dict.fromkeys(keys if layout.parity else ())
    for erasure in erasures_of(layout, missed):
        stripe = erasure.stripe
        absent = [m for m in stripe.members if m is not None and (m in awaited or m in missed)]
        lost = tuple(member for member in absent if member in missed or member in given_up)
        if len(lost) < len(absent) or len(lost) > layout.parity:
            continue
        size += len(lost) * parity_nbytes(stripe, sizes)
        if group and size > budget_bytes:
            break
        group.append(Erasure(stripe, lost))
    return group


def keys_to_read(
    layout: Layout, erasure: Erasure, *, there: Collection[str], failed: Collection[str]
) -> list[str] | None:
    """Say which chunks of a stripe to read so that the lost ones can be computed.

    Parameters
    ----------
    layout : Layout
        Of the checkpoint.
    erasure : Erasure
        What is missed.
    there : collection of str
        Chunks that need not be read.
    failed : collection of str
        Chunks that cannot be read.

    Returns
    -------
    list of str or None
        Empty if enough is there; None if there never will be.
    """
    parity = erasure.stripe.parity_keys(layout.parity)
    absent = [key for key in erasure.stripe.members if key is not None and key not in there]
    readable = [key for key in absent if key not in erasure.lost and key not in failed]
    # What cannot be read is one more unknown, whether anybody wants it or not.
    needed = len(absent) - len(readable) - sum(key in there for key in parity)
    spare = [key for key in parity if key not in there and key not in failed]
    if needed > len(spare):
        return None
    return readable + spare[: max(needed, 0)]


def computed(
    layout: Layout, erasure: Erasure, *, there: Mapping[str, Bits]
) -> tuple[dict[str, Bits], tuple[str, ...]]:
    """Compute the lost chunks of a stripe; all that :func:`keys_to_read` wanted is there.

    Parameters
    ----------
    layout : Layout
        Of the checkpoint.
    erasure : Erasure
        What is missed.
    there : mapping of str to ndarray of uint8
        The other members, and parity chunks.

    Returns
    -------
    (dict of str to ndarray of uint8, tuple of str)
        The lost chunks, each as long as the parity, and the parity chunks that were used.
    """
    stripe = erasure.stripe
    members = {shard: key for shard, key in enumerate(stripe.members) if key is not None}
    known = {shard: there[key] for shard, key in members.items() if key in there}
    unknown = members.keys() - known.keys()
    given = [(n, key) for n, key in enumerate(stripe.parity_keys(layout.parity)) if key in there]
    used = dict(given[: len(unknown)])
    if not unknown:
        return {}, ()
    found = rebuild(unknown, known, {number: there[key] for number, key in used.items()})
    return {members[shard]: bits for shard, bits in found.items()}, tuple(used.values())
