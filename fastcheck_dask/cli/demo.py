"""The command ``demo``: the whole story on one machine."""

from __future__ import annotations

from pathlib import Path

import click

from fastcheck_dask.cli.command import Command


@click.command(cls=Command)
@click.option(
    "--out",
    type=click.Path(file_okay=False, path_type=Path),
    default=Path("fastcheck-demo"),
    show_default=True,
    help="Folder for the plot, the summary and, with --keep, the checkpoints.",
)
@click.option("--seed", type=click.IntRange(0, 2**31), default=0, show_default=True, help="Of the trainings.")
@click.option("--keep", is_flag=True, help="Keep the checkpoints and the logs.")
@click.option("--quick", is_flag=True, help="Small networks and few steps.")
@click.pass_context
def demo(ctx: click.Context, *, out: Path, seed: int, keep: bool, quick: bool) -> None:
    """Train two networks, kill their machines, recover, and compare bit for bit.

    Runs a Dask scheduler, five storage nodes and the trainings on this machine. Exit status 1 if the runs
    with failures do not end exactly as those without.
    """
    from fastcheck_dask.demo.command import run_demo

    ctx.exit(0 if run_demo(out, seed=seed, keep=keep, quick=quick) else 1)
