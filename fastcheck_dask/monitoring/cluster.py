"""Ask coordinator and storage nodes for all that is known of them; only reads."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final

from fastcheck_dask.coordination.base import CommitRecord, Coordinator, NodeInfo
from fastcheck_dask.coordination.entries import Entries, Entry
from fastcheck_dask.coordination.lives import PLANNED, End, Life, read_lives
from fastcheck_dask.coordination.states.value import NodeState, state_path
from fastcheck_dask.coordination.status import CoordinationStatus, RunStatus, gather
from fastcheck_dask.engine.manifests import manifest_from_nodes
from fastcheck_dask.errors import FastCheckError, UnknownFormatError
from fastcheck_dask.layout.stripes import Layout
from fastcheck_dask.monitoring.redundancy import (
    ABSENT,
    RANK,
    Holding,
    Level,
    Verdict,
    holding_in,
    judge,
    needs_layout,
    worse,
)
from fastcheck_dask.tiers.peer import PeerClient

#: Where the master publishes, by run, what it knows of the newest checkpoint.
PUBLISHED: Final = "recoverable"
#: Ends of nodes that are told, the newest first.
_ENDS: Final = 10
#: Nodes that are asked at a time.
_AT_A_TIME: Final = 32

Client = Callable[[str, str], PeerClient]


@dataclass(frozen=True)
class NodeView:
    """A storage node that is registered."""

    info: NodeInfo
    #: ``available``, ``draining`` or ``unavailable`` as it says; ``silent`` if it does not answer.
    state: str
    #: What it answers to `status`; None if it does not.
    report: Mapping[str, Any] | None
    #: Why it does not.
    trouble: str = ""
    started_unix: float | None = None


@dataclass(frozen=True)
class Gone:
    """An end of a storage node."""

    name: str
    host: str
    rack: str
    #: None if nobody noted it: no master was there, or the node's time is not over yet.
    end: End | None


@dataclass(frozen=True)
class RunView:
    """A run."""

    status: RunStatus
    #: Of its newest generation; None if there is none.
    verdict: Verdict | None
    #: The newest generation that can be had; None if there is none.
    recoverable: int | None
    #: What the master published, if it did.
    published: Mapping[str, Any] | None
    #: When the last node lets go of it unless it is renewed, in seconds from now; None if no node has it.
    lease_seconds: float | None

    @property
    def level(self) -> Level:
        """How well it is; a run without a commit lacks nothing."""
        return "redundant" if self.verdict is None else self.verdict.level


@dataclass(frozen=True)
class Cluster:
    """All of it, not of one moment."""

    coordination: CoordinationStatus
    nodes: tuple[NodeView, ...]
    runs: tuple[RunView, ...]
    gone: tuple[Gone, ...]
    #: Seconds since 1970.
    unix: float

    @property
    def level(self) -> Level:
        """The worst of all runs and nodes."""
        found: Level = "redundant"
        for run in self.runs:
            found = worse(found, run.level)
        if any(node.report is None or damaged_chunks(node.report) for node in self.nodes):
            found = worse(found, "degraded")
        return found

    @property
    def exit_status(self) -> int:
        """0 if all is redundant, 1 if something is degraded, 2 if a newest checkpoint cannot be had."""
        return RANK[self.level]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        told = self.coordination.to_dict()
        runs = {run["name"]: run for run in told["runs"]}
        return {
            **told,
            "level": self.level,
            "unix": self.unix,
            "nodes": [
                {**asdict(node.info), **{k: v for k, v in vars(node).items() if k != "info"}}
                for node in self.nodes
            ],
            "runs": [
                {
                    **runs[run.status.name],
                    "level": run.level,
                    "recoverable": run.recoverable,
                    "verdict": None if run.verdict is None else asdict(run.verdict),
                    "published": run.published,
                    "lease_seconds": run.lease_seconds,
                }
                for run in self.runs
            ],
            "gone": [asdict(one) for one in self.gone],
        }


def damaged_chunks(report: Mapping[str, Any]) -> int:
    """Return how many chunks of all runs are damaged on a node."""
    return sum(lost["count"] for run in report["runs"].values() for lost in run["damaged"])


def look(coordinator: Coordinator, client: Client) -> Cluster:
    """Ask for everything; blocks.

    Parameters
    ----------
    coordinator : Coordinator
        Whose nodes and runs.
    client : callable
        Opens a node by name and address.

    Raises
    ------
    CoordinationError
        If the coordinator cannot be reached. A node that does not answer is shown so.
    """
    told = gather(coordinator)
    entries = coordinator.entries
    lives = {name: life for name, (life, _) in read_lives(entries).items()}
    states = _states(entries, told.nodes)
    published = _published(entries, [run.name for run in told.runs])
    reports = asyncio.run(_reports(told.nodes, client))
    nodes = tuple(
        _node_view(node, states, reports[node.name], life=lives.get(node.name)) for node in told.nodes
    )
    known = {node.info.name: node.report for node in nodes if node.report is not None}
    runs = asyncio.run(_run_views(told.runs, coordinator, known, client=client, published=published))
    return Cluster(told, nodes, runs, gone(lives.values(), {node.name for node in told.nodes}), time.time())


def gone(lives: Any, registered: set[str]) -> tuple[Gone, ...]:
    """Return the last ends of nodes, the newest first; what nobody has noted yet comes before them. Pure."""
    open_ends = [
        Gone(life.name, life.host, life.rack, None)
        for life in lives
        if life.end is None and life.name not in registered
    ]
    ends = [Gone(life.name, life.host, life.rack, end) for life in lives for end in life.ends]
    ends.sort(key=lambda one: -one.end.unix if one.end is not None else 0.0)
    return (*open_ends, *ends[:_ENDS])


def was_planned(one: Gone) -> bool:
    """Say whether a node ended as it was asked to."""
    return one.end is not None and one.end.cause in PLANNED


def _states(entries: Entries, nodes: Sequence[NodeInfo]) -> dict[str, str]:
    found = entries.get_many(*(state_path(node.name) for node in nodes))
    return {node.name: _state_in(entry) for node, entry in zip(nodes, found, strict=True)}


def _state_in(entry: Entry | None) -> str:
    try:
        # Without one, what the registry says counts.
        return "" if entry is None else NodeState.from_bytes(entry.value).state
    except UnknownFormatError:
        return "unavailable"


def _published(entries: Entries, runs: Sequence[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for run, entry in zip(runs, entries.get_many(*(f"{PUBLISHED}/{run}" for run in runs)), strict=True):
        try:
            told = None if entry is None else json.loads(entry.value)
        except ValueError:
            continue
        if isinstance(told, dict):
            found[run] = told
    return found


async def _reports(nodes: Sequence[NodeInfo], client: Client) -> dict[str, dict[str, Any] | str]:
    """Ask all nodes; of one that does not answer, return why."""
    at_a_time = asyncio.Semaphore(_AT_A_TIME)

    async def ask(node: NodeInfo) -> dict[str, Any] | str:
        async with at_a_time:
            link = client(node.name, node.address)
            try:
                return await link.status()
            except FastCheckError as error:
                return str(error)
            finally:
                await link.close()

    return dict(zip([node.name for node in nodes], await asyncio.gather(*map(ask, nodes)), strict=True))


def _node_view(
    info: NodeInfo, states: Mapping[str, str], answer: dict[str, Any] | str, *, life: Life | None
) -> NodeView:
    started = None if life is None or life.end is not None else life.started_unix
    if isinstance(answer, str):
        return NodeView(info, "silent", None, answer, started)
    return NodeView(info, states[info.name] or info.state, answer, started_unix=started)


async def _run_views(
    runs: Sequence[RunStatus],
    coordinator: Coordinator,
    reports: Mapping[str, Mapping[str, Any]],
    *,
    client: Client,
    published: Mapping[str, Mapping[str, Any]],
) -> tuple[RunView, ...]:
    found = []
    for run in runs:
        verdict = None if run.latest is None else await _verdict(run.latest, reports, client)
        recoverable = None
        if run.latest is not None and verdict is not None:
            recoverable = run.latest.generation
            if verdict.level == "lost":
                recoverable = await _older(coordinator, run.latest, reports, client=client)
        leases = [
            report["runs"][run.name]["lease"]["ends_seconds"]
            for report in reports.values()
            if run.name in report["runs"]
        ]
        lease = max(leases, default=None)
        found.append(RunView(run, verdict, recoverable, published.get(run.name), lease))
    return tuple(found)


async def _verdict(record: CommitRecord, reports: Mapping[str, Mapping[str, Any]], client: Client) -> Verdict:
    holdings: dict[str, Holding] = {
        name: holding_in(reports[name], record) if name in reports else ABSENT for name in record.nodes
    }
    layout: Layout | None = None
    if needs_layout(record, holdings):
        manifest = await manifest_from_nodes(record, client, causes=[])
        layout = None if manifest is None else manifest[0].layout
    return judge(record, holdings, layout)


async def _older(
    coordinator: Coordinator,
    latest: CommitRecord,
    reports: Mapping[str, Mapping[str, Any]],
    *,
    client: Client,
) -> int | None:
    """Return the newest generation before the latest that can be had."""
    for record in reversed(await asyncio.to_thread(coordinator.commits, latest.run)):
        if record.generation < latest.generation:
            verdict = await _verdict(record, reports, client)
            if verdict.level != "lost":
                return record.generation
    return None
