"""Real storage nodes and a real Dask scheduler as child processes, to be killed, stopped and restarted."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.connect import sqlite_path
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.testing.stopping import stop_process

_START_SECONDS = 120.0
_STOP_SECONDS = 10.0

_NODE = """
import json, sys
from fastcheck_dask.master.storage_node import master_of_nodes
from fastcheck_dask.node.process import storage
scheduler, coordinator, options = sys.argv[1:]
options = json.loads(options)
sys.exit(storage(scheduler or None, coordinator, service_of=master_of_nodes, **options))
"""


@dataclass
class _Child:
    process: subprocess.Popen[bytes]
    ready_line: str


class StorageCluster:
    """Storage nodes, optionally with a scheduler, on loopback; all of it ends with the block.

    Parameters
    ----------
    folder : Path
        For the coordinator's database and the logs.
    nodes : int
        Number of storage nodes, named ``n0``, ``n1`` and so on, each in a rack of its own.
    memory_bytes : int
        Limit of each node.
    scheduler : bool
        Whether to start a Dask scheduler.
    scheduler_options : sequence of str
        Of ``dask scheduler``.
    coordinator : str, optional
        URL of the coordinator; a SQLite file in `folder` unless given.
    **options
        ``ring``, ``scrub_seconds``, ``drain_seconds`` and ``config`` of the nodes.
    """

    def __init__(
        self,
        folder: Path,
        nodes: int = 4,
        *,
        memory_bytes: int = 2**31,
        scheduler: bool = False,
        coordinator: str | None = None,
        scheduler_options: Sequence[str] = ("--no-dashboard",),
        **options: Any,
    ) -> None:
        self.folder = folder
        self._options = options
        self.coordinator = coordinator or f"sqlite:///{folder}/coordinator.db"
        self.scheduler: str | None = None
        self._memory_bytes = memory_bytes
        self._scheduler_options = scheduler_options
        self._children: dict[str, _Child] = {}
        #: Length of each log when its process was started.
        self._seen: dict[str, int] = {}
        folder.mkdir(parents=True, exist_ok=True)
        try:
            if scheduler:
                self.start_scheduler()
            starting = {f"n{i}": self._popen_node(f"n{i}", rack=f"r{i}") for i in range(nodes)}
            for name, process in starting.items():
                self._children[name] = _Child(process, self._line(name, process, "data fcs"))
        except BaseException:
            self.close()
            raise

    def start_scheduler(self, port: int = 0) -> str:
        """Start a Dask scheduler and return its address; it can be started again with the same port."""
        process = self._popen(
            "scheduler",
            [
                "-m",
                "distributed.cli.dask_scheduler",
                "--host",
                "127.0.0.1",
                "--port",
                str(port or free_ports(1)[0]),
                *self._scheduler_options,
            ],
        )
        self._children["scheduler"] = _Child(process, "")
        line = self._line("scheduler", process, "Scheduler at:")
        self.scheduler = line.rsplit(maxsplit=1)[-1]
        self._children["scheduler"] = _Child(process, line)
        return self.scheduler

    def start_node(
        self, name: str, *, rack: str = "default", port: int = 0, within: Sequence[str] = ()
    ) -> None:
        """Start one more storage node, or one that was killed, with empty memory.

        `within` is a command that starts the one that follows it, such as in a cgroup.
        """
        process = self._popen_node(name, rack=rack, port=port, within=within)
        self._children[name] = _Child(process, self._line(name, process, "data fcs"))

    def pid(self, name: str) -> int:
        """Return the process id of a node or of ``"scheduler"``."""
        return self._children[name].process.pid

    def address(self, name: str) -> str:
        """Return the data-port address of a node."""
        return self._children[name].ready_line.rsplit(maxsplit=1)[-1]

    def terminate(self, name: str) -> None:
        """SIGTERM: the machine is taken down in good order."""
        self._children[name].process.terminate()

    def wait(self, name: str, seconds: float) -> int:
        """Wait until a process ends, and return its exit status."""
        code = self._children[name].process.wait(seconds)
        del self._children[name]
        return code

    def kill(self, name: str) -> None:
        """SIGKILL a node or the scheduler, as when its machine dies."""
        child = self._children.pop(name)
        child.process.kill()
        child.process.wait()

    def pause(self, name: str) -> None:
        """SIGSTOP: the machine hangs, but not within a transaction, which would lock the file for others."""
        with_file = self.coordinator.startswith("sqlite:")
        stop_process(self.pid(name), sqlite_path(self.coordinator) if with_file else None)

    def resume(self, name: str) -> None:
        """SIGCONT."""
        os.kill(self.pid(name), signal.SIGCONT)

    def close(self) -> None:
        """End everything. Idempotent."""
        for child in self._children.values():
            child.process.send_signal(signal.SIGCONT)
            child.process.terminate()
        for child in self._children.values():
            try:
                child.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                child.process.kill()
                child.process.wait()
        self._children.clear()

    def __enter__(self) -> StorageCluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def log(self, name: str) -> str:
        """Return what a process has printed."""
        return (self.folder / f"{name}.log").read_text(errors="replace")

    def _popen_node(
        self, name: str, *, rack: str, port: int = 0, within: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        options = {
            "memory_bytes": self._memory_bytes,
            "name": name,
            "rack": rack,
            "port": port,
            **self._options,
        }
        return self._popen(
            name,
            [
                "-c",
                _NODE,
                self.scheduler or "",
                self.coordinator,
                json.dumps(options),
            ],
            within=within,
        )

    def _popen(
        self, name: str, arguments: list[str], *, within: Sequence[str] = ()
    ) -> subprocess.Popen[bytes]:
        command = [*within, sys.executable, *arguments]
        # A test runner that is killed must not leave processes behind.
        if setpriv := shutil.which("setpriv"):
            command = [setpriv, "--pdeathsig", "KILL", "--", *command]
        log = self.folder / f"{name}.log"
        # One that was started before has left its lines there.
        self._seen[name] = log.stat().st_size if log.exists() else 0
        with log.open("ab") as file:
            return subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                cwd=self.folder,
                # What is killed cannot remove its temporary files.
                env=os.environ | {"PYTHONUNBUFFERED": "1", "TMPDIR": str(self.folder)},
            )

    def _line(self, name: str, process: subprocess.Popen[bytes], wanted: str) -> str:
        """Wait until a process has printed a line that has `wanted` in it."""
        deadline = Deadline.after(_START_SECONDS)
        log = self.folder / f"{name}.log"
        waiting = threading.Event()
        while not deadline.passed:
            printed = log.read_bytes()[self._seen[name] :].decode(errors="replace")
            for line in reversed(printed.splitlines(keepends=True)):
                if wanted in line and line.endswith("\n"):
                    return line.strip()
            if process.poll() is not None:
                break
            waiting.wait(0.02)
        with contextlib.suppress(OSError):
            process.kill()
        raise RuntimeError(f"{name} did not start: {log.read_text(errors='replace')[-4000:]}")
