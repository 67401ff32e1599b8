"""Which chunk lies on which shard: stripes of N chunks, stable from one checkpoint to the next."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.galois import ORDER
from fastcheck_dask.layout.loads import Loads

#: Keys of the first and the second parity chunk of a stripe begin so.
_PARITY_PREFIXES = ("%parity/", "%parity2/")
#: Most parity shards.
MAX_PARITY = len(_PARITY_PREFIXES)


@dataclass(frozen=True, slots=True)
class Stripe:
    """One chunk per data shard (None is a hole) and, on each parity shard, one that is made of them."""

    id: int
    members: tuple[str | None, ...]

    @property
    def parity_key(self) -> str:
        """Key of the first parity chunk; no array can have it, for "%" is escaped in array paths."""
        return f"{_PARITY_PREFIXES[0]}{self.id}"

    def parity_keys(self, count: int) -> tuple[str, ...]:
        """Return the keys of the first `count` parity chunks, in the order of their shards."""
        return tuple(f"{prefix}{self.id}" for prefix in _PARITY_PREFIXES[:count])


def is_parity_key(key: str) -> bool:
    """Say whether a chunk key names a parity chunk."""
    return key.startswith(_PARITY_PREFIXES)


@dataclass(frozen=True)
class Layout:
    """The stripes of a checkpoint over `shards` data shards, and how many parity shards there are."""

    shards: int
    #: So many nodes may be lost, whichever they are. The parity shards come after the data shards.
    parity: int
    stripes: tuple[Stripe, ...]

    def __post_init__(self) -> None:
        if not 0 <= self.parity <= MAX_PARITY or (self.parity > 1 and self.shards > ORDER):
            raise LayoutError(
                f"{self.shards} data and {self.parity} parity shards: at most {MAX_PARITY} parity shards "
                f"are possible, two of them with at most {ORDER} data shards"
            )

    @property
    def nodes_wanted(self) -> int:
        """Number of storage nodes: the data shards and the parity shards."""
        return self.shards + self.parity

    @cached_property
    def position(self) -> dict[str, tuple[Stripe, int]]:
        """Stripe and shard of each chunk, the parity chunks (shard number `shards` and the next) included."""
        found: dict[str, tuple[Stripe, int]] = {}
        for stripe in self.stripes:
            for shard, key in enumerate(stripe.members):
                if key is not None:
                    found[key] = (stripe, shard)
            for shard, key in enumerate(stripe.parity_keys(self.parity), self.shards):
                found[key] = (stripe, shard)
        return found

    def keys_of(self, shard: int) -> tuple[str, ...]:
        """Return the keys that lie on one shard, in stripe order; parity shards come after the others."""
        if shard >= self.shards:
            of_shard = slice(shard - self.shards, shard - self.shards + 1)
            return tuple(key for s in self.stripes for key in s.parity_keys(self.parity)[of_shard])
        return tuple(key for s in self.stripes if (key := s.members[shard]) is not None)


def assign(
    sizes: Mapping[str, int],
    *,
    shards: int,
    parity: int = 1,
    previous: Layout | None = None,
    weights: Sequence[float] | None = None,
    anew: bool = False,
) -> Layout:
    """Deal chunks to shards.

    A chunk that exists keeps its stripe and shard, since its base lies there; a new one fills a hole, the
    shard with fewest bytes first, or opens a stripe; a removed one leaves a hole. Without a usable `previous`
    the chunks are dealt by size, largest first, so that the shards differ by at most one chunk.

    With weights a shard takes part only in as many stripes as it has time for: the other stripes have a hole
    there. A shard of the greatest weight is in every stripe, and the parity shard has as much as it.

    Parameters
    ----------
    sizes : mapping of str to int
        Chunk keys and their raw bytes.
    shards : int
        Number of data shards, at least 1.
    parity : int
        Number of parity shards, at most `MAX_PARITY`.
    previous : Layout, optional
        Of the checkpoint that is the delta base; ignored if it has another number of shards.
    weights : sequence of float, optional
        Bytes a second that the node of each data shard takes; only their ratios count. A new chunk goes where
        it is done first; what is there already stays.
    anew : bool
        Deal every chunk as if it were new; the stripes get numbers that `previous` does not have.

    Returns
    -------
    Layout
        Every key of `sizes` exactly once; no stripe without a member.

    Notes
    -----
    Of a layout without `previous`, let p be the bytes of a parity shard (the longest chunk of each stripe),
    c the largest chunk, and w the weights divided by the greatest of them. The shard with most bytes has at
    least p - c; every shard has at most w p, and at least w p - 2 c. So no node is busy for longer than one
    of the greatest weight that takes the parity, which is at most one chunk more than the largest data shard.
    """
    if shards < 1:
        raise LayoutError(f"the number of shards must be at least 1, got {shards}")
    kept: list[list[str | None]] = []
    ids: list[int] = []
    if previous is not None and previous.shards == shards and not anew:
        for stripe in previous.stripes:
            members = [key if key in sizes else None for key in stripe.members]
            if any(members):
                kept.append(members)
                ids.append(stripe.id)
    loads = Loads(shards, weights)
    held: set[str] = set()
    for members in kept:
        for shard, key in enumerate(members):
            if key is not None:
                loads.add(shard, sizes[key])
                held.add(key)
    fresh = sorted((key for key in sizes if key not in held), key=lambda key: (-sizes[key], key))
    fresh = _fill_holes(kept, fresh, sizes, loads)
    next_id = max((s.id for s in previous.stripes), default=-1) + 1 if previous else 0
    for members in _opened(fresh, sizes, loads, parity_bytes=_parity_bytes(kept, sizes), shards=shards):
        kept.append(members)
        ids.append(next_id)
        next_id += 1
    return Layout(shards, int(parity), tuple(Stripe(i, tuple(m)) for i, m in zip(ids, kept, strict=True)))


def _opened(
    fresh: list[str], sizes: Mapping[str, int], loads: Loads, *, parity_bytes: int, shards: int
) -> Iterator[list[str | None]]:
    """Yield the members of new stripes; `fresh` is sorted by size."""
    start = 0
    while start < len(fresh):
        longest = sizes[fresh[start]]
        parity_bytes += longest
        takers = loads.takers(longest, parity_bytes) or loads.order()[:1]
        members: list[str | None] = [None] * shards
        # The largest of the group goes where least lies: the shards stay within one chunk of each other.
        for shard, key in zip(takers, fresh[start : start + len(takers)], strict=False):
            members[shard] = key
            loads.add(shard, sizes[key])
        start += len(takers)
        yield members


def _fill_holes(
    kept: list[list[str | None]], fresh: list[str], sizes: Mapping[str, int], loads: Loads
) -> list[str]:
    """Put new chunks into holes, in place; return those that found none, or no shard that has time."""
    holes: dict[int, list[list[str | None]]] = {}
    for members in kept:
        for shard, key in enumerate(members):
            if key is None:
                holes.setdefault(shard, []).append(members)
    parity_bytes = _parity_bytes(kept, sizes)
    left: list[str] = []
    for key in fresh:
        takers = loads.takers(sizes[key], parity_bytes, among=[shard for shard in holes if holes[shard]])
        if not takers:
            left.append(key)
            continue
        shard = takers[0]
        holes[shard].pop()[shard] = key
        loads.add(shard, sizes[key])
    return left


def _parity_bytes(stripes: Iterable[Iterable[str | None]], sizes: Mapping[str, int]) -> int:
    return sum(max(sizes[key] for key in members if key is not None) for members in stripes)


def parity_nbytes(stripe: Stripe, sizes: Mapping[str, int]) -> int:
    """Return the raw bytes of each parity chunk of a stripe: as long as its longest member."""
    return max((sizes[key] for key in stripe.members if key is not None), default=0)
