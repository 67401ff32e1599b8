"""The commands ``fastcheck`` and ``dask fastcheck``.

Modules are imported inside the functions: help, completion and complaints about a wrong value shall not wait
for Dask, and `dask` itself loads this module whatever command is asked for.
"""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcheck_dask.errors import ConfigError, FastCheckError
from fastcheck_dask.version import __version__

if TYPE_CHECKING:
    from fastcheck_dask.engine.tuning import Tuning

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%\Z")
_SHARE = re.compile(r"\d*\.\d+\Z")


class _OneLineError(click.ClickException):
    """An error that is shown as one line."""

    def __init__(self, message: str) -> None:
        super().__init__(" ".join(message.split()))


class _WrongValueError(_OneLineError):
    """An option has a value that it cannot have."""

    exit_code = 2


class _Command(click.Command):
    """Says in one line what is wrong: exit status 2 for a value, 1 for an error of FastCheck."""

    def make_context(
        self, info_name: str | None, args: list[str], parent: click.Context | None = None, **extra: Any
    ) -> click.Context:
        """Parse the arguments."""
        try:
            return super().make_context(info_name, args, parent=parent, **extra)
        except click.UsageError as error:
            raise _WrongValueError(error.format_message()) from error

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        try:
            return super().invoke(ctx)
        except click.UsageError as error:
            raise _WrongValueError(error.format_message()) from error
        except FastCheckError as error:
            raise _OneLineError(str(error)) from error


