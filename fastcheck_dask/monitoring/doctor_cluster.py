"""What ``fastcheck doctor`` finds in a cluster: coordinator, scheduler, nodes, clocks, versions, links."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Final

from fastcheck_dask.config import Settings
from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.manager.scheduler import coordinator_of
from fastcheck_dask.monitoring.cluster import Cluster, NodeView, damaged_chunks, look
from fastcheck_dask.monitoring.command import connection
from fastcheck_dask.monitoring.doctor import Finding
from fastcheck_dask.placement.bandwidth import DEFAULT_SHARDS, measure
from fastcheck_dask.tiers.peer import clients_for
from fastcheck_dask.version import __version__

#: Slower answers of the coordinator are worth a word,
_SLOW_SECONDS: Final = 0.1
#: and clocks that differ by more: S3 refuses requests at 15 min, times in the status are wrong before.
_CLOCK_SECONDS: Final = 2.0
#: A node that is slower than this share of the median holds up every save.
_SLOW_SHARE: Final = 0.5
#: In words, how many nodes parity lacks.
_MORE: Final = ("none", "one", "two")


def cluster(
    settings: Settings, *, coordinator: str | None, scheduler: str | None, links: bool = True
) -> list[Finding]:
    """Look at everything that can be reached; blocks. What cannot be reached is a finding, no error.

    Parameters
    ----------
    settings : Settings
        With the deadlines, and the TLS of data ports (`ConfigError` if its files cannot be used).
    coordinator, scheduler : str, optional
        Where they are; a scheduler knows the coordinator of its nodes.
    links : bool
        Whether to measure the links to some nodes, which takes a few seconds.
    """
    # First: wrong files for TLS are no fault of the coordinator.
    client = clients_for(settings)
    found = []
    if scheduler is not None:
        asked, finding = _ask_scheduler(scheduler, settings)
        found.append(finding)
        coordinator = coordinator or asked
    if not coordinator:
        advice = "give --coordinator (or --scheduler) to have the cluster looked at"
        return [*found, Finding("coordinator", "ok", "not given", advice)]
    try:
        with connection(coordinator, settings) as session:
            found.append(_coordinator(session, coordinator))
            seen = look(session, client)
    except FastCheckError as error:
        advice = "start it, or correct the URL or the credentials; see the guide on coordination"
        return [*found, Finding("coordinator", "problem", str(error), advice)]
    found += nodes(seen, settings.max_shards or DEFAULT_SHARDS, parity=settings.parity)
    found += [*clocks(seen.nodes, seen.unix), *versions(seen.nodes)]
    if links:
        found += _links(seen.nodes, settings)
    return found


def _ask_scheduler(address: str, settings: Settings) -> tuple[str | None, Finding]:
    try:
        coordinator = coordinator_of(address, settings.scheduler_seconds)
    except FastCheckError as error:
        return None, Finding("scheduler", "problem", str(error), "nodes and saves go on without it")
    if not coordinator:
        advice = "start storage nodes with --scheduler, or wait for their first heartbeat"
        return None, Finding("scheduler", "problem", f"{address} has no storage nodes", advice)
    return coordinator, Finding("scheduler", "ok", f"{address} answers, its nodes use {coordinator}")


def _coordinator(session: Coordinator, url: str) -> Finding:
    began = time.monotonic()
    session.nodes()
    seconds = time.monotonic() - began
    found = f"{url}: {session.health().state}, answers in {1000 * seconds:.0f} ms"
    if seconds > _SLOW_SECONDS:
        advice = "each commit waits for several answers: look at the load and the disks of the servers"
        return Finding("coordinator", "advice", found, advice)
    if url.startswith("sqlite:"):
        return Finding("coordinator", "ok", found, "for this machine alone; a cluster needs ZooKeeper")
    return Finding("coordinator", "ok", found)


def nodes(seen: Cluster, max_shards: int, *, parity: int = 1) -> list[Finding]:
    """Judge the storage nodes. Pure."""
    usable = [node for node in seen.nodes if node.state == "available"]
    found = f"{len(usable)} of {len(seen.nodes)} are available"
    findings = []
    if not usable:
        findings.append(Finding("storage nodes", "problem", found, "start some: dask fastcheck storage"))
    elif len(usable) < parity + 1:
        lacking = _MORE[parity + 1 - len(usable)]
        advice = f"start at least {lacking} more: each parity shard needs a node of its own"
        findings.append(Finding("storage nodes", "advice", found, advice))
    elif len(usable) < (wanted := max_shards + parity):
        advice = (
            f"{max_shards} data and {parity} parity shards take {wanted} (peers.max-shards, peers.parity)"
        )
        findings.append(Finding("storage nodes", "advice", found, advice))
    else:
        findings.append(Finding("storage nodes", "ok", found))
    for node in seen.nodes:
        if node.report is None:
            findings.append(
                Finding(f"node {node.info.name}", "problem", node.trouble, "end it, or let it go on")
            )
        elif damaged := damaged_chunks(node.report):
            advice = "loads take them from parity; if there are more again, change the machine's memory"
            findings.append(Finding(f"node {node.info.name}", "problem", f"{damaged} damaged chunks", advice))
    if len(usable) > 1 and len({node.info.rack for node in usable}) == 1:
        advice = "say where each node is (--rack), so that parity is put into other racks"
        findings.append(Finding("racks", "advice", f"all nodes are in rack {usable[0].info.rack}", advice))
    return findings


def clocks(found: Sequence[NodeView], now: float) -> list[Finding]:
    """Compare the nodes' clocks with ours; what the question took is not taken off. Pure."""
    offsets = {
        node.info.name: node.report["unix"] - now
        for node in found
        if node.report is not None and "unix" in node.report
    }
    off = {name: offset for name, offset in offsets.items() if abs(offset) > _CLOCK_SECONDS}
    if off:
        told = ", ".join(f"{name} {offset:+.0f} s" for name, offset in sorted(off.items()))
        return [
            Finding("clocks", "advice", f"differ from here: {told}", "run NTP: S3 refuses requests at 15 min")
        ]
    if offsets:
        return [
            Finding("clocks", "ok", f"{len(offsets)} nodes within {_CLOCK_SECONDS:.0f} s of this machine")
        ]
    return []


