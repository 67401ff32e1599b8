"""A ZooKeeper server of our own on a loopback port, for laptops and tests: never in production."""

from __future__ import annotations

import math
import os
import secrets
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Final, Self

import fastcheck_dask.leash
from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.zookeeper.distribution import class_path, java
from fastcheck_dask.errors import CoordinationError

_MAIN: Final = "org.apache.zookeeper.server.quorum.QuorumPeerMain"
#: Small and quick to start: 60 MB, half a second.
_JVM: Final = (
    "-Xms32m",
    "-Xmx128m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:-UsePerfData",
    "-Djava.net.preferIPv4Stack=true",
    "-Dzookeeper.jmx.log4j.disable=true",
    "-Dzookeeper.admin.enableServer=false",
    "-Dzookeeper.preAllocSize=512",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
)
#: Lower ones belong to well-known services; among fewer than so many a free one might not be found.
_LOWEST_PORT: Final = 10_000
_ENOUGH_PORTS: Final = 1000
_WORDS: Final = "conf,cons,dump,mntr,srvr,wchs"
_POLL_SECONDS: Final = 0.02
_STOP_SECONDS: Final = 10.0
#: How long a server may take to join the others, and how long it may then lag behind.
_JOIN_SECONDS: Final = 20.0
_LAG_SECONDS: Final = 2.5


@dataclass(frozen=True)
class ServerOptions:
    """How a server is run."""

    #: ZooKeeper's tick: a session lasts at least two of them.
    tick_milliseconds: int = 200
    #: Whether each write is forced to disk; without, a killed server still loses nothing, a power cut may.
    fsync: bool = False
    #: How long the start may take.
    start_seconds: float = 60.0
    #: More lines of ``zoo.cfg``.
    settings: Mapping[str, object] = field(default_factory=dict)
    #: More options of the Java machine.
    jvm: tuple[str, ...] = ()


