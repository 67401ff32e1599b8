"""The command ``status``: storage nodes and runs, or what the coordinator knows of them."""

from __future__ import annotations

import click

from fastcheck_dask.cli.arguments import checked_coordinator, checked_scheduler
from fastcheck_dask.cli.command import Command, OneLineError
from fastcheck_dask.errors import FastCheckError


class _UnknownError(OneLineError):
    """How it stands cannot be told."""

    exit_code = 2


@click.command(cls=Command)
@click.option(
    "--coordinator", callback=checked_coordinator, help="Its URL; asked from --scheduler unless given."
)
@click.option("--scheduler", callback=checked_scheduler, help="Dask scheduler of the storage nodes.")
@click.option("--coordination", is_flag=True, help="Only what the coordinator knows; no node is asked.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
@click.option("--watch", is_flag=True, help="Again and again, until Ctrl-C.")
@click.pass_context
def status(
    ctx: click.Context,
    *,
    coordinator: str | None,
    scheduler: str | None,
    coordination: bool,
    as_json: bool,
    watch: bool,
) -> None:
    """Show the storage nodes, what they hold, the runs, whether each can be recovered now, and what died.

    Exit status 0 if every newest checkpoint is redundant, 1 if something is degraded, 2 if a newest
    checkpoint cannot be had from storage nodes or object tier, or this cannot be told. With --coordination
    0 if the coordinator answers, and 1 if not.
    """
    from rich.console import Console

    from fastcheck_dask.monitoring import command

    if as_json and watch:
        raise click.UsageError("--json and --watch do not go together")
    if coordination:
        if coordinator is None:
            raise click.UsageError("--coordination needs --coordinator")
        click.echo(command.coordination_text(coordinator, as_json=as_json))
        return
    try:
        ends = command.run_status(
            Console(), coordinator=coordinator, scheduler=scheduler, as_json=as_json, watch=watch
        )
    except FastCheckError as error:
        raise _UnknownError(str(error)) from error
    except KeyboardInterrupt:
        ends = 0
    ctx.exit(ends)
