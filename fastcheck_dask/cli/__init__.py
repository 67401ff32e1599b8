"""The commands ``fastcheck`` and ``dask fastcheck``.

Modules are imported inside the functions: help, completion and complaints about a wrong value shall not wait
for Dask, and `dask` itself loads this package whatever command is asked for.
"""

from __future__ import annotations

import click

from fastcheck_dask.cli import (
    compact,
    comparison,
    demo,
    doctor,
    exchange,
    links,
    listing,
    status,
    storage,
    tune,
    verification,
    zookeeper,
)
from fastcheck_dask.cli.command import Group
from fastcheck_dask.version import __version__


@click.group(cls=Group)
@click.version_option(__version__, prog_name="fastcheck")
def main() -> None:
    """Checkpoints in three tiers: shared memory, storage nodes with parity, object storage."""


main.add_command(comparison.bisect)
main.add_command(comparison.diff)
main.add_command(compact.compact)
main.add_command(demo.demo)
main.add_command(doctor.doctor)
main.add_command(exchange.export)
main.add_command(exchange.import_)
main.add_command(links.links)
main.add_command(listing.inspect)
main.add_command(listing.ls)
main.add_command(status.status)
main.add_command(storage.storage)
main.add_command(tune.tune)
main.add_command(verification.gc)
main.add_command(verification.verify)
main.add_command(zookeeper.zookeeper)


@click.group(name="fastcheck", cls=Group)
@click.version_option(__version__, prog_name="fastcheck")
def dask_group() -> None:
    """Checkpoints in the memory of storage nodes."""


dask_group.add_command(storage.storage)
