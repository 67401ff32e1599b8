"""Whether a checkpoint can be had now, and what it can still lose. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.layout.stripes import Layout

#: *redundant*: nothing is missing, and any one storage node may go. *degraded*: it can be had, and fewer may
#: go than if nothing was missing, or it has to come from the object tier. *lost*: neither storage nodes nor
#: object tier have it.
Level = Literal["redundant", "degraded", "lost"]
#: The better, the smaller.
RANK: Mapping[Level, int] = {"redundant": 0, "degraded": 1, "lost": 2}


@dataclass(frozen=True)
class Holding:
    """What one node has of a generation."""

    there: bool
    #: Keys of damaged chunks.
    damaged: frozenset[str] = frozenset()
    #: Whether `damaged` names all of them.
    complete: bool = True


ABSENT = Holding(there=False)


@dataclass(frozen=True)
class Verdict:
    """What is so of one generation."""

    level: Level
    #: Where it would come from, and what is missing.
    why: str
    #: Nodes without it, or with damage in it.
    missing: tuple[str, ...] = field(default=())
    #: So many nodes more may die, whichever they are, and the others still give all of it.
    may_die: int = 0


def holding_in(report: Mapping[str, Any], record: CommitRecord) -> Holding:
    """Return what a node, by its report, has of a generation."""
    run = report["runs"].get(record.run)
    name = [record.generation, record.token]
    if run is None or name not in [run["committed"], *run["pins"], *run["ring"]]:
        return ABSENT
    for lost in run["damaged"]:
        if [lost["generation"], lost["token"]] == name:
            return Holding(True, frozenset(lost["keys"]), lost["count"] == len(lost["keys"]))
    return Holding(True)


def needs_layout(record: CommitRecord, holdings: Mapping[str, Holding]) -> bool:
    """Say whether only the stripes tell if parity is enough: more nodes lack something than it covers."""
    hurt = _hurt(record, holdings)
    whole = [name for name in hurt if not holdings[name].there or not holdings[name].complete]
    return len(hurt) > record.parity >= max(1, len(whole))


def judge(record: CommitRecord, holdings: Mapping[str, Holding], layout: Layout | None = None) -> Verdict:
    """Say whether a committed generation can be had.

    Parameters
    ----------
    record : CommitRecord
        Of that generation.
    holdings : mapping of str to Holding
        What each of its nodes has.
    layout : Layout, optional
        Its stripes, where :func:`needs_layout`; without them the worst is supposed.
    """
    hurt = _hurt(record, holdings)
    missing = tuple(hurt)
    may_die = max(0, record.parity - len(hurt))
    if record.nodes and not hurt:
        if record.parity or record.persisted:
            return Verdict("redundant", "all nodes have it", may_die=may_die)
        return Verdict("degraded", "its nodes have it, without parity, and the object tier not yet")
    if record.nodes and (len(hurt) <= record.parity or _rebuildable(record, holdings, layout)):
        return Verdict("degraded", f"from parity: {_described(hurt, holdings)}", missing, may_die)
    if not record.nodes and record.persisted:
        # Without storage nodes this is all that was wanted.
        return Verdict("redundant", "the object tier has it")
    if record.persisted:
        return Verdict("degraded", f"from the object tier: {_described(hurt, holdings)}", missing)
    return Verdict(
        "lost", f"{_described(hurt, holdings) or 'no node'}, and it is not in the object tier", missing
    )


def worse(first: Level, second: Level) -> Level:
    """Return the worse of two.

    >>> worse("redundant", "degraded")
    'degraded'
    """
    return max(first, second, key=RANK.__getitem__)


def _hurt(record: CommitRecord, holdings: Mapping[str, Holding]) -> list[str]:
    return [name for name in record.nodes if not holdings[name].there or holdings[name].damaged]


def _described(hurt: Sequence[str], holdings: Mapping[str, Holding]) -> str:
    parts = [
        f"{name} has {len(holdings[name].damaged)} damaged chunks"
        if holdings[name].there
        else f"{name} is missing"
        for name in hurt
    ]
    return ", ".join(parts)


def _rebuildable(record: CommitRecord, holdings: Mapping[str, Holding], layout: Layout | None) -> bool:
    """Say whether no stripe lacks more of its chunks than it has parity chunks."""
    if layout is None or not needs_layout(record, holdings):
        return False
    lost: set[str] = set()
    for shard, name in enumerate(record.nodes):
        held = holdings[name]
        if not held.there or not held.complete:
            lost.update(layout.keys_of(shard))
        else:
            lost |= held.damaged
    for stripe in layout.stripes:
        if sum(key in lost for key in (*stripe.members, *stripe.parity_keys(record.parity))) > record.parity:
            return False
    return True
