"""The command ``status``: what the coordinator knows."""

from __future__ import annotations

import json

import click

from fastcheck_dask.cli.arguments import checked_coordinator
from fastcheck_dask.cli.command import Command
from fastcheck_dask.errors import ConfigError


@click.command(cls=Command)
@click.option("--coordination", is_flag=True, required=True, help="What the coordinator knows.")
@click.option("--coordinator", required=True, callback=checked_coordinator, help="Its URL.")
@click.option("--json", "as_json", is_flag=True, help="For scripts.")
def status(*, coordination: bool, coordinator: str, as_json: bool) -> None:
    """Show the connection with the coordinator, the master, the storage nodes, and the runs.

    Exit status 1 if the coordinator cannot be reached or does not let us in; 2 for a wrong value.
    """
    from contextlib import closing

    from fastcheck_dask.config import settings
    from fastcheck_dask.coordination.access import Access
    from fastcheck_dask.coordination.connect import connect, sqlite_path
    from fastcheck_dask.coordination.status import gather, lines

    assert coordination, "there is nothing else to show yet"
    if coordinator.startswith("sqlite:") and not sqlite_path(coordinator).exists():
        # Connecting would make it.
        raise ConfigError(f"there is no coordinator file {sqlite_path(coordinator)}")
    found = settings()
    times = {"timeout_seconds": found.coordinator_seconds, "session_seconds": found.session_seconds}
    with closing(connect(coordinator, access=Access.of(found), **times)) as connection:
        told = gather(connection)
    click.echo(json.dumps(told.to_dict(), indent=2) if as_json else "\n".join(lines(told)))
