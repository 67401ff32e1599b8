"""The command ``links``: what the network between host and storage nodes can do."""

from __future__ import annotations

import click

from fastcheck_dask.cli.arguments import checked_scheduler
from fastcheck_dask.cli.command import Command


@click.command(cls=Command)
@click.option("--scheduler", callback=checked_scheduler, help="Dask scheduler of the storage nodes.")
@click.option("--coordinator", help="Their coordinator; asked from the scheduler unless given.")
def links(scheduler: str | None, coordinator: str | None) -> None:
    """Measure the links between this machine and the storage nodes, and say how many data shards fit them.

    Run it on the training host. It sends for about two seconds to each node; checkpoints are not touched.
    """
    from rich.console import Console

    from fastcheck_dask.manager import links_report

    if coordinator is None and scheduler is None:
        raise click.UsageError("--scheduler or --coordinator is needed")
    links_report.run(Console(), scheduler=scheduler, coordinator=coordinator)
