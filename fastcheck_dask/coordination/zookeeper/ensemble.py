"""Several ZooKeeper servers of our own on loopback that elect a leader, for laptops and tests."""

from __future__ import annotations

import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.zookeeper.server import ServerOptions, ZooKeeperServer, free_ports
from fastcheck_dask.errors import ConfigError, CoordinationError

_TRIES: Final = 3
_POLL_SECONDS: Final = 0.02


class ZooKeeperEnsemble:
    """Servers that stand for each other, as a context manager; one alone is standalone.

    The kernel kills them when the thread that started them ends.

    Parameters
    ----------
    directory : Path
        Where data and logs go, ``server-1`` and so on; belongs to the caller. An ensemble that is made again
        with the same directory has the same data.
    size : int
        Number of servers.
    options : ServerOptions, optional
        How each is run.
    port : int
        Of the first server for clients, the others have the following ones; 0 for any that are free.

    Raises
    ------
    ConfigError
        If the directory was used by another number of servers: the fewer could lack what was written.
    ZooKeeperMissingError
        If there is no Java or no ZooKeeper.
    CoordinationError
        If they do not start, or elect no leader.
    """

    def __init__(
        self, directory: Path, size: int = 3, *, options: ServerOptions | None = None, port: int = 0
    ) -> None:
        self.directory = directory.resolve()
        self.options = options or ServerOptions()
        self._size, self._port = size, port
        #: In the order of their numbers; made by :meth:`start`.
        self.servers: tuple[ZooKeeperServer, ...] = ()

    @property
    def hosts(self) -> str:
        """The addresses of all servers, ``127.0.0.1:port,...``."""
        return ",".join(server.hosts for server in self.servers)

    @property
    def followers(self) -> list[ZooKeeperServer]:
        """The servers that serve and do not lead."""
        return [server for server in self.servers if server.mode == "follower"]

    def start(self) -> Self:
        """Start all servers and wait until each serves."""
        self._check_directory()
        for _ in range(1 if self._port else _TRIES):
            self.servers = self._made()
            try:
                for server in self.servers:
                    server.launch()
                deadline = Deadline.after(self.options.start_seconds)
                failed = [server for server in self.servers if not server.wait_ready(deadline)]
            except BaseException:
                self.kill()
                raise
            if not failed:
                return self
            self.kill()
            if not any(server.lost_its_port for server in self.servers):
                break
        raise failed[0].failed()

    def wait_leader(self, seconds: float = 30.0) -> ZooKeeperServer:
        """Wait until one server leads and enough others follow; return it.

        Raises
        ------
        CoordinationError
            If there is none in time.
        """
        deadline, pause = Deadline.after(seconds), threading.Event()
        while not deadline.passed:
            modes = {server: server.mode for server in self.servers}
            leaders = [server for server, mode in modes.items() if mode in ("leader", "standalone")]
            if leaders and sum(map(bool, modes.values())) > self._size // 2:
                return leaders[0]
            pause.wait(_POLL_SECONDS)
        raise CoordinationError(f"the ZooKeeper servers {self.hosts} have no leader after {seconds:g} s")

    def stop(self) -> None:
        """End all servers. Idempotent."""
        for server in self.servers:
            server.stop()

    def kill(self) -> None:
        """Kill all servers at once. Idempotent."""
        for server in self.servers:
            server.kill()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _made(self) -> tuple[ZooKeeperServer, ...]:
        numbers = range(1, self._size + 1)
        free = free_ports(3 * self._size)
        clients = [self._port + number - 1 if self._port else free.pop() for number in numbers]
        if self._size == 1:
            # A single line would make it an ensemble of one, which takes longer to start.
            return (ZooKeeperServer(self.directory / "server-1", self.options, port=clients[0]),)
        lines = "".join(f"server.{number}=127.0.0.1:{free.pop()}:{free.pop()}\n" for number in numbers)
        return tuple(
            ZooKeeperServer(
                self.directory / f"server-{number}", self.options, port=port, member=(number, lines)
            )
            for number, port in zip(numbers, clients, strict=True)
        )

    def _check_directory(self) -> None:
        found = len(list(self.directory.glob("server-*")))
        if found not in (0, self._size):
            raise ConfigError(
                f"{self.directory} holds the data of {found} ZooKeeper servers, and {self._size} are to be "
                f"started: start {found}, or name another folder"
            )
