"""What ``fastcheck doctor`` does: look everywhere, and show what was found with what to do about it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Final

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table
from rich.text import Text

from fastcheck_dask.config import settings
from fastcheck_dask.monitoring import doctor, doctor_cluster
from fastcheck_dask.monitoring.doctor import Finding

_STYLES: Final = {"ok": "green", "advice": "yellow", "problem": "bold red"}


def run_doctor(
    console: Console,
    *,
    checkpoint_dir: str | None,
    coordinator: str | None,
    scheduler: str | None,
    links: bool,
    as_json: bool,
) -> int:
    """Look, show, and return the exit status: 1 if there is a problem.

    Raises
    ------
    ConfigError
        If the settings cannot be used.
    """
    found = settings()
    findings = [*doctor.installation(), *doctor.machine(found)]
    if checkpoint_dir is not None:
        findings += doctor.checkpoint_dir(checkpoint_dir)
    findings += doctor_cluster.cluster(found, coordinator=coordinator, scheduler=scheduler, links=links)
    if as_json:
        console.file.write(json.dumps([asdict(finding) for finding in findings], indent=2) + "\n")
    else:
        show(console, findings)
    return int(any(finding.level == "problem" for finding in findings))


def show(console: Console, findings: Sequence[Finding]) -> None:
    """Show a table of the findings, and how many of each kind there are."""
    table = Table(box=SIMPLE_HEAD)
    for heading in ("", "what", "found", "advice"):
        table.add_column(heading, overflow="fold", no_wrap=heading in ("", "what"))
    for finding in findings:
        mark = Text(finding.level, style=_STYLES[finding.level])
        table.add_row(mark, finding.what, Text(finding.found), Text(finding.advice))
    console.print(table)
    counts = [sum(finding.level == level for finding in findings) for level in ("problem", "advice")]
    console.print(f"{counts[0]} problems, {counts[1]} pieces of advice", highlight=False)
