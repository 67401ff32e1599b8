"""What ``fastcheck status`` does."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager

from rich.console import Console
from rich.live import Live
from rich.text import Text

from fastcheck_dask.config import Settings, settings
from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.connect import connect, sqlite_path
from fastcheck_dask.coordination.status import gather, lines
from fastcheck_dask.errors import ConfigError, CoordinationError
from fastcheck_dask.manager.scheduler import coordinator_of_nodes
from fastcheck_dask.monitoring.cluster import look
from fastcheck_dask.monitoring.report import render
from fastcheck_dask.tiers.peer import clients_for

#: Between two looks of ``--watch``.
WATCH_SECONDS = 2.0


@contextmanager
def connection(url: str, found: Settings) -> Iterator[Coordinator]:
    """Connect with a coordinator that is there, and close; a file that is not there is not made.

    Raises
    ------
    ConfigError
        If there is no such file.
    CoordinationError
        If it cannot be reached.
    """
    if url.startswith("sqlite:") and not sqlite_path(url).exists():
        raise ConfigError(f"there is no coordinator file {sqlite_path(url)}")
    times = {"timeout_seconds": found.coordinator_seconds, "session_seconds": found.session_seconds}
    with closing(connect(url, access=Access.of(found), **times)) as coordinator:
        yield coordinator


def coordination_text(url: str, *, as_json: bool) -> str:
    """Return what the coordinator knows, for people or as JSON. Errors as with :func:`connection`."""
    with connection(url, settings()) as session:
        told = gather(session)
    return json.dumps(told.to_dict(), indent=2) if as_json else "\n".join(lines(told))


def run_status(
    console: Console,
    *,
    coordinator: str | None,
    scheduler: str | None,
    as_json: bool = False,
    watch: bool = False,
    stop: threading.Event | None = None,
) -> int:
    """Show nodes and runs, once or again and again until `stop` is set; return the exit status.

    Raises
    ------
    ConfigError
        If no coordinator was given, and none is known by the scheduler.
    CoordinationError
        If scheduler or coordinator cannot be reached; while watching that is shown instead.
    """
    found = settings()
    url = coordinator_of_nodes(scheduler, coordinator, found.scheduler_seconds)
    if url is None:
        raise ConfigError("give --coordinator, or --scheduler to ask the storage nodes' scheduler for it")
    stop = stop or threading.Event()
    with connection(url, found) as session:
        if not watch:
            cluster = look(session, clients_for(found))
            if as_json:
                console.file.write(json.dumps(cluster.to_dict(), indent=2) + "\n")
            else:
                console.print(render(cluster))
            return cluster.exit_status
        status = 0
        with Live(console=console, auto_refresh=False, vertical_overflow="visible") as live:
            while True:
                try:
                    cluster = look(session, clients_for(found))
                    status = cluster.exit_status
                    live.update(render(cluster), refresh=True)
                except CoordinationError as error:
                    status = 2
                    live.update(Text(str(error), style="bold red"), refresh=True)
                if stop.wait(WATCH_SECONDS):
                    return status
