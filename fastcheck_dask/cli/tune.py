"""The command ``tune``: the codecs on your own checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fastcheck_dask.cli.arguments import checked_memory, checked_name
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
def tune(checkpoint_dir: Path, *, tag: str | None, plot: Path | None, sample: int) -> None:
    """Measure the codecs on your own checkpoint: ratio and speed by prefix bits, and as a delta.

    Only reads: a run that saves into the folder goes on undisturbed.
    """
    from rich.console import Console

    from fastcheck_dask.engine import tuning, tuning_report
    from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
    from fastcheck_dask.tiers.object_store import open_store

    draw = None if plot is None else _drawer()
    found = tuning.tune(CheckpointFolder(open_store(str(checkpoint_dir))), tag=tag, sample_bytes=sample)
    tuning_report.show(Console(), found)
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
