"""What is shown at the end: tables, and a summary for machines."""

from __future__ import annotations

import json
import os
import platform
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from fastcheck_dask.demo.results import COMPARED, Outcome, Recovery, tier_row
from fastcheck_dask.demo.scenario import TITLES

_TIERS = {"local": "local", "peers": "peers, parity", "object": "object"}


def write_summary(file: Path, outcomes: list[Outcome], *, seed: int, quick: bool, seconds: float) -> bool:
    """Write everything that was measured as JSON; return whether all came out as it must."""
    ok = bool(outcomes) and not any(outcome.faults() for outcome in outcomes)
    summary = {
        "ok": ok,
        "seed": seed,
        "quick": quick,
        "seconds": seconds,
        "machine": {
            "cores": os.cpu_count(),
            "system": platform.platform(),
            "python": platform.python_version(),
        },
        "models": {outcome.model: outcome.to_dict() for outcome in outcomes},
    }
    file.write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")
    return ok


def show(console: Console, outcomes: list[Outcome]) -> None:
    """Show the tables and the verdict."""
    console.print(_save_table(outcomes))
    console.print(_recovery_table(outcomes))
    for outcome in outcomes:
        _show_verdict(console, outcome)


def _save_table(outcomes: list[Outcome]) -> Table:
    table = _table("Saves: medians of one save")
    for heading in ("network", "tier"):
        table.add_column(heading, no_wrap=True)
    for heading in ("saves", "raw", "sent", "ratio", "stall", "takes"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        first = TITLES[outcome.model]
        for level, title in _TIERS.items():
            row = tier_row(outcome.saves(), level)
            if row is None:
                continue
            took = _time(row["seconds"])
            table.add_row(
                first,
                title,
                f"{row['saves']:.0f}",
                _size(row["raw_bytes"]),
                _size(row["sent_bytes"]),
                f"{row['sent_bytes'] / row['raw_bytes']:.0%}",
                took if level == "local" else "-",
                took,
            )
            first = ""
        table.add_section()
    return table


def _recovery_table(outcomes: list[Outcome]) -> Table:
    table = _table("Recoveries: the training host was killed, and storage nodes")
    for heading in ("network", "nodes", "raw by source"):
        table.add_column(heading, no_wrap=True)
    for heading in ("received", "steps lost", "load", "back in"):
        table.add_column(heading, justify="right", no_wrap=True)
    for outcome in outcomes:
        first = TITLES[outcome.model]
        for recovery in outcome.recoveries:
            table.add_row(first, *_recovery_row(recovery))
            first = ""
        table.add_section()
    return table


def _table(title: str) -> Table:
    return Table(
        title=title,
        title_justify="left",
        title_style="bold",
        box=SIMPLE_HEAD,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )


def _recovery_row(recovery: Recovery) -> list[str]:
    nodes = recovery.killed[1:]
    return [
        nodes[0] if len(nodes) == 1 else f"all {len(nodes)}",
        "\n".join(f"{source} {_size(nbytes)}" for source, nbytes in recovery.raw_bytes.items()),
        _size(recovery.received_bytes),
        f"{recovery.killed_at_step - recovery.step} of {recovery.killed_at_step}",
        _time(recovery.load_seconds),
        f"{recovery.back_seconds:.1f} s",
    ]


def _show_verdict(console: Console, outcome: Outcome) -> None:
    losses = outcome.reference.all_losses
    title = TITLES[outcome.model]
    if losses:
        fell = f"loss {losses[0]:.4f} -> {losses[-1]:.4f} in {len(losses)} steps"
        console.print(f"{title}: {fell}", highlight=False)
    faults = outcome.faults()
    for fault in faults:
        console.print(f"  [red]wrong[/]: {fault}", highlight=False, soft_wrap=True)
    if not faults:
        digests = outcome.reference.digests or {}
        same = ", ".join(f"{what} {digests[what][:12]}" for what in COMPARED)
        console.print(
            f"  [green]bit for bit the same[/] with and without failures (sha256: {same})",
            highlight=False,
            soft_wrap=True,
        )


def _size(nbytes: float) -> str:
    for unit, size in (("MB", 1e6), ("kB", 1e3)):
        if nbytes >= size:
            return f"{nbytes / size:.1f} {unit}"
    return f"{nbytes:.0f} B"


def _time(seconds: float) -> str:
    return f"{seconds:.2f} s" if seconds >= 1 else f"{seconds * 1e3:.0f} ms"
