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


#: The options that name files, and the configuration that they stand for. A node is also a client of Dask.
_TLS_FILES = {
    "data_tls_ca": ("fastcheck.data.tls-ca",),
    "data_tls_cert": ("fastcheck.data.tls-cert",),
    "data_tls_key": ("fastcheck.data.tls-key",),
    "tls_ca_file": ("distributed.comm.tls.ca-file",),
    "tls_cert": ("distributed.comm.tls.worker.cert", "distributed.comm.tls.client.cert"),
    "tls_key": ("distributed.comm.tls.worker.key", "distributed.comm.tls.client.key"),
}


def _tls_files(options: dict[str, str], scheduler: str | None) -> dict[str, str]:
    """Take the files for TLS out of the options; return them as configuration."""
    files = {option: options.pop(option) for option in _TLS_FILES if option in options}
    if any(option.startswith("tls_") for option in files) and not (scheduler or "").startswith("tls://"):
        raise click.UsageError(
            "--tls-ca-file, --tls-cert and --tls-key are for a scheduler at tls://; the data port takes "
            "--data-tls-ca, --data-tls-cert and --data-tls-key"
        )
    return {name: file for option, file in files.items() for name in _TLS_FILES[option]}


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
@click.option("--data-tls-ca", help="TLS of the data port: file with the CA whose members are let in.")
@click.option("--data-tls-cert", help="File with the node's own certificate of that CA.")
@click.option("--data-tls-key", help="File with its key, not encrypted.")
@click.option("--tls-ca-file", help="TLS to a scheduler at tls://, as for `dask worker`: file with the CA.")
@click.option("--tls-cert", help="File with the certificate of the Dask worker.")
@click.option("--tls-key", help="File with its key.")
@click.option(
    "--insecure",
    is_flag=True,
    help="Listen on other than loopback without TLS of data port and scheduler: the network is trusted.",
)
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
    **options: str | None,
) -> None:
    """Run a storage node until SIGTERM or Ctrl-C.

    What is not given of its background work (--scrub-every and the options after it) is as configured
    (fastcheck.storage), and so are the files for TLS (fastcheck.data, distributed.comm.tls).
    """
    import dask

    from fastcheck_dask.config import settings
    from fastcheck_dask.master.storage_node import master_of_nodes
    from fastcheck_dask.node.background import background
    from fastcheck_dask.node.control import check_worker
    from fastcheck_dask.node.process import run_storage
    from fastcheck_dask.tiers.wire import listen_address
    from fastcheck_dask.tiers.wire_tls import DataTls

    given = {name: value for name, value in options.items() if value is not None}
    config = _tls_files(given, scheduler)
    try:
        with dask.config.set(config):
            tls = DataTls.of(settings())
    except ConfigError as error:
        raise click.UsageError(str(error)) from error
    try:
        listen_address(host, port, insecure=insecure, tls=tls is not None)
        check_worker(scheduler, host, insecure=insecure)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--host") from error
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
        config=config,
        **given,
    )
