"""The commands ``ls`` and ``inspect``: what is there, without reading data."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import click

from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import opened, opened_checkpoint, rank_option
from fastcheck_dask.cli.output import emit, json_option, moment, size, table

if TYPE_CHECKING:
    from rich.console import Console

    from fastcheck_dask.inspection import Checkpoint
    from fastcheck_dask.inspection.overview import Overview


@click.command(cls=Command)
@click.argument("url")
@json_option
@click.pass_context
def ls(ctx: click.Context, url: str, *, as_json: bool) -> None:
    """List the checkpoints at URL, a folder or s3://bucket/folder, oldest first.

    Of several ranks, one line for each checkpoint of all. Damaged markers and what unfinished saves left are
    shown as such. Exit status 1 if a checkpoint is incomplete or a marker is damaged.
    """
    from fastcheck_dask.inspection.overview import overview

    folder, _ = opened(url)
    found = overview(folder)
    emit(found, as_json=as_json, show=lambda console: _show_overview(console, found))
    ctx.exit(0 if found.sound else 1)


def _show_overview(console: Console, found: Overview) -> None:
    if not found.checkpoints and not found.joint:
        console.print(f"{found.location} has no committed checkpoint", markup=False)
    if found.checkpoints:
        rows = table(">generation", "tag", ">step", "created (UTC)", ">arrays", ">raw", ">stored", "complete")
        for c in found.checkpoints:
            step, arrays = ("" if n is None else str(n) for n in (c.step, c.arrays))
            sizes = (size(c.raw_bytes), size(c.stored_bytes))
            older = [f"older:{name}" for name in c.older]
            state = " ".join(("yes" if c.complete else "NO", *c.flags, *older))
            rows.add_row(str(c.generation), c.tag, step, moment(c.created_unix), arrays, *sizes, state)
        console.print(rows)
    _show_joint(console, found)
    for c in found.checkpoints:
        if c.problem is not None:
            console.print(f"incomplete: {c.directory}: {c.problem}", markup=False)
    for marker in found.damaged:
        console.print(f"damaged marker: {marker.path}: {marker.reason}", markup=False)
    for leftover in found.leftovers:
        age = max(0.0, time.time() - leftover.modified_unix)
        console.print(
            f"{leftover.kind}: {leftover.name} ({size(leftover.nbytes)} in {leftover.objects} objects, last "
            f"written {age / 3600:.1f} h ago)",
            markup=False,
        )
    if found.leftovers:
        console.print("`fastcheck gc` removes what unfinished saves left", markup=False)


def _show_joint(console: Console, found: Overview) -> None:
    if found.joint:
        rows = table(">number", "tag", ">step", "created (UTC)", ">ranks", ">raw", ">stored", "complete")
        for c in found.joint:
            ranks = f"{len(c.there)}/{c.world_size}"
            state = " ".join(("yes" if c.complete else "NO", *c.flags))
            cells = (moment(c.created_unix), ranks, size(c.raw_bytes), size(c.stored_bytes), state)
            rows.add_row(str(c.number), c.tag, "" if c.step is None else str(c.step), *cells)
        console.print(rows)
    for c in found.joint:
        if c.problem is not None:
            console.print(f"incomplete: number {c.number} ({c.tag}): {c.problem}", markup=False)
    for name in found.unjoined:
        console.print(f"not of all ranks: {name}", markup=False)


@click.command(cls=Command)
@click.argument("url")
@click.argument("tag", required=False)
@rank_option
@json_option
def inspect(url: str, tag: str | None, *, rank: int | None, as_json: bool) -> None:
    """Show the tensors and values of a checkpoint (the newest, or TAG): names, shapes, dtypes, sizes.

    Nothing but the manifest and one listing is read.
    """
    checkpoint = opened_checkpoint(url, tag, rank=rank)
    described = _described(checkpoint)
    emit(described, as_json=as_json, show=lambda console: _show_checkpoint(console, checkpoint, described))


def _described(checkpoint: Checkpoint) -> dict[str, Any]:
    from fastcheck_dask.engine.tuning import kind_of

    arrays = []
    sources = {spec.path: spec.source for spec in checkpoint.manifest.arrays}
    for array in checkpoint.values():
        stored = array.stored_nbytes
        arrays.append(
            {
                "path": array.path,
                "dtype": array.dtype,
                "shape": list(array.shape),
                "nbytes": array.nbytes,
                "stored_nbytes": stored,
                "ratio": round(array.nbytes / stored, 4) if stored else None,
                "codec": array.codec,
                "kind": kind_of(array.path),
                "derived_from": sources.get(array.path),
            }
        )
    return {
        "tag": checkpoint.tag,
        "generation": checkpoint.generation,
        "run": checkpoint.run,
        "created_unix": checkpoint.created_unix,
        "nbytes": checkpoint.nbytes,
        "stored_nbytes": checkpoint.stored_nbytes,
        "nodes": list(checkpoint.manifest.nodes),
        "older": {name: asdict(group) for name, group in checkpoint.older.items()},
        "elsewhere": list(checkpoint.elsewhere),
        "arrays": arrays,
        "values": checkpoint.tree,
    }


def _show_checkpoint(console: Console, checkpoint: Checkpoint, described: dict[str, Any]) -> None:
    from rich.text import Text

    rows = table("tensor", "dtype", "shape", ">raw", ">stored", ">ratio", "codec", "kind")
    for a in described["arrays"]:
        ratio = "" if a["ratio"] is None else f"{a['ratio']:.3f}"
        codec = a["codec"] if a["derived_from"] is None else f"{a['codec']}, cast of {a['derived_from']}"
        shape = "x".join(map(str, a["shape"])) or "scalar"
        cells = (a["dtype"], shape, size(a["nbytes"]), size(a["stored_nbytes"]), ratio, codec, a["kind"])
        # A path may look like markup.
        rows.add_row(Text(a["path"]), *cells)
    console.print(rows)
    for path, value in described["values"].items():
        shown = repr(value)
        console.print(f"{path} = {shown if len(shown) < 100 else shown[:100] + '...'}", markup=False)
    for place in described["elsewhere"]:
        console.print(f"a part of it lies at {place}", markup=False)
    console.print(
        f"{checkpoint.tag}: generation {checkpoint.generation} of {checkpoint.run}, "
        f"{moment(checkpoint.created_unix)} UTC, {len(checkpoint)} tensors, {size(checkpoint.nbytes)} raw, "
        f"{size(checkpoint.stored_nbytes)} stored",
        markup=False,
    )
