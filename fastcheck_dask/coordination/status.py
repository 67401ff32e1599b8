"""What a coordinator knows, for people and for scripts: ``fastcheck status --coordination``."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

from fastcheck_dask.coordination.base import CommitRecord, Coordinator, Health, NodeInfo
from fastcheck_dask.coordination.candidacy import CANDIDATES, EPOCH, standing
from fastcheck_dask.coordination.delays import Delay, read_delays
from fastcheck_dask.coordination.entries import Entries


@dataclass(frozen=True)
class MasterStatus:
    """The election, as its entries tell."""

    #: The fencing token.
    epoch: int
    #: Who was elected last; empty if nobody was.
    name: str
    address: str
    #: Who stands, the master among them.
    candidates: tuple[str, ...]


@dataclass(frozen=True)
class RunStatus:
    """One run."""

    name: str
    #: Who owns it; None if no live process does.
    owner: str | None
    latest: CommitRecord | None
    #: What keeps its checkpoints from the object tier, as far as who tried has told.
    delay: Delay | None = None


@dataclass(frozen=True)
class CoordinationStatus:
    """All of it, not of one moment."""

    connection: Health
    layout_version: int
    #: None where there never was an election.
    master: MasterStatus | None
    nodes: tuple[NodeInfo, ...]
    runs: tuple[RunStatus, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = asdict(self)
        # By a clock that nobody else has.
        del found["connection"]["since_seconds"]
        for run in found["runs"]:
            latest = run["latest"]
            keys = ("generation", "tag", "persisted", "created_unix", "raw_bytes", "nodes")
            run["latest"] = None if latest is None else {key: latest[key] for key in keys}
        return found


def gather(coordinator: Coordinator) -> CoordinationStatus:
    """Ask a coordinator for everything; a few questions for each run.

    Raises
    ------
    CoordinationError
        If it cannot be reached.
    """
    nodes = coordinator.nodes()
    names = coordinator.runs()
    delays = read_delays(coordinator.entries, *names)
    runs = tuple(
        RunStatus(run, coordinator.owner(run), coordinator.latest(run), delay)
        for run, delay in zip(names, delays, strict=True)
    )
    return CoordinationStatus(
        coordinator.health(),
        coordinator.layout_version,
        _master(coordinator.entries),
        nodes,
        runs,
    )


def _master(entries: Entries) -> MasterStatus | None:
    epoch = entries.get(EPOCH)
    if epoch is None:
        return None
    elected, candidates = standing(epoch), entries.names(CANDIDATES)
    if elected is None:
        return MasterStatus(epoch.version, "", "", candidates)
    return MasterStatus(epoch.version, elected.name, elected.address, candidates)


def lines(status: CoordinationStatus) -> Iterator[str]:
    """Return the status as lines for people."""
    connection = status.connection
    session = f"session {connection.session_id}, layout {status.layout_version}"
    yield f"{connection.state} with {connection.hosts}, {session}"
    if status.master is not None:
        master = status.master
        who = f"{master.name} at {master.address}" if master.name else "nobody yet"
        if master.name and master.name not in master.candidates:
            who += " (gone)"
        yield f"master: {who}, epoch {master.epoch}, {len(master.candidates)} candidates"
    yield f"storage nodes: {len(status.nodes) or 'none'}"
    for node in status.nodes:
        yield f"  {node.name}  {node.state}  {node.address}  rack {node.rack}  {_size(node.capacity_bytes)}"
    yield f"runs: {len(status.runs) or 'none'}"
    for run in status.runs:
        yield f"  {run.name}  {_generation(run.latest)}; {_owner(run.owner)}"
        if run.delay is not None:
            yield f"    {delay_in_words(run.delay)}"


def delay_in_words(delay: Delay) -> str:
    """Return a delay as people read it."""
    since = datetime.fromtimestamp(delay.since_unix, UTC).strftime("%Y-%m-%d %H:%M:%S UTC")
    return (
        f"generation {delay.generation} ({delay.tag}) is not in the object tier since {since}: {delay.reason}"
    )


def _generation(latest: CommitRecord | None) -> str:
    if latest is None:
        return "nothing committed"
    where = "persisted" if latest.persisted else "not persisted"
    on = f" on {', '.join(latest.nodes)}" if latest.nodes else ""
    return f"generation {latest.generation} ({latest.tag}), {where}{on}"


def _owner(owner: str | None) -> str:
    return "no owner" if owner is None else f"owned by {owner}"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB"
