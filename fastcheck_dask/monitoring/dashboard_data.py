"""What the dashboard's page draws, from what nodes tell the scheduler at each heartbeat. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: A node of which nothing was heard for so long does not count as well.
SILENT_SECONDS: Final = 30.0
_MIB: Final = 2.0**20

Columns = dict[str, list[Any]]

NODE_COLUMNS: Final = (
    *("name", "rack", "health", "master", "used_mib", "reserved_mib", "limit_mib"),
    *("used", "reserved", "merges", "damaged"),
)
SHARD_COLUMNS: Final = ("node", "run", "generation", "mib", "damaged", "persisted")
SAVE_COLUMNS: Final = ("seconds", "node", "run", "generation", "mib")


@dataclass(frozen=True)
class Told:
    """What the scheduler last heard of a node."""

    metrics: Mapping[str, Any]
    #: Seconds since 1970.
    heard_unix: float


def health(told: Told, newest: Mapping[str, int], now: float) -> str:
    """Return ``well``, or the worst that is known of a node.

    Parameters
    ----------
    told : Told
        Of that node.
    newest : mapping of str to int
        Newest generation of each run on any node.
    now : float
        Seconds since 1970.
    """
    if now - told.heard_unix > SILENT_SECONDS:
        return "silent"
    if told.metrics["damaged"]:
        return "damaged"
    if any(_is_behind(run, newest[name]) for name, run in told.metrics["runs"].items()):
        return "behind"
    return "well"


def _is_behind(run: Mapping[str, Any], newest: int) -> bool:
    return run["generation"] is not None and run["generation"] < newest


def newest_of(nodes: Iterable[Told]) -> dict[str, int]:
    """Return the newest generation of each run that any node has; -1 for one that was never committed."""
    found: dict[str, int] = {}
    for told in nodes:
        for name, run in told.metrics["runs"].items():
            generation = -1 if run["generation"] is None else run["generation"]
            found[name] = max(found.get(name, -1), generation)
    return found


def node_columns(nodes: Mapping[str, Told], now: float) -> Columns:
    """Return one row for each node, by name; `used` and `reserved` are shares of the limit."""
    newest = newest_of(nodes.values())
    rows = []
    for name, told in sorted(nodes.items()):
        metrics = told.metrics
        used, reserved, limit = (metrics[key] for key in ("used_bytes", "reserved_bytes", "limit_bytes"))
        rows.append(
            (
                *(name, metrics["rack"], health(told, newest, now), "yes" if metrics["master"] else ""),
                *(used / _MIB, reserved / _MIB, limit / _MIB),
                *(used / limit, (used + reserved) / limit, metrics["pending"], metrics["damaged"]),
            )
        )
    return _columns(NODE_COLUMNS, rows)


def shard_columns(nodes: Mapping[str, Told]) -> Columns:
    """Return one row for each run on each node: a shard."""
    rows = [
        (name, run, held["generation"], held["bytes"] / _MIB, held["damaged"], held["persisted"])
        for name, told in sorted(nodes.items())
        for run, held in sorted(told.metrics["runs"].items())
        if held["generation"] is not None
    ]
    return _columns(SHARD_COLUMNS, rows)


def save_columns(nodes: Mapping[str, Told], now: float) -> Columns:
    """Return one row for each of the last commits on each node; `seconds` are negative, before now."""
    rows = [
        (save["unix"] - now, name, save["run"], save["generation"], save["bytes"] / _MIB)
        for name, told in sorted(nodes.items())
        for save in told.metrics["saves"]
    ]
    return _columns(SAVE_COLUMNS, rows)


def _columns(names: tuple[str, ...], rows: list[tuple[Any, ...]]) -> Columns:
    return {name: [row[index] for row in rows] for index, name in enumerate(names)}