class _Group(click.Group):
    """A group of such commands."""

    command_class = _Command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command; an unknown one is named in one line."""
        try:
            return super().resolve_command(ctx, args)
        except click.UsageError as error:
            raise _WrongValueError(error.format_message()) from error


def _checked_name(_ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    from fastcheck_dask.ids import check_name

    if value is None:
        return None
    try:
        return check_name(value, f"--{parameter.name}")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def _checked_coordinator(_ctx: click.Context, _parameter: click.Parameter, value: str) -> str:
    from fastcheck_dask.coordination.connect import sqlite_path, zookeeper_place

    try:
        if value.startswith("sqlite:"):
            sqlite_path(value)
        else:
            zookeeper_place(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return value


def _checked_scheduler(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    if value is not None and not re.match(r"(tcp|tls|ws|wss|ucx|inproc)://.+|[^/:]+:\d+\Z", value):
        raise click.BadParameter(f"an address like tcp://host:8786 is wanted; got {value!r}")
    return value


def _checked_memory(_ctx: click.Context, _parameter: click.Parameter, value: str) -> int:
    try:
        return parse_memory(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def parse_memory(text: str) -> int:
    """Return a number of bytes.

    Parameters
    ----------
    text : str
        A size (``"2GiB"``), or a share of what this machine or its container may use (``"50%"``, ``"0.5"``).

    Raises
    ------
    ConfigError
        If it is neither, or less than one byte, or a share above 100 %.
    """
    from dask.utils import parse_bytes

    text = text.strip()
    percent = _PERCENT.match(text)
    if percent is not None or _SHARE.match(text):
        from fastcheck_dask.node.machine import memory_limit_bytes

        share = float(percent[1]) / 100 if percent is not None else float(text)
        if not 0 < share <= 1:
            raise ConfigError(f"a share of the memory is more than 0% and at most 100%; got {text!r}")
        return max(1, int(memory_limit_bytes() * share))
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"a size like 2GiB or a share like 50% is wanted; got {text!r}") from error
    if size < 1:
        raise ConfigError(f"at least one byte is wanted; got {text!r}")
    return int(size)


def default_node_name() -> str:
    """Return a name that no other live node has: host and process id."""
    host = re.sub(r"[^A-Za-z0-9._=+-]", "-", socket.gethostname()).lstrip("._=+-")[:100]
    return f"{host or 'node'}-{os.getpid()}"


@click.command(cls=_Command)
@click.option(
    "--scheduler", callback=_checked_scheduler, help="Dask scheduler (tcp://host:8786); it may come later."
)
@click.option(
    "--coordinator",
    required=True,
    callback=_checked_coordinator,
    help="sqlite:///path/coord.db for one machine, zk://host:port/root for a cluster.",
)
@click.option(
    "--memory",
    default="50%",
    show_default=True,
    callback=_checked_memory,
    help="What checkpoints may take: a size (2GiB), or a share of the machine or container (50%, 0.5).",
)
@click.option(
    "--ring",
    type=click.IntRange(min=0),
    default=2,
    show_default=True,
    help="Older generations of each run that stay in memory while there is room; 0 for none.",
)
@click.option("--name", callback=_checked_name, help="Name of the node.  [default: host and process id]")
@click.option("--rack", default="default", show_default=True, callback=_checked_name, help="Its rack.")
@click.option("--host", default="127.0.0.1", show_default=True, help="Where to listen.")
@click.option(
    "--port", type=click.IntRange(0, 65535), default=0, show_default=True, help="Data port; 0 for any."
)
@click.option("--insecure", is_flag=True, help="Listen on other than loopback: the network is trusted.")
def storage(
    scheduler: str | None,
    *,
    coordinator: str,
    memory: int,
    ring: int,
    name: str | None,
    rack: str,
    host: str,
    port: int,
    insecure: bool,
) -> None:
    """Run a storage node until SIGTERM or Ctrl-C."""
    from fastcheck_dask.master.storage_node import master_of_nodes
    from fastcheck_dask.node.process import run_storage
    from fastcheck_dask.tiers.wire import listen_address

    try:
        listen_address(host, port, insecure=insecure)
    except ConfigError as error:
        raise click.BadParameter(str(error), param_hint="--host") from error
    run_storage(
        scheduler,
        coordinator,
        memory_bytes=memory,
        ring=ring,
        name=name or default_node_name(),
        rack=rack,
        host=host,
        port=port,
        insecure=insecure,
        service_of=master_of_nodes,
    )


@click.command(cls=_Command)
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


@click.command(cls=_Command)
@click.argument("checkpoint_dir", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--tag", callback=_checked_name, help="Which checkpoint.  [default: the newest]")
@click.option(
    "--plot", type=click.Path(dir_okay=False, path_type=Path), help="Also draw the curves into this PNG."
)
@click.option(
    "--sample",
    default="64MiB",
    show_default=True,
    callback=_checked_memory,
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


@click.command(cls=_Command)
@click.option("--scheduler", callback=_checked_scheduler, help="Dask scheduler of the storage nodes.")
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


def _drawer() -> Callable[[Path, Tuning], None]:
    """Return what draws the plot, or say what is missing before anything is measured."""
    try:
        from fastcheck_dask.engine.tuning_plot import draw
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error
    return draw


@click.command(cls=_Command)
@click.option("--coordination", is_flag=True, required=True, help="What the coordinator knows.")
@click.option("--coordinator", required=True, callback=_checked_coordinator, help="Its URL.")
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


@click.group(cls=_Group)
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
@click.option("--coordinator", required=True, callback=_checked_coordinator, help="zk://host:port/root")
def zookeeper_protect(coordinator: str) -> None:
    """Give all znodes of a root to the configured credentials, after they were made without.

    End first what uses the root: what is made meanwhile without credentials stays open.
    """
    from fastcheck_dask.coordination.connect import zookeeper_place
    from fastcheck_dask.coordination.zookeeper.protect import protect

    hosts, root = zookeeper_place(coordinator)
    click.echo(f"{protect(hosts, root)} znodes under {root} are protected")


@click.group(cls=_Group)
@click.version_option(__version__, prog_name="fastcheck")
def main() -> None:
    """Checkpoints in three tiers: shared memory, storage nodes with parity, object storage."""


main.add_command(demo)
main.add_command(links)
main.add_command(status)
main.add_command(storage)
main.add_command(tune)
main.add_command(zookeeper)


@click.group(name="fastcheck", cls=_Group)
@click.version_option(__version__, prog_name="fastcheck")
def dask_group() -> None:
    """Checkpoints in the memory of storage nodes."""


dask_group.add_command(storage)


if __name__ == "__main__":
    main(prog_name="fastcheck")
