"""The status of a cluster as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any, Final

from dask.utils import format_bytes
from rich.box import SIMPLE_HEAD
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.status import MasterStatus, delay_in_words
from fastcheck_dask.monitoring.cluster import Cluster, Gone, NodeView, RunView, damaged_chunks, was_planned

_COLOURS: Final = {"redundant": "green", "degraded": "yellow", "lost": "bold red"}
_STATES: Final = {"available": "green", "silent": "bold red"}
_SENTENCES: Final = {
    "redundant": "all checkpoints are redundant",
    "degraded": "degraded: every newest checkpoint can be had, but the next loss may be one too many",
    "lost": "a newest checkpoint cannot be had from storage nodes or object tier",
}


def render(cluster: Cluster) -> RenderableType:
    """Return all tables, and one line that says how it stands."""
    parts: list[RenderableType] = [_connection(cluster), _nodes(cluster), _runs(cluster)]
    if cluster.gone:
        parts.append(_gone(cluster))
    parts += [
        Text(f"{run.status.name}: {delay_in_words(run.status.delay)}", style="yellow")
        for run in cluster.runs
        if run.status.delay is not None
    ]
    parts += [Text(node.trouble, style="yellow") for node in cluster.nodes if node.trouble]
    parts.append(Text(_SENTENCES[cluster.level], style=_COLOURS[cluster.level]))
    return Group(*parts)


def _connection(cluster: Cluster) -> Text:
    told = cluster.coordination
    return Text(f"coordinator {told.connection.hosts}: {told.connection.state}; {_master(told.master)}")


def _master(master: MasterStatus | None) -> str:
    if master is None or not master.name:
        return "no master yet"
    gone = "" if master.name in master.candidates else " (gone)"
    return f"master {master.name}{gone}, {len(master.candidates)} candidates"


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=SIMPLE_HEAD)
    for column in columns:
        left = column.startswith("<")
        table.add_column(column.lstrip("<"), justify="left" if left else "right", overflow="fold")
    return table


def _nodes(cluster: Cluster) -> Table:
    table = _table(
        f"storage nodes: {len(cluster.nodes) or 'none'}",
        *("<name", "<rack", "<host", "<state", "used", "reserved", "limit"),
        *("<generations", "older", "damaged", "<leases"),
    )
    for node in cluster.nodes:
        state = Text(node.state, style=_STATES.get(node.state, "yellow"))
        table.add_row(node.info.name, node.info.rack, node.info.host, state, *_numbers(node))
    return table


def _numbers(node: NodeView) -> Iterator[str | Text]:
    report = node.report
    if report is None:
        yield from ("?", "?", format_bytes(node.info.capacity_bytes), "?", "?", "?", "?")
        return
    for name in ("used_bytes", "reserved_bytes", "limit_bytes"):
        yield format_bytes(report[name])
    runs = sorted(report["runs"].items())
    held = [f"{name} {run['committed'][0]}" for name, run in runs if run["committed"] is not None]
    yield ", ".join(held) or "-"
    yield str(sum(len(run["ring"]) for _, run in runs))
    damaged = damaged_chunks(report)
    yield Text(str(damaged), style="bold red" if damaged else "")
    over = sum(run["lease"]["ends_seconds"] <= 0 for _, run in runs)
    yield f"{len(runs) - over} of {len(runs)} last" if runs else "-"


def _runs(cluster: Cluster) -> Table:
    table = _table(
        f"runs: {len(cluster.runs) or 'none'}",
        *("<run", "<owner", "newest", "<tag", "<persisted", "<parity", "age", "lease", "<recoverable now"),
    )
    for run in cluster.runs:
        latest = run.status.latest
        newest = ("-", "-", "-", "-", "-") if latest is None else _newest(latest, cluster.unix)
        lease = "-" if run.lease_seconds is None else duration(run.lease_seconds)
        table.add_row(run.status.name, run.status.owner or "nobody", *newest, lease, _recoverable(run))
    return table


def _newest(latest: CommitRecord, now: float) -> tuple[str, str, str, str, str]:
    return (
        str(latest.generation),
        latest.tag,
        "yes" if latest.persisted else "no",
        str(latest.parity),
        duration(now - latest.created_unix),
    )


def _recoverable(run: RunView) -> Text:
    if run.verdict is None:
        return Text("nothing was committed")
    text = Text(run.verdict.level, style=_COLOURS[run.verdict.level])
    text.append(f": {run.verdict.why}{_may_die(run)}", style="default")
    if run.verdict.level == "lost":
        older = (
            "no older one either" if run.recoverable is None else f"generation {run.recoverable} can be had"
        )
        text.append(f"; {older}", style="default")
    if run.published is not None:
        text.append(f" (the master says: {_plain(run.published)})", style="dim")
    return text


def _may_die(run: RunView) -> str:
    """Say how many nodes may still die, where there is parity."""
    latest, verdict = run.status.latest, run.verdict
    if latest is None or not latest.parity or verdict is None or verdict.level == "lost":
        return ""
    count = verdict.may_die
    return f"; {count or 'no'} node{'' if count < 2 else 's'} may die"


def _plain(published: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in published.items())


def _gone(cluster: Cluster) -> Table:
    table = _table("nodes that ended", "<name", "<rack", "<host", "<when", "<lived", "<how", "<reason")
    for one in cluster.gone:
        table.add_row(one.name, one.rack, one.host, *_end(one))
    return table


def _end(one: Gone) -> tuple[str, str, Text, str]:
    if one.end is None:
        reason = "not registered any more, and it did not say that it ends; no master has noted it yet"
        return "?", "?", Text("gone", style="bold red"), reason
    end = one.end
    when = datetime.fromtimestamp(end.unix).astimezone().isoformat(" ", "seconds")
    how = Text(end.cause, style="" if was_planned(one) else "bold red")
    return when, duration(end.unix - end.started_unix), how, end.why


def duration(seconds: float) -> str:
    """Return a time in its two largest units.

    >>> duration(59.4), duration(3700), duration(90061), duration(-5)
    ('59 s', '1 h 1 min', '1 d 1 h', '-5 s')
    """
    sign, whole = ("-" if seconds < 0 else ""), round(abs(seconds))
    days, hours, minutes = whole // 86400, whole // 3600 % 24, whole // 60 % 60
    if days:
        return f"{sign}{days} d {hours} h"
    if hours:
        return f"{sign}{hours} h {minutes} min"
    return f"{sign}{minutes} min {whole % 60} s" if minutes else f"{sign}{whole} s"
