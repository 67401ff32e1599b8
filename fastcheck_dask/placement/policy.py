"""Choose the storage nodes of a save. Pure: who is alive comes in, a decision goes out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import FastCheckError, TooFewNodesError
from fastcheck_dask.placement.outlook import UNKNOWN, Outlook

#: In words, by the number of parity shards.
_SURVIVED: Final = ("none", "any one", "any two")
_NOTHING_KNOWN: Final[Mapping[str, Outlook]] = MappingProxyType({})


@dataclass(frozen=True)
class Choice:
    """The nodes of a save by shard, the parity nodes last, and what was given up to get there."""

    shards: int
    #: Number of parity shards.
    parity: int
    nodes: tuple[NodeInfo, ...]
    #: Why this is less than was wanted; None when it is not.
    degraded: str | None = None
    #: Bytes a second that each node takes, in their order; empty for shards of equal size.
    weights: tuple[float, ...] = ()
    #: What the last node answered that was tried, where there are no nodes and some were.
    cause: FastCheckError | None = None

    def arranged(self, order: Sequence[int]) -> Choice:
        """Return the same nodes with their shards exchanged: those at these places, in this order."""
        nodes = tuple(self.nodes[place] for place in order)
        return replace(self, nodes=nodes, weights=tuple(self.weights[p] for p in order if self.weights))


def choose(
    alive: Sequence[NodeInfo],
    *,
    wanted: int | None,
    max_shards: int,
    parity: int = 1,
    previous: Sequence[str] = (),
    previous_shards: int | None = None,
    excluded: Collection[str] = (),
    avoided: Collection[str] = (),
    outlooks: Mapping[str, Outlook] = _NOTHING_KNOWN,
) -> Choice:
    """Choose the storage nodes for one save.

    Placement is sticky: a shard stays on its node while that node is alive, because its base lies there.
    New shards go to other hosts and racks than those in use, where there are any; of those to the nearest,
    and within one band of what a transfer costs to the one with most free memory.

    Parameters
    ----------
    alive : sequence of NodeInfo
        The registered nodes.
    wanted : int or None
        Number of data shards if it was given explicitly; None for automatic.
    max_shards : int
        Most data shards that automatic choice uses.
    parity : int
        Number of parity shards that are wanted; each takes a node more.
    previous : sequence of str
        Node names by shard of the checkpoint that is the delta base, the parity nodes last.
    previous_shards : int, optional
        How many of these have data shards; all but one unless given.
    excluded : collection of str
        Nodes that failed during this save.
    avoided : collection of str
        Nodes that were slow: they get a shard only if there are too few others.
    outlooks : mapping of str to Outlook
        What is known of the nodes.

    Returns
    -------
    Choice
        With ``shards == 0`` and no nodes when automatic choice found none at all.

    Raises
    ------
    TooFewNodesError
        If `wanted` was explicit and fewer than `wanted` + `parity` nodes can be used.
    """
    usable = [n for n in alive if n.state == "available" and n.name not in excluded]
    before = len(previous) - 1 if previous_shards is None else previous_shards
    degraded = None
    if wanted is not None:
        if len(usable) < wanted + parity:
            raise TooFewNodesError(wanted + parity, len(usable), _advice(len(usable), parity))
        shards = wanted
    elif not usable:
        return Choice(0, 0, (), "no storage node is alive: only the object tier protects this checkpoint")
    else:
        wished, parity = parity, min(parity, len(usable) - 1)
        shards = min(max_shards, len(usable) - parity)
        if parity < wished:
            degraded = _less_parity(parity, wished)
        elif shards < max_shards and previous and shards < before:
            degraded = (
                f"{len(usable)} storage nodes are alive: {shards} data shards instead of {before}; "
                f"{_SURVIVED[parity]} of them may still be lost"
            )
    if len(previous) != shards + parity and before == shards:
        # Only the parity is another one: the data shards stay, and so does the first parity shard.
        previous = [*previous, *[""] * parity][: shards + parity]
    return Choice(shards, parity, _fill(usable, shards + parity, previous, avoided, outlooks), degraded)


def _advice(usable: int, parity: int) -> str:
    fewer = ", or fewer parity shards" if parity > 1 else ""
    return (
        f"start more (`dask fastcheck storage`), or use num_shards={max(1, usable - parity)} or 'auto'{fewer}"
    )


def _less_parity(parity: int, wished: int) -> str:
    if not parity:
        return "one storage node is alive: no storage node may be lost (no parity)"
    return (
        f"two storage nodes are alive: {parity} parity shard instead of {wished}; "
        "one storage node may be lost, not two"
    )


def replacement(
    alive: Sequence[NodeInfo],
    *,
    others: Sequence[NodeInfo],
    excluded: Collection[str],
    outlooks: Mapping[str, Outlook] = _NOTHING_KNOWN,
) -> NodeInfo | None:
    """Choose a node for a shard whose node failed during the save.

    Parameters
    ----------
    alive : sequence of NodeInfo
        The registered nodes.
    others : sequence of NodeInfo
        The nodes of the other shards: another host and rack than theirs is preferred.
    excluded : collection of str
        Names that must not be chosen, those of `others` among them.
    outlooks : mapping of str to Outlook
        What is known of the nodes.

    Returns
    -------
    NodeInfo or None
        None if there is none: the save has to be done with fewer shards, or not at all.
    """
    spare = [n for n in alive if n.state == "available" and n.name not in excluded]
    return _best(spare, others, outlooks) if spare else None


def _best(spare: Sequence[NodeInfo], used: Sequence[NodeInfo], outlooks: Mapping[str, Outlook]) -> NodeInfo:
    """Return the node that is most apart from those in use, nearest, and emptiest, in this order."""
    hosts, racks = Counter(n.host for n in used), Counter(n.rack for n in used)
    bands = {node.name: outlooks.get(node.name, UNKNOWN).band for node in spare}
    # One that was never asked is taken for no better than the others.
    furthest = max((band for band in bands.values() if band is not None), default=0)

    def key(node: NodeInfo) -> tuple[int, int, int, float, str]:
        band = bands[node.name]
        used_share = outlooks.get(node.name, UNKNOWN).used_share
        near = furthest if band is None else band
        return hosts[node.host], racks[node.rack], near, round(used_share or 0.0, 2), node.name

    return min(spare, key=key)


def _fill(
    usable: Sequence[NodeInfo],
    count: int,
    previous: Sequence[str],
    avoided: Collection[str],
    outlooks: Mapping[str, Outlook],
) -> tuple[NodeInfo, ...]:
    """Keep the living of `previous` at their place and fill the others."""
    welcome = [node for node in usable if node.name not in avoided]
    if len(welcome) < count:
        # Those that are in use first: then at least nothing moves.
        rest = sorted((n for n in usable if n.name in avoided), key=lambda n: n.name not in previous)
        welcome += rest[: count - len(welcome)]
    usable = welcome
    by_name = {node.name: node for node in usable}
    chosen: list[NodeInfo | None] = [None] * count
    if len(previous) == count:
        chosen = [by_name.get(name) for name in previous]
    elif previous:
        # Another number of shards: every chunk moves, so only the set is kept, not the places.
        kept = [by_name[name] for name in previous if name in by_name][:count]
        chosen = [*kept, *([None] * (count - len(kept)))]
    used = [node for node in chosen if node is not None]
    spare = [node for node in usable if node not in used]
    for place, node in enumerate(chosen):
        if node is None:
            best = _best(spare, used, outlooks)
            spare.remove(best)
            used.append(best)
            chosen[place] = best
    return tuple(node for node in chosen if node is not None)
