"""The command ``doctor``: what is wrong with an installation or a cluster, and what to do."""

from __future__ import annotations

import click

from fastcheck_dask.cli.arguments import checked_coordinator, checked_scheduler
from fastcheck_dask.cli.command import Command


@click.command(cls=Command)
@click.argument("checkpoint_dir", required=False)
@click.option(
    "--coordinator", callback=checked_coordinator, help="Its URL; asked from --scheduler unless given."
)
@click.option("--scheduler", callback=checked_scheduler, help="Dask scheduler of the storage nodes.")
@click.option("--links/--no-links", default=True, show_default=True, help="Measure the links to some nodes.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.pass_context
def doctor(
    ctx: click.Context,
    *,
    checkpoint_dir: str | None,
    coordinator: str | None,
    scheduler: str | None,
    links: bool,
    as_json: bool,
) -> None:
    """Check this installation, and the cluster as it is seen from here; say what to do about what is found.

    Run it where the training runs, as its user. Into CHECKPOINT_DIR one small object is written and deleted.
    Exit status 1 if there is a problem.
    """
    from rich.console import Console

    from fastcheck_dask.monitoring import doctor_command

    ctx.exit(
        doctor_command.run_doctor(
            Console(),
            checkpoint_dir=checkpoint_dir,
            coordinator=coordinator,
            scheduler=scheduler,
            links=links,
            as_json=as_json,
        )
    )
