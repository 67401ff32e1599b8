"""The command ``tune``: the codecs on your own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcheck_dask.cli.arguments import checked_memory, checked_name, checked_scheduler
from fastcheck_dask.cli.command import Command
from fastcheck_dask.cli.location import opened, rank_option
from fastcheck_dask.errors import ConfigError

if TYPE_CHECKING:
    from fastcheck_dask.engine.tuning import Tuning
    from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder


@click.command(cls=Command)
@click.argument("url")
@click.option("--tag", callback=checked_name, help="Which checkpoint.  [default: the newest]")
@rank_option
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the curves into this PNG."
)
@click.option(
    "--sample",
    default="64MiB",
    show_default=True,
    callback=checked_memory,
    help="How much of the checkpoint is measured, spread over its tensors.",
)
@click.option(
    "--scheduler", callback=checked_scheduler, help="Also measure the links to the storage nodes of it."
)
@click.option("--coordinator", help="The same, of this coordinator.")
def tune(
    url: str,
    *,
    tag: str | None,
    rank: int | None,
    plot: Path | None,
    sample: int,
    scheduler: str | None,
    coordinator: str | None,
) -> None:
    """Measure the codecs on your own checkpoint: ratio and speed by prefix bits, and as a delta.

    Only reads: a run that saves there goes on undisturbed. Of several ranks, the part of one is measured, of
    rank 0 unless --rank is given. With storage nodes (--scheduler or
    --coordinator) it also measures the links to them, and says how many data shards and encoders fit.
    """
    from rich.console import Console

    from fastcheck_dask.engine import tuning, tuning_report
    from fastcheck_dask.manager import links_report

    draw = None if plot is None else _drawer()
    folder, tag, of = _folder(url, tag, rank)
    found = tuning.tune(folder, tag=tag, sample_bytes=sample)
    console = Console()
    if of is not None:
        console.print(of, highlight=False)
    tuning_report.show(console, found)
    if scheduler is not None or coordinator is not None:
        links_report.run(console, scheduler=scheduler, coordinator=coordinator, tuning=found)
    if draw is not None and plot is not None:
        try:
            draw(plot, found)
        except OSError as error:
            raise ConfigError(f"the plot cannot be written: {error}") from error
        click.echo(f"plot: {plot}")


def _folder(url: str, tag: str | None, rank: int | None) -> tuple[CheckpointFolder, str | None, str | None]:
    """Return where the checkpoint lies, its tag, and of several ranks a line that says whose part it is."""
    from fastcheck_dask.inspection.ranks import newest_joint, rank_folder, survey_ranks

    folder, directory = opened(url)
    if directory is not None:
        raise click.UsageError(f"{url} is one checkpoint; give its location, and --tag")
    if rank is None:
        own = [marker.created_unix for marker in folder.committed() if tag in (None, marker.tag)]
        ranks = survey_ranks(folder, folder.store.list(""))
        if newest_joint(ranks, tag, after_unix=max(own, default=float("-inf"))) is None:
            return folder, tag, None
    try:
        part, committed = rank_folder(folder, rank or 0)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    # What a rank saved alone is no checkpoint.
    found = [marker.tag for marker in committed if tag in (None, marker.tag)]
    more = " (--rank takes another)" if rank is None else ""
    return part, found[-1] if found else tag, f"The part of rank {rank or 0}{more}:"


def _drawer() -> Callable[[Path, Tuning], None]:
    """Return what draws the plot, or say what is missing before anything is measured."""
    try:
        from fastcheck_dask.engine.tuning_plot import draw
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    return draw
