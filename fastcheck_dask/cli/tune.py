"""The command ``tune``: the codecs on your own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcheck_dask.cli.arguments import checked_memory, checked_name, checked_scheduler
from fastcheck_dask.cli.command import Command
from fastcheck_dask.errors import ConfigError

if TYPE_CHECKING:
    from fastcheck_dask.engine.tuning import Tuning


@click.command(cls=Command)
@click.argument("checkpoint_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tag", callback=checked_name, help="Which checkpoint.  [default: the newest]")
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
    checkpoint_dir: Path,
    *,
    tag: str | None,
    plot: Path | None,
    sample: int,
    scheduler: str | None,
    coordinator: str | None,
) -> None:
    """Measure the codecs on your own checkpoint: ratio and speed by prefix bits, and as a delta.

    Only reads: a run that saves into the folder goes on undisturbed. With storage nodes (--scheduler or
    --coordinator) it also measures the links to them, and says how many data shards and encoders fit.
    """
    from rich.console import Console

    from fastcheck_dask.engine import tuning, tuning_report
    from fastcheck_dask.manager import links_report
    from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
    from fastcheck_dask.tiers.object_store import open_store

    draw = None if plot is None else _drawer()
    found = tuning.tune(CheckpointFolder(open_store(str(checkpoint_dir))), tag=tag, sample_bytes=sample)
    console = Console()
    tuning_report.show(console, found)
    if scheduler is not None or coordinator is not None:
        links_report.run(console, scheduler=scheduler, coordinator=coordinator, tuning=found)
    if draw is not None and plot is not None:
        try:
            draw(plot, found)
        except OSError as error:
            raise ConfigError(f"the plot cannot be written: {error}") from error
        click.echo(f"plot: {plot}")


def _drawer() -> Callable[[Path, Tuning], None]:
    """Return what draws the plot, or say what is missing before anything is measured."""
    try:
        from fastcheck_dask.engine.tuning_plot import draw
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    return draw
