"""Whether a checkpoint can be had now, and what it can still lose. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.layout.stripes import Layout

#: *redundant*: any one storage node may go. *degraded*: it can be had, and the next loss may be one too many,
#: or it has to come from the object tier. *lost*: neither storage nodes nor object tier have it.
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
    """Say whether only the stripes tell if parity is enough: more than one node lacks something."""
    hurt = _hurt(record, holdings)
    whole = [name for name in hurt if not holdings[name].there or not holdings[name].complete]
    return record.parity and len(hurt) > 1 and len(whole) < 2


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
    if record.nodes and not hurt:
        if record.parity or record.persisted:
            return Verdict("redundant", "all nodes have it")
        return Verdict("degraded", "its node has it, without parity, and the object tier not yet")
    if record.nodes and record.parity and (len(hurt) == 1 or _rebuildable(record, holdings, layout)):
        return Verdict("degraded", f"from parity: {_described(hurt, holdings)}", missing)
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
    """Say whether no stripe lacks more than one of its chunks."""
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
        keys = [key for key in (*stripe.members, stripe.parity_key) if key is not None]
        if sum(key in lost for key in keys) > 1:
            return False
    return True
