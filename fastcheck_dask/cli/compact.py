"""The command ``compact``: checkpoints that are stored as deltas, made whole."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from fastcheck_dask.cli.arguments import checked_name, checked_scheduler
from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import opened
from fastcheck_dask.cli.output import emit, json_option, progress

if TYPE_CHECKING:
    from fastcheck_dask.inspection.compaction import CompactedPart


@click.command(cls=Command)
@click.argument("location")
@click.argument("tag", required=False, callback=checked_name)
@click.option("--all", "every", is_flag=True, help="All checkpoints.")
@click.option(
    "--scheduler", callback=checked_scheduler, help="Dask scheduler whose workers do it.  [default: threads]"
)
@json_option
def compact(location: str, *, tag: str | None, every: bool, scheduler: str | None, as_json: bool) -> None:
    """Make checkpoints that are stored as deltas whole, so that stock zarr opens them.

    Of several ranks, the parts of all. A run that saves into the location goes on undisturbed. Can be
    repeated after it was interrupted.
    """
    from fastcheck_dask.inspection.compaction import compact_parts, parts_to_compact

    folder, directory = opened(location)
    if every == (tag is not None or directory is not None):
        raise click.UsageError("give a TAG, or --all")
    parts = parts_to_compact(folder, tag, directory=directory)
    found = []
    with progress("compacting", sum(part.marker.raw_bytes for part in parts)) as advance:
        for done in compact_parts(parts, scheduler=scheduler):
            found.append(done)
            advance(done.raw_bytes)
            if not as_json:
                click.echo(_line(done))
    if as_json:
        document = {"location": folder.store.location, "checkpoints": found}
        emit(document, as_json=True, show=lambda _: None)


def _line(done: CompactedPart) -> str:
    whose = "" if done.rank is None else f"rank {done.rank}, "
    what = f"{done.chunks} chunks, {done.written_bytes:,} bytes" if done.chunks else "is whole"
    return f"{whose}generation {done.generation} ({done.tag}): {what}"