class ZooKeeperServer:
    """A server on a loopback port, as a context manager.

    The kernel kills it when the thread that started it ends, also when that is killed.

    Parameters
    ----------
    directory : Path
        Where its data and its log go; belongs to the caller, who removes it.
    options : ServerOptions, optional
        How it is run.
    port : int
        For clients; 0 for any that is free.
    member : tuple of (int, str), optional
        Its number in an ensemble, and the lines of ``zoo.cfg`` that name all servers.

    Raises
    ------
    ZooKeeperMissingError
        If there is no Java or no ZooKeeper.
    CoordinationError
        If the server does not start; with the end of its log.
    """

    def __init__(
        self,
        directory: Path,
        options: ServerOptions | None = None,
        *,
        port: int = 0,
        member: tuple[int, str] | None = None,
    ) -> None:
        self.directory = directory.resolve()
        self.options = options or ServerOptions()
        self.port = port
        self._member = member
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0

    @property
    def hosts(self) -> str:
        """Its address, ``127.0.0.1:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "not started"
        return self._process.pid

    @property
    def running(self) -> bool:
        """Whether its process is there."""
        return self._process is not None and self._process.poll() is None

    @property
    def mode(self) -> str:
        """``standalone``, ``leader`` or ``follower``; empty when it does not serve."""
        lines = self.ask("srvr").splitlines()
        return next((line.removeprefix("Mode: ") for line in lines if line.startswith("Mode: ")), "")

    def ask(self, word: str, *, timeout_seconds: float = 1.0) -> str:
        """Return the answer to a four-letter word (``conf``, ``mntr``...), empty if there is none."""
        try:
            with socket.create_connection(("127.0.0.1", self.port), timeout=timeout_seconds) as connection:
                connection.sendall(word.encode())
                answer = b""
                while part := connection.recv(65536):
                    answer += part
        except OSError:
            return ""
        return answer.decode(errors="replace")

    def start(self) -> Self:
        """Start and wait until it serves; on the port it had before, if it ran before.

        A member of an ensemble serves when a majority is there: without one it has to be launched.
        """
        for _ in range(1 if self.port else 5):
            fresh = not self.port
            self.port = self.port or free_ports(1)[0]
            self.launch()
            if self.wait_ready(Deadline.after(self.options.start_seconds)):
                return self
            self.kill()
            if not (fresh and self.lost_its_port):
                break
            self.port = 0
        raise self.failed()

    def launch(self) -> None:
        """Start it, and do not wait."""
        self._configure()
        log = self._log_path
        self._log_start = log.stat().st_size if log.exists() else 0
        configuration = str(self.directory / "zoo.cfg")
        command = [java(), *_JVM, *self.options.jvm, "-cp", class_path(), _MAIN, configuration]
        leash = [sys.executable, "-S", "-E", str(fastcheck_dask.leash.__file__), str(os.getpid())]
        with log.open("ab") as file:
            self._process = subprocess.Popen(
                [*leash, *command],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self.directory,
                # Ctrl-C in the terminal is for whoever started it, who then stops it.
                process_group=0,
            )

    def wait_ready(self, deadline: Deadline) -> bool:
        """Wait until it serves; False if it ended, or the deadline passed."""
        pause = threading.Event()
        while not deadline.passed and self.running:
            # The answer names the data directory: a stranger on that port has another.
            if f"dataDir={self._data_path}" in self.ask("conf") and self.mode:
                return True
            pause.wait(_POLL_SECONDS)
        return False

    @property
    def lost_its_port(self) -> bool:
        """Whether somebody else took a port of its own while it started."""
        return "BindException" in self._said()

    def failed(self) -> CoordinationError:
        """Return the error to raise when it did not start."""
        return CoordinationError(
            f"ZooKeeper did not start on port {self.port}; end of {self._log_path}:\n{self._said()[-3000:]}"
        )

    def kill(self) -> None:
        """Kill it at once, as a machine that dies. Idempotent."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def stop(self) -> None:
        """Ask it to end, and kill it if it does not within ten seconds. Idempotent."""
        if self._process is None:
            return
        # A paused process does not see the request.
        self.resume()
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self.kill()

    def pause(self) -> None:
        """Hold it still: connections stay open, nothing is answered. Returns when no thread runs any more."""
        self._signal(signal.SIGSTOP)
        if self._process is not None and self._process.returncode is None:
            os.waitid(os.P_PID, self._process.pid, os.WSTOPPED | os.WEXITED | os.WNOWAIT)

    def resume(self) -> None:
        """Undo :meth:`pause`."""
        self._signal(signal.SIGCONT)

    def restart(self) -> Self:
        """Kill it and start it on the same port with the same data."""
        self.kill()
        return self.start()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _data_path(self) -> Path:
        return self.directory / "data"

    @property
    def _log_path(self) -> Path:
        return self.directory / "server.log"

    def _said(self) -> str:
        """Return what it has logged since it was started last."""
        return self._log_path.read_bytes()[self._log_start :].decode(errors="replace")

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _configure(self) -> None:
        self._data_path.mkdir(parents=True, exist_ok=True)
        tick = self.options.tick_milliseconds
        settings = {
            "tickTime": tick,
            "initLimit": math.ceil(_JOIN_SECONDS * 1000 / tick),
            "syncLimit": math.ceil(_LAG_SECONDS * 1000 / tick),
            "dataDir": self._data_path,
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "4lw.commands.whitelist": _WORDS,
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "forceSync": "yes" if self.options.fsync else "no",
            **self.options.settings,
        }
        lines = "".join(f"{name}={value}\n" for name, value in settings.items())
        if self._member is not None:
            number, servers = self._member
            lines += servers
            (self._data_path / "myid").write_text(str(number))
        (self.directory / "zoo.cfg").write_text(lines)


def free_ports(count: int) -> list[int]:
    """Return different loopback ports that were free a moment ago, and that no outgoing connection gets.

    Of those that the kernel gives to connections, one could be taken by anybody between the end of a server
    and its next start.
    """
    ports = range(_LOWEST_PORT, _lowest_given_port())
    found: list[int] = []
    with ExitStack() as stack:
        while len(found) < count:
            probe = stack.enter_context(socket.socket())
            with suppress(OSError):
                # Not from the generator of `random`: tests seed it alike in many processes.
                probe.bind(("127.0.0.1", secrets.choice(ports) if len(ports) >= _ENOUGH_PORTS else 0))
                found.append(int(probe.getsockname()[1]))
    return found


def _lowest_given_port() -> int:
    """Return the lowest port that the kernel gives to who asks for any; 0 if that cannot be known."""
    try:
        return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text(encoding="ascii").split()[0])
    except OSError:
        return 0
