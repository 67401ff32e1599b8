"""Which shards of a checkpoint go where, so that it is redundant again. Pure."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial

from fastcheck_dask.coordination.base import CommitRecord, NodeInfo
from fastcheck_dask.engine.repair import RepairOrder
from fastcheck_dask.master.survey import ShardState, Survey
from fastcheck_dask.placement.policy import replacement


@dataclass(frozen=True)
class RepairPlan:
    """What is to be done for one run, in this order."""

    orders: tuple[RepairOrder, ...] = ()
    #: Nodes that are about to end, and whose shards no other node can take.
    stranded: tuple[str, ...] = ()
    #: Why something cannot be repaired; empty if all can.
    hopeless: str = ""


def repair_plan(
    record: CommitRecord,
    shards: Sequence[ShardState],
    found: Survey,
    *,
    given_up: Collection[str] = (),
    location: str | None = None,
    bytes_per_second: float | None = None,
) -> RepairPlan:
    """Plan the repair of one generation.

    Lost shards come first, then damaged chunks, then what is on nodes that are about to end.

    Parameters
    ----------
    record : CommitRecord
        The newest committed generation of a run.
    shards : sequence of ShardState
        How its shards are.
    found : Survey
        The nodes.
    given_up : collection of str
        Nodes that have been silent for so long that they count as lost.
    location : str, optional
        Of the object tier; None if it does not have the generation.
    bytes_per_second : float, optional
        How fast a repair may be. A node that is about to end waits for nothing.
    """
    limited = partial(replace, bytes_per_second=bytes_per_second)
    gone = [s for s in shards if s.condition == "gone" or (s.condition == "silent" and s.node in given_up)]
    if len(gone) > record.parity and location is None:
        names = ", ".join(s.node for s in gone)
        return RepairPlan(
            hopeless=f"generation {record.generation} of run {record.run} has lost {len(gone)} shards "
            f"({names}), and the object tier does not have it"
        )
    left = {s.shard for s in gone}
    orders, stranded, lacking = [], [], []
    for state in gone:
        target = _target(record, state, found)
        if target is None:
            lacking.append(state.node)
            continue
        order = _order(record, state.shard, target, found, location)
        orders.append(limited(order, gone=tuple(sorted(left))))
        record, left = order.moved, left - {state.shard}
    for state in shards:
        if state.condition == "damaged":
            order = _order(record, state.shard, found.nodes[state.node], found, location)
            orders.append(limited(order, gone=tuple(sorted({*left, state.shard}))))
        elif state.condition == "leaving" or _leaves(state, found):
            target = _target(record, state, found)
            if target is None:
                stranded.append(state.node)
                continue
            order = _order(record, state.shard, target, found, location)
            orders.append(replace(order, gone=tuple(sorted(left))))
            record = order.moved
    why = f"no other storage node can take the place of {', '.join(lacking)}" if lacking else ""
    return RepairPlan(tuple(orders), tuple(stranded), why)


def _leaves(state: ShardState, found: Survey) -> bool:
    node = found.nodes.get(state.node)
    return state.condition == "silent" and node is not None and node.state != "available"


def _target(record: CommitRecord, state: ShardState, found: Survey) -> NodeInfo | None:
    """Choose who takes a shard: the same node if it came back, or one that holds no other and has room."""
    others = [name for shard, name in enumerate(record.nodes) if shard != state.shard]
    usable = {name: node for name, node in found.nodes.items() if name in found.reports}
    back = usable.get(state.node)
    if state.condition == "gone" and back is not None and back.state == "available":
        return back
    reserve = found.shard_bytes(record)
    full = [name for name in usable if found.free_bytes(name) < reserve]
    neighbours = [found.nodes[name] for name in others if name in found.nodes]
    alive = tuple(usable.values())
    excluded = {*others, state.node}
    # One that seems full may have what it can give up.
    return replacement(alive, others=neighbours, excluded={*excluded, *full}) or replacement(
        alive, others=neighbours, excluded=excluded
    )


def _order(
    record: CommitRecord, shard: int, node: NodeInfo, found: Survey, location: str | None
) -> RepairOrder:
    reserve = found.shard_bytes(record) if node.name != record.nodes[shard] else 0
    return RepairOrder(record, shard, node.name, node.address, location=location, reserve_bytes=reserve)
