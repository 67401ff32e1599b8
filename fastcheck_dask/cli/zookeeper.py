"""The commands ``zookeeper``: servers on this machine, and their access."""

from __future__ import annotations

from pathlib import Path

import click

from fastcheck_dask.cli.arguments import checked_coordinator
from fastcheck_dask.cli.command import Group


@click.group(cls=Group)
def zookeeper() -> None:
    """Run ZooKeeper on this machine, for trying out and for tests."""


@zookeeper.command(name="start")
@click.option("--nodes", type=click.IntRange(1, 9), default=1, show_default=True, help="Number of servers.")
@click.option(
    "--dir",
    "directory",
    type=click.Path(file_okay=False, path_type=Path),
    help="Keep the data there.  [default: a temporary folder]",
)
@click.option(
    "--port",
    type=click.IntRange(0, 65500),
    default=0,
    show_default=True,
    help="Of the first server, the others have the following ones; 0 for any.",
)
@click.option(
    "--tick-ms",
    type=click.IntRange(50, 10_000),
    default=500,
    show_default=True,
    help="ZooKeeper's tick: a session lasts at least two.",
)
def zookeeper_start(*, nodes: int, directory: Path | None, port: int, tick_ms: int) -> None:
    """Run ZooKeeper on loopback until Ctrl-C, and print its zk:// URL when it is ready.

    It needs Java and ZooKeeper, whose servers end with this command however it ends. Not for production:
    all servers are on one machine, and whoever is on it can read and write.
    """
    from fastcheck_dask.coordination.zookeeper.command import run_zookeeper

    run_zookeeper(directory, nodes=nodes, port=port, tick_milliseconds=tick_ms, say=click.echo)


@zookeeper.command(name="protect")
@click.option("--coordinator", required=True, callback=checked_coordinator, help="zk://host:port/root")
def zookeeper_protect(coordinator: str) -> None:
    """Give all znodes of a root to the configured credentials, after they were made without.

    End first what uses the root: what is made meanwhile without credentials stays open.
    """
    from fastcheck_dask.coordination.connect import zookeeper_place
    from fastcheck_dask.coordination.zookeeper.protect import protect

    hosts, root = zookeeper_place(coordinator)
    click.echo(f"{protect(hosts, root)} znodes under {root} are protected")
