"""A real ZooKeeper server on a port of its own, for tests and laptops."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import threading
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from fastcheck_dask.clock import Deadline

_DEBIAN: Final = Path("/usr/share/java")
#: Debian's zookeeper.jar names the other jars that it needs, except these (and a logger).
_DEBIAN_EXTRAS: Final = (
    "slf4j-simple",
    "netty-codec",
    "netty-resolver",
    "netty-transport-native-unix-common",
)
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
_POLL_SECONDS: Final = 0.02


class ZooKeeperMissingError(RuntimeError):
    """ZooKeeper or Java is not installed; the message says how to install them."""


class ZooKeeperServer:
    """A standalone server on a free loopback port, as a context manager.

    It dies with the thread that started it, also when that is killed (where `setpriv` exists).

    Parameters
    ----------
    directory : Path
        Where its data and its log go; belongs to the caller, who removes it.
    tick_milliseconds : int
        ZooKeeper's tick: a session lasts at least two of them.
    fsync : bool
        Whether each write is forced to disk; without, a killed server still loses nothing, a power cut may.
    start_seconds : float
        How long the start may take.

    Raises
    ------
    ZooKeeperMissingError
        If there is no Java or no ZooKeeper.
    RuntimeError
        If the server does not start; with the end of its log.
    """

    def __init__(
        self,
        directory: Path,
        *,
        tick_milliseconds: int = 200,
        fsync: bool = False,
        start_seconds: float = 60.0,
    ) -> None:
        self.directory = directory.resolve()
        self.port = 0
        self._tick_milliseconds = tick_milliseconds
        self._fsync = fsync
        self._start_seconds = start_seconds
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def hosts(self) -> str:
        """Its address, ``127.0.0.1:port``."""
        return f"127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "not started"
        return self._process.pid

    def start(self) -> Self:
        """Start and wait until it answers; on the port it had before, if it ran before."""
        for _ in range(1 if self.port else 5):
            fresh = not self.port
            self.port = self.port or _free_port()
            self._launch()
            if self._wait_ready(Deadline.after(self._start_seconds)):
                return self
            self.kill()
            end_of_log = self._log_path.read_text(errors="replace")[-3000:]
            if not (fresh and "BindException" in end_of_log):
                break
            self.port = 0
        raise RuntimeError(f"ZooKeeper did not start; end of {self._log_path}:\n{end_of_log}")

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
            self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()

    def pause(self) -> None:
        """Hold it still: connections stay open, nothing is answered."""
        self._signal(signal.SIGSTOP)

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

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(number)

    def _launch(self) -> None:
        self._data_path.mkdir(parents=True, exist_ok=True)
        settings = {
            "tickTime": self._tick_milliseconds,
            "dataDir": self._data_path,
            "clientPort": self.port,
            "clientPortAddress": "127.0.0.1",
            "4lw.commands.whitelist": "conf,mntr",
            "maxSessionTimeout": 60_000,
            "maxClientCnxns": 0,
            "admin.enableServer": "false",
            "forceSync": "yes" if self._fsync else "no",
        }
        configuration = self.directory / "zoo.cfg"
        configuration.write_text("".join(f"{name}={value}\n" for name, value in settings.items()))
        command = [_java(), *_JVM, "-cp", _class_path(), _MAIN, str(configuration)]
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        with self._log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.directory
            )

    def _wait_ready(self, deadline: Deadline) -> bool:
        assert self._process is not None
        pause = threading.Event()
        while not deadline.passed and self._process.poll() is None:
            # The answer names the data directory: a stranger on that port has another.
            if f"dataDir={self._data_path}" in _configuration(self.port):
                return True
            pause.wait(_POLL_SECONDS)
        return False


def _java() -> str:
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=f"{home}/bin") if home else None
    found = found or shutil.which("java")
    if found is None:
        raise ZooKeeperMissingError(
            "Java is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends "
            "default-jre-headless"
        )
    return found


def _class_path() -> str:
    if home := os.environ.get("ZOOKEEPER_HOME"):
        jars = sorted([*Path(home).glob("lib/*.jar"), *Path(home).glob("*.jar")])
        if not any(jar.name.startswith("zookeeper") for jar in jars):
            raise ZooKeeperMissingError(f"ZOOKEEPER_HOME is {home}, which holds no ZooKeeper release")
        return ":".join(map(str, jars))
    if not (_DEBIAN / "zookeeper.jar").exists():
        raise ZooKeeperMissingError(
            "ZooKeeper is not installed; on Debian or Ubuntu: apt-get install --no-install-recommends "
            "zookeeper; elsewhere unpack a release of Apache ZooKeeper and set ZOOKEEPER_HOME"
        )
    present = [jar for name in _DEBIAN_EXTRAS if (jar := _DEBIAN / f"{name}.jar").exists()]
    return ":".join(map(str, [_DEBIAN / "zookeeper.jar", *present]))


def _configuration(port: int) -> str:
    """Return the answer to ``conf``, empty if there is none."""
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1.0) as connection:
            connection.sendall(b"conf")
            answer = b""
            while part := connection.recv(65536):
                answer += part
    except OSError:
        return ""
    return answer.decode(errors="replace")


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
