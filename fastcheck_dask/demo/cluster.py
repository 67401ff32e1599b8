"""A Dask scheduler and storage nodes on this machine, each a process of its own."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Collection
from pathlib import Path
from types import TracebackType

from fastcheck_dask.clock import Deadline
from fastcheck_dask.demo.processes import Child, DemoFailedError

NODES = 5
_START_SECONDS = 120.0


class Cluster:
    """The scheduler and the storage nodes; a context manager that ends them all.

    Parameters
    ----------
    folder : Path
        For the coordinator's file, the logs and temporary files.
    memory : str
        What checkpoints may take in each storage node.
    """

    def __init__(self, folder: Path, memory: str) -> None:
        self._folder, self._memory = folder, memory
        self._numbers = itertools.count(1)
        self._nodes: dict[str, Child] = {}
        self._starting: list[str] = []
        self.coordinator_url = f"sqlite:///{folder / 'coordinator.db'}"
        self.logs = folder / "logs"
        self.logs.mkdir(parents=True)
        temporary = folder / "tmp"
        temporary.mkdir()
        #: What is killed cannot remove its temporary files; here they go with the folder.
        self.environment = {"TMPDIR": str(temporary)}
        address_file = folder / "scheduler.json"
        self._scheduler = self._start(
            "scheduler",
            *("scheduler", "--host", "127.0.0.1", "--port", "0"),
            *("--no-dashboard", "--scheduler-file", str(address_file)),
        )
        try:
            self.scheduler_address = self._wait_for_address(address_file)
        except BaseException:
            self.close()
            raise

    @property
    def alive(self) -> list[str]:
        """Names of the storage nodes that run."""
        return [name for name, child in self._nodes.items() if child.running()]

    def start_nodes(self) -> None:
        """Start storage nodes until there are five; :meth:`wait_ready` waits for them."""
        for _ in range(NODES - len(self._nodes)):
            name = f"n{next(self._numbers)}"
            self._nodes[name] = self._start(
                name,
                *("fastcheck", "storage", "--name", name, "--scheduler", self.scheduler_address),
                *("--coordinator", self.coordinator_url, "--memory", self._memory),
                *("--rack", f"rack-{name}"),
            )
            self._starting.append(name)

    def wait_ready(self) -> None:
        """Wait until every storage node that was started is registered and serves."""
        for name in self._starting:
            child = self._nodes[name]
            while (line := child.line(_START_SECONDS)) is not None:
                if line.startswith(f"fastcheck storage {name}: data "):
                    break
            else:
                raise child.failed()
        self._starting.clear()

    def kill_nodes(self, names: Collection[str]) -> None:
        """SIGKILL storage nodes."""
        for name in names:
            self._nodes.pop(name).kill_with_all()

    def close(self) -> None:
        """SIGKILL everything: nothing that it holds is needed any more. Idempotent."""
        self.kill_nodes(list(self._nodes))
        self._scheduler.kill_with_all()

    def __enter__(self) -> Cluster:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _start(self, name: str, *arguments: str) -> Child:
        command = ["-m", "dask", *arguments]
        return Child(name, command, logs=self.logs, environment=self.environment)

    def _wait_for_address(self, file: Path) -> str:
        deadline = Deadline.after(_START_SECONDS)
        while self._scheduler.running():
            try:
                return str(json.loads(file.read_text())["address"])
            except (FileNotFoundError, ValueError):
                # Not there yet, or not yet whole.
                time.sleep(0.05)
            if deadline.passed:
                raise DemoFailedError(f"the scheduler did not start in {_START_SECONDS:.0f} s")
        raise self._scheduler.failed()