def versions(found: Sequence[NodeView]) -> list[Finding]:
    """Compare the nodes' versions with ours. Pure."""
    others = {
        node.info.name: node.report.get("version", "unknown")
        for node in found
        if node.report is not None and node.report.get("version") != __version__
    }
    if not others:
        return []
    told = ", ".join(f"{name} {number}" for name, number in sorted(others.items()))
    advice = "install the same version everywhere; formats have versions of their own and are checked"
    return [Finding("versions", "advice", f"here {__version__}, but {told}", advice)]


def _links(found: Sequence[NodeView], settings: Settings) -> list[Finding]:
    usable = [node.info for node in found if node.state == "available"]
    asked = usable[: (settings.max_shards or DEFAULT_SHARDS) + settings.parity]
    if not asked:
        return []
    try:
        measured = asyncio.run(measure(asked, clients_for(settings)))
    except FastCheckError as error:
        return [Finding("links", "problem", str(error), "saves would leave this node out")]
    return links(measured.to_node, measured.out, settings.floor_bytes_per_second)


def links(to_node: Mapping[str, float], out: float, floor: float) -> list[Finding]:
    """Judge rates in bytes a second; below `floor` a transfer has failed. Pure."""
    middle = sorted(to_node.values())[len(to_node) // 2]
    told = ", ".join(f"{name} {rate / 1e6:.0f}" for name, rate in sorted(to_node.items()))
    text = f"MB/s to {told}; all at once {out / 1e6:.0f}"
    below = sorted(name for name, rate in to_node.items() if rate < floor)
    if below:
        advice = f"below peers.floor-bandwidth ({floor / 1e6:.0f} MB/s): saves fail on {', '.join(below)}"
        return [Finding("links", "problem", text, advice)]
    slow = sorted(name for name, rate in to_node.items() if rate < _SLOW_SHARE * middle)
    if slow:
        advice = f"{', '.join(slow)}: less than half of the others; `fastcheck links` measures longer"
        return [Finding("links", "advice", text, advice)]
    return [Finding("links", "ok", text)]
