"""What ``fastcheck links`` shows: measured links, and the settings that fit them."""

from __future__ import annotations

import asyncio
import math

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine.tuning import Measured, Tuning
from fastcheck_dask.errors import TooFewNodesError
from fastcheck_dask.manager.arguments import check_address, coordinator_url
from fastcheck_dask.manager.scheduler import coordinator_of
from fastcheck_dask.placement.bandwidth import SHARDS_CAP, Bandwidths, measure
from fastcheck_dask.tiers.peer import clients_for

#: A ratio that comes this close to the number of nodes may be larger in truth.
TOO_FEW_TO_TELL = 0.3


def run(
    console: Console, *, scheduler: str | None, coordinator: str | None, tuning: Tuning | None = None
) -> None:
    """Measure the links to the registered nodes and show what they mean.

    With a `tuning` also how many encoders keep them busy on that checkpoint.

    Raises
    ------
    TooFewNodesError
        If no node is available.
    CoordinationError, NodeUnavailableError
        If the coordinator or a node does not answer.
    """
    found = settings()
    if coordinator is None and scheduler is not None:
        coordinator = coordinator_of(check_address(scheduler, "scheduler"), found.scheduler_seconds)
    session = connect(
        coordinator_url(coordinator or ""),
        timeout_seconds=found.coordinator_seconds,
        session_seconds=found.session_seconds,
    )
    try:
        nodes = [node for node in session.nodes() if node.state == "available"][: SHARDS_CAP + found.parity]
    finally:
        session.close()
    if not nodes:
        raise TooFewNodesError(1, 0, "start some (`dask fastcheck storage`)")
    rates = asyncio.run(measure(nodes, clients_for(found)))
    auto = None if tuning is None else tuning.auto
    show(console, nodes, rates, encoders=found.encoders, parity=found.parity, auto=auto)


def show(
    console: Console,
    nodes: list[NodeInfo],
    found: Bandwidths,
    *,
    encoders: int,
    parity: int = 1,
    auto: Measured | None = None,
) -> None:
    """Show the tables and the conclusions."""
    table = Table(box=SIMPLE_HEAD)
    table.add_column("node", no_wrap=True)
    for heading in ("rack", "to it MB/s", "from it MB/s"):
        table.add_column(heading, justify="right", no_wrap=True)
    for node in nodes:
        rates = (found.to_node[node.name], found.from_node[node.name])
        table.add_row(node.name, node.rack, *(f"{rate / 1e6:.0f}" for rate in rates))
    table.add_row("all at once", "", f"{found.out / 1e6:.0f}", f"{found.into / 1e6:.0f}")
    console.print(table)
    for line in conclusions(found, nodes=len(nodes), encoders=encoders, parity=parity, auto=auto):
        console.print(line, highlight=False)


def conclusions(
    found: Bandwidths, *, nodes: int, encoders: int, parity: int = 1, auto: Measured | None = None
) -> list[str]:
    """Say in words which settings fit the links.

    Parameters
    ----------
    found : Bandwidths
        Of the links.
    nodes : int
        How many were measured.
    encoders : int
        As configured.
    parity : int
        Number of parity shards.
    auto : Measured, optional
        What one core does with the checkpoint.

    Returns
    -------
    list of str
        One line each.
    """
    lines = [
        f"num_shards={found.shards}: {found.out / 1e6:.0f} MB/s go out to all nodes at once and "
        f"{found.one / 1e6:.0f} MB/s to one of them, so that {found.out / found.one:.2f} nodes take it all "
        f"(rounded up, at most {SHARDS_CAP})."
    ]
    wanted = found.shards + parity
    if nodes < wanted:
        lines.append(
            f"That takes {wanted} nodes with the parity, and {nodes} are available: start "
            f"{wanted - nodes} more."
        )
    elif found.out / found.one > nodes - TOO_FEW_TO_TELL:
        lines.append(
            f"With {nodes} nodes no larger number can be seen: with more of them more might go out at once."
        )
    if auto is not None:
        return [*lines, _encoders_for(found, encoders, auto)]
    lines.append(
        f"encoders={encoders}: to keep these links busy each has to encode "
        f"{found.out / encoders / 1e6:.0f} MB/s of what is sent; `fastcheck tune CHECKPOINT_DIR` says what "
        "they do, and which prefix bits are smallest, on your own checkpoint."
    )
    return lines


def _encoders_for(found: Bandwidths, encoders: int, auto: Measured) -> str:
    """Say how many encoders keep the links busy with a checkpoint of which one core was measured."""
    # The links carry encoded bytes; parity is encoded like everything else.
    raw_rate = found.out * auto.ratio
    wanted = max(1, math.ceil(raw_rate / auto.encode_bytes_per_second))
    enough = "which is enough" if encoders >= wanted else f"which keep them {encoders / wanted:.0%} busy"
    return (
        f"encoders={wanted}: one makes {auto.encode_bytes_per_second / 1e6:.0f} MB/s of whole chunks "
        f"{auto.ratio:.2f} times smaller, and the links take {raw_rate / 1e6:.0f} MB/s before encoding; "
        f"{encoders} are configured, {enough}. Where links are faster than encoders, saves go raw."
    )
