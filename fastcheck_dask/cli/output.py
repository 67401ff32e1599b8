"""What commands print: tables for people, one JSON document for programs, progress where somebody looks."""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

json_option = click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")


def emit(result: Any, *, as_json: bool, show: Callable[[Console], None]) -> None:
    """Print a result: as JSON, or as `show` prints it."""
    if as_json:
        click.echo(json.dumps(plain(result), indent=2, allow_nan=False, ensure_ascii=False))
        return
    from rich.console import Console

    # Beyond a terminal's width nothing is cut: a file or a pipe has none.
    show(Console(width=None if sys.stdout.isatty() else 200, highlight=False))


def plain(value: Any) -> Any:
    """Turn a result into what JSON can say; properties of dataclasses are fields, too.

    >>> plain((1.5, float("nan"), {"a": 2**70}))
    [1.5, 'nan', {'a': 1180591620717411303424}]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [f.name for f in dataclasses.fields(value)]
        names += [n for n, found in vars(type(value)).items() if isinstance(found, property)]
        return {name: plain(getattr(value, name)) for name in names}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return plain(value._asdict())
    if isinstance(value, Mapping):
        return {str(key): plain(inner) for key, inner in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes):
        return [plain(inner) for inner in value]
    if isinstance(value, str):
        return str(value)
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    return value if value is None or isinstance(value, bool | int) else repr(value)


@contextmanager
def progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """Show a bar on a terminal while the block runs; give the function that moves it on."""
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    from rich.console import Console
    from rich.progress import Progress

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda step: bar.advance(task, step)


def table(*columns: str, title: str | None = None) -> Table:
    """Return an empty table; columns whose names begin with ``>`` are numbers."""
    from rich.box import SIMPLE_HEAD
    from rich.table import Table

    made = Table(box=SIMPLE_HEAD, title=title, title_justify="left")
    for column in columns:
        made.add_column(
            column.removeprefix(">"),
            justify="right" if column.startswith(">") else "left",
            overflow="fold",
        )
    return made


def size(nbytes: int) -> str:
    """Return bytes for people.

    >>> size(999), size(1234567), size(5 * 10**12)
    ('999 B', '1.23 MB', '5.00 TB')
    """
    amount, unit = float(nbytes), "B"
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if amount < 1000 or unit == "TB":
            break
        amount /= 1000
    return f"{nbytes} B" if unit == "B" else f"{amount:.2f} {unit}"


def moment(unix: float) -> str:
    """Return a time for people, in UTC."""
    try:
        return f"{datetime.datetime.fromtimestamp(unix, datetime.UTC):%Y-%m-%d %H:%M:%S}"
    except (OverflowError, ValueError, OSError):
        return f"{unix:g} s"
