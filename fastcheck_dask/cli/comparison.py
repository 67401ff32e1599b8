"""The commands ``diff`` and ``bisect``: what changed, and when it went wrong."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import chosen, draw, drawer, opened_checkpoint, rank_option
from fastcheck_dask.cli.output import emit, json_option, progress, table

if TYPE_CHECKING:
    from rich.console import Console

    from fastcheck_dask.inspection.bisection import Bisected
    from fastcheck_dask.inspection.difference import Change, Difference

#: Names and values of each kind that are shown; `--json` has all.
_SHOWN = 40


@click.command(cls=Command)
@click.argument("arguments", nargs=-1, required=True, metavar="URL [A] [URL] [B]")
@click.option("--with", "other", help="The location of B, if it is another one.")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the changes, as a PNG."
)
@click.option("--exit-code", is_flag=True, help="Exit status 1 if the two differ.")
@rank_option
@json_option
@click.pass_context
def diff(
    ctx: click.Context,
    arguments: tuple[str, ...],
    *,
    other: str | None,
    plot: Path | None,
    exit_code: bool,
    rank: int | None,
    as_json: bool,
) -> None:
    """Compare two checkpoints: which tensors changed, and by how much. Only chunks that differ are read.

    \b
    fastcheck diff URL A B              two tags of one location
    fastcheck diff URL_A URL_B          the newest of each, or the checkpoints that the URLs name
    fastcheck diff URL_A [A] URL_B [B]  with tags; URL_B then has a slash in it, which no tag has
    """  # noqa: D301
    from fastcheck_dask.inspection.difference import compare

    how = None if plot is None else drawer("fastcheck_dask.inspection.difference_plot")
    before, after = (opened_checkpoint(*one, rank=rank) for one in pair_of(arguments, other))
    with progress("comparing", after.nbytes) as advance:
        found = compare(before, after, advance=advance)
    emit(found, as_json=as_json, show=lambda console: _show_difference(console, found))
    if how is not None and plot is not None:
        draw(how, plot, found)
        click.echo(f"plot: {plot}", err=as_json)
    ctx.exit(1 if exit_code and not found.equal else 0)


def pair_of(
    arguments: Sequence[str], other: str | None = None
) -> tuple[tuple[str, str | None], tuple[str, str | None]]:
    """Return location and tag of the two checkpoints that the arguments of ``diff`` name.

    Raises
    ------
    click.UsageError
        If they name anything else than two.

    Examples
    --------
    >>> pair_of(["ckpts", "a", "b"])
    (('ckpts', 'a'), ('ckpts', 'b'))
    >>> pair_of(["ckpts", "a", "/other"])
    (('ckpts', 'a'), ('/other', None))
    """
    url, *rest = arguments
    if other is not None:
        if len(rest) == 2:
            return (url, rest[0]), (other, rest[1])
        raise click.UsageError("with --with, give URL A B: the location of A, and two tags")
    second = [number for number, text in enumerate(rest) if "/" in text]
    if not second and len(rest) == 2:
        return (url, rest[0]), (url, rest[1])
    # A relative name without a slash is taken for a location only where no tag can stand.
    at = second[0] if second else 0
    if len(rest) - at not in (1, 2) or at > 1 or len(second) > 1 or (not second and len(rest) != 1):
        raise click.UsageError(
            "two checkpoints are wanted: URL A B, or URL_A [A] URL_B [B]; write ./name for a folder beside "
            f"tags; got {' '.join(arguments)}"
        )
    before, after = rest[:at], rest[at + 1 :]
    return (url, before[0] if before else None), (rest[at], after[0] if after else None)


def _show_difference(console: Console, found: Difference) -> None:
    from rich.text import Text

    if found.changed:
        rows = table("tensor", "dtype", ">changed", ">max abs", ">relative L2", ">NaN", ">Inf")
        for c in found.changed[:_SHOWN]:
            rows.add_row(Text(c.path), c.dtype, f"{100 * c.changed_share:.2f} %", *_figures(c))
        console.print(rows)
    _more(console, len(found.changed))
    lines = {
        "new": found.new,
        "removed": found.removed,
        "other form": [f"{path}: {what}" for path, what in found.other_form.items()],
        "value": [f"{path}: {old!r} became {new!r}"[:200] for path, (old, new) in found.values.items()],
    }
    for kind, items in lines.items():
        for item in items[:_SHOWN]:
            console.print(f"{kind}: {item}", markup=False)
        _more(console, len(items))
    console.print(
        f"{len(found.changed)} tensors changed, {len(found.unchanged)} did not, {len(found.new)} are new, "
        f"{len(found.removed)} were removed, {len(found.other_form)} have another form; "
        f"{len(found.values)} values differ",
        markup=False,
    )


def _figures(c: Change) -> tuple[str, str, str, str]:
    if c.relative_l2 is None:
        return "", "", "", ""
    nan, inf = (f"{old} -> {new}" if old or new else "" for old, new in (c.nan, c.inf))
    return f"{c.max_abs:.4g}", f"{c.relative_l2:.4g}", nan, inf


def _more(console: Console, count: int) -> None:
    if count > _SHOWN:
        console.print(f"... and {count - _SHOWN} more (--json names all)", markup=False)


@click.command(cls=Command)
@click.argument("url")
@click.argument("tensor", required=False)
@click.option(
    "--jump",
    type=click.FloatRange(min=0, min_open=True),
    help="Also a relative L2 change to the checkpoint before that is larger than this.",
)
@rank_option
@json_option
@click.pass_context
def bisect(
    ctx: click.Context,
    url: str,
    tensor: str | None,
    *,
    jump: float | None,
    rank: int | None,
    as_json: bool,
) -> None:
    """Find the first checkpoint in which TENSOR (or any) has a NaN or an infinity, or has jumped.

    Exit status 1 if there is one, or if a checkpoint could not be read.
    """
    from fastcheck_dask.inspection.bisection import first_bad

    folder, markers, _ = chosen(url, None, rank=rank)
    with progress("searching", len(markers)) as advance:
        found = first_bad(folder, markers, tensor, jump=jump, advance=advance)
    emit(found, as_json=as_json, show=lambda console: _show_bisected(console, found))
    ctx.exit(1 if found.findings or found.unreadable else 0)


def _show_bisected(console: Console, found: Bisected) -> None:
    for reason in found.unreadable:
        console.print(f"passed over: {reason}", markup=False)
    for f in found.findings[:_SHOWN]:
        jumped = "" if f.jump is None else f", changed by {f.jump:.4g} of its length"
        console.print(f"{f.path}: {f.nan} NaN, {f.inf} infinite{jumped}", markup=False)
    _more(console, len(found.findings))
    if found.findings:
        first = found.findings[0]
        before = f"the last one before is {found.last_good}" if found.last_good else "it is the oldest"
        console.print(f"first in {first.tag} (generation {first.generation}); {before}", markup=False)
    else:
        console.print(f"nothing found in {len(found.searched)} checkpoints", markup=False)
