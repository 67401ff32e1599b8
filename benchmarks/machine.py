"""What the figures were measured on, and how they are printed."""

from __future__ import annotations

import os
import platform
import statistics
from collections.abc import Sequence

import psutil
from rich.console import Console
from rich.table import Table

console = Console(width=140)


def describe() -> str:
    """Return one line about the machine."""
    load = os.getloadavg()[0]
    memory = psutil.virtual_memory().total / 2**30
    return (
        f"{os.cpu_count()} cores, {memory:.0f} GiB, Python {platform.python_version()}, "
        f"load average {load:.1f} at the start"
    )


def spread(values: Sequence[float], unit: str = "", scale: float = 1.0) -> str:
    """Return median and range of measurements."""
    scaled = [v * scale for v in values]
    return f"{statistics.median(scaled):.3g} [{min(scaled):.3g}..{max(scaled):.3g}] {unit}".strip()


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table."""
    made = Table(title=title, title_justify="left")
    for number, column in enumerate(columns):
        made.add_column(column, justify="left" if number == 0 else "right")
    for row in rows:
        made.add_row(*row)
    console.print(made)


def resident_bytes(pid: int) -> int:
    """Return the memory of a process besides what it maps of shared memory and files, in bytes."""
    info = psutil.Process(pid).memory_info()
    return int(info.rss - info.shared)
