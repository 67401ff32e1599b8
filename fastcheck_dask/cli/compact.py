"""The command ``compact``: checkpoints that are stored as deltas, made whole."""

from __future__ import annotations

import click

from fastcheck_dask.cli.arguments import checked_name, checked_scheduler
from fastcheck_dask.cli.command import Command


@click.command(cls=Command)
@click.argument("location")
@click.argument("tag", required=False, callback=checked_name)
@click.option("--all", "every", is_flag=True, help="All checkpoints.")
@click.option(
    "--scheduler", callback=checked_scheduler, help="Dask scheduler whose workers do it.  [default: threads]"
)
def compact(location: str, *, tag: str | None, every: bool, scheduler: str | None) -> None:
    """Make checkpoints that are stored as deltas whole, so that stock zarr opens them.

    A run that saves into the location goes on undisturbed. Can be repeated after it was interrupted.
    """
    from fastcheck_dask.engine.compact import compact as make_whole
    from fastcheck_dask.ids import normalised

    if (tag is None) != every:
        raise click.UsageError("give a TAG, or --all")
    for done in make_whole(normalised(location), tag=tag, scheduler=scheduler):
        click.echo(
            f"generation {done.generation} ({done.tag}): "
            + (f"{done.chunks} chunks, {done.written_bytes:,} bytes" if done.chunks else "is whole")
        )
