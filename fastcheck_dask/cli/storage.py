"""The command ``storage``: run a storage node."""

from __future__ import annotations

import os
import re
import socket

import click

from fastcheck_dask.cli.arguments import (
    checked_coordinator,
    checked_memory,
    checked_name,
    checked_scheduler,
    checked_seconds,
)
from fastcheck_dask.cli.command import Command
from fastcheck_dask.errors import ConfigError


def default_node_name() -> str:
    """Return a name that no other live node has: host and process id."""
    host = re.sub(r"[^A-Za-z0-9._=+-]", "-", socket.gethostname()).lstrip("._=+-")[:100]
    return f"{host or 'node'}-{os.getpid()}"


@click.command(cls=Command)
@click.option(
    "--scheduler", callback=checked_scheduler, help="Dask scheduler (tcp://host:8786); it may come later."
)
@click.option(
    "--coordinator",
    required=True,
    callback=checked_coordinator,
    help="sqlite:///path/coord.db for one machine, zk://host:port/root for a cluster.",
)
@click.option(
    "--memory",
    default="50%",
    show_default=True,
    callback=checked_memory,
    help="What checkpoints may take: a size (2GiB), or a share of the machine or container (50%, 0.5).",
)
@click.option(
    "--ring",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Older generations of each run that stay in memory while there is room; 0 for none.",
)
@click.option(
    "--drain-timeout",
    default="30 s",
    show_default=True,
    callback=checked_seconds,
    help="How long a node that is asked to end (SIGTERM) waits until others have its shards; a second "
    "SIGTERM ends it at once.",
)
@click.option("--name", callback=checked_name, help="Name of the node.  [default: host and process id]")
@click.option("--rack", default="default", show_default=True, callback=checked_name, help="Its rack.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Data port; 0 for any."
)
@click.option(
    "--metrics-port", type=click.IntRange(0, 65535), help="Serve metrics for Prometheus there; 0 for any."
)
@click.option("--scrub-every", help="Between two passes over all that the node stores: '10 minutes', never.")
@click.option("--scrub-rate", help="How fast they read: '64 MiB' a second.")
@click.option(
    "--drill-every", help="Between two restore drills of a run while this node is master: '1 h', never."
)
@click.option("--drill-rate", help="How fast they read: '64 MiB' a second.")
@click.option("--repair-every", help="How often the master looks for what is to be repaired: '2 s'.")
@click.option("--repair-rate", help="What a repair brings to a node: '100 MB' a second, none for no limit.")
@click.option("--sweep-every", help="How often the master looks for leases that have ended: '5 s'.")
@click.option("--insecure", is_flag=True, help="Listen on other than loopback: the network is trusted.")
def storage(
    scheduler: str | None,
    *,
    coordinator: str,
    memory: int,
    ring: int,
    drain_timeout: float,
    name: str | None,
    rack: str,
    host: str,
    port: int,
    metrics_port: int | None,
    insecure: bool,
    **rates: str | None,
) -> None:
    """Run a storage node until SIGTERM or Ctrl-C.

    What is not given of its background work (--scrub-every and the options after it) is as configured
    (fastcheck.storage).
    """
    from fastcheck_dask.master.storage_node import master_of_nodes
    from fastcheck_dask.node.background import background
    from fastcheck_dask.node.process import run_storage
    from fastcheck_dask.tiers.wire import listen_address

    try:
        listen_address(host, port, insecure=insecure)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--host") from error
    given = {name: value for name, value in rates.items() if value is not None}
    try:
        background(**given)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    run_storage(
        scheduler,
        coordinator,
        memory_bytes=memory,
        ring=ring,
        drain_seconds=drain_timeout,
        name=name or default_node_name(),
        rack=rack,
        host=host,
        port=port,
        metrics_port=metrics_port,
        insecure=insecure,
        service_of=master_of_nodes,
        **given,
    )
