"""``fastcheck zookeeper start``: servers on this machine until somebody ends them."""

from __future__ import annotations

import fcntl
import signal
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import Final, Never

from fastcheck_dask.coordination.zookeeper.ensemble import ZooKeeperEnsemble
from fastcheck_dask.coordination.zookeeper.server import ServerOptions
from fastcheck_dask.errors import ConfigError, CoordinationError

_SIGNALS: Final = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_LOOK_SECONDS: Final = 1.0


class _EndedError(BaseException):
    """A signal asks us to end."""


def run_zookeeper(
    directory: Path | None, *, nodes: int, port: int, tick_milliseconds: int, say: Callable[[str], None]
) -> None:
    """Run ZooKeeper on loopback; returns after SIGINT, SIGTERM or SIGHUP. From the main thread.

    Parameters
    ----------
    directory : Path or None
        Where the data is kept; None for a temporary folder that goes with the servers.
    nodes : int
        Number of servers.
    port : int
        Of the first server, the others have the following ones; 0 for any that are free.
    tick_milliseconds : int
        A session lasts at least two of them.
    say : callable
        Receives the lines for the user; the first is the URL, once all servers serve.

    Raises
    ------
    ConfigError
        If something is missing on this machine, or `directory` cannot be used.
    CoordinationError
        If the servers do not start, or no longer run.
    """
    # What people keep here may be the only record of what they committed: to disk with it.
    options = ServerOptions(tick_milliseconds=tick_milliseconds, fsync=True)
    try:
        with _signals_unwind(), ExitStack() as stack:
            folder = stack.enter_context(_folder(directory))
            ensemble = stack.enter_context(ZooKeeperEnsemble(folder, nodes, options=options, port=port))
            say(f"zk://{ensemble.hosts}")
            where = "kept" if directory else "gone when this ends"
            say(f"data: {folder} ({where}); Ctrl-C ends it")
            _watch(ensemble, say)
    except _EndedError:
        return


def _watch(ensemble: ZooKeeperEnsemble, say: Callable[[str], None]) -> Never:
    """Tell of servers that end by themselves, until none is left."""
    running = list(ensemble.servers)
    while running:
        time.sleep(_LOOK_SECONDS)
        for server in [server for server in running if not server.running]:
            running.remove(server)
            say(f"the server {server.hosts} ended; its log: {server.directory / 'server.log'}")
    raise CoordinationError("no ZooKeeper server runs any more")


@contextmanager
def _folder(directory: Path | None) -> Iterator[Path]:
    """Return the folder for the data, ours alone."""
    if directory is None:
        with tempfile.TemporaryDirectory(prefix="fastcheck-zookeeper-") as temporary:
            yield Path(temporary)
        return
    try:
        directory.mkdir(parents=True, exist_ok=True)
        lock = (directory / "lock").open("ab")
    except OSError as error:
        raise ConfigError(f"the folder {directory} cannot be used: {error}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"ZooKeeper runs in {directory} already: end it, or name another") from None
        yield directory.resolve()


@contextmanager
def _signals_unwind() -> Iterator[None]:
    """Have the signals that end us unwind the stack, so that everything is cleaned up; once."""

    def unwind(_number: int, _frame: FrameType | None) -> None:
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_IGN)
        raise _EndedError

    before = {number: signal.signal(number, unwind) for number in _SIGNALS}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
