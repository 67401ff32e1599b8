"""Nodes, real or behind proxies, and training hosts that use them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost


@pytest.fixture
def faulty(tmp_path: Path) -> Iterator[FaultyCluster]:
    """Return four nodes behind proxies."""
    with FaultyCluster(tmp_path / "nodes") as nodes:
        yield nodes


@pytest.fixture
def host(tmp_path: Path, faulty: FaultyCluster) -> Iterator[TrainingHost]:
    """Return a run of two data shards on the nodes behind proxies, one of which is spare."""
    with TrainingHost(tmp_path, faulty.coordinator, {"num_shards": 2}) as made:
        yield made
        # A manager that closes waits for what is in flight: let it pass.
        faulty.release()


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StorageCluster]:
    """Return four real nodes that the tests of a module share; who harms one makes it whole again."""
    with StorageCluster(tmp_path_factory.mktemp("cluster")) as nodes:
        yield nodes


@pytest.fixture
def on_cluster(tmp_path: Path, cluster: StorageCluster) -> Iterator[Callable[..., TrainingHost]]:
    """Return a function that makes a training host with a run of its own on the shared nodes."""
    with contextlib.ExitStack() as stack:

        def make(**options: Any) -> TrainingHost:
            return stack.enter_context(TrainingHost(tmp_path, cluster.coordinator, options))

        yield make


@pytest.fixture
def restart() -> Callable[..., None]:
    """Return a function that starts a node which was killed, with empty memory."""

    def start(cluster: StorageCluster, name: str) -> None:
        # The line with its former address must not be taken for that of the new one.
        (cluster.folder / f"{name}.log").unlink(missing_ok=True)
        cluster.start_node(name, rack=name.replace("n", "r"))

    return start


class Trainer:
    """A training process (`trainer.py`), its agent, and what it has said so far."""

    def __init__(self, host: TrainingHost, **options: Any) -> None:
        arguments = [str(host.folder), host.coordinator, json.dumps(host.options | options)]
        command = [sys.executable, str(Path(__file__).with_name("trainer.py")), *arguments]
        self._host = host
        self._said: list[str] = []
        self._changed = threading.Condition()
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )
        self._thread = threading.Thread(target=self._listen, daemon=True)
        self._thread.start()
        self.agents = [int(self.expect("agent").split()[1])]

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            with self._changed:
                self._said.append(line.strip())
                self._changed.notify_all()
        with self._changed:
            self._said.append("(end)")
            self._changed.notify_all()

    def tell(self, command: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(command + "\n")

    def expect(self, *beginnings: str, seconds: float = 30.0) -> str:
        """Wait until a line that begins so was said; return the first such line."""

        def found() -> str | None:
            return next((line for line in self._said for b in beginnings if line.startswith(b)), None)

        with self._changed:
            self._changed.wait_for(lambda: found() or "(end)" in self._said, seconds)
            line = found()
        assert line is not None, f"said {self._said}, not {beginnings}"
        return line

    @property
    def last_at_peers(self) -> int:
        """The last step of which the trainer was told that it is safe."""
        return max((int(line.split()[1]) for line in self._said if line.startswith("peers")), default=0)

    def encoders(self) -> list[psutil.Process]:
        return psutil.Process(self.agents[0]).children(recursive=True)

    def kill(self) -> None:
        """SIGKILL the trainer."""
        self._process.kill()
        self._process.wait()

    def kill_agent(self) -> None:
        """SIGKILL the agent and wait until it is gone."""
        agent = psutil.Process(self.agents[0])
        encoders = self.encoders()
        agent.kill()
        # Not our child: when its parent has collected it, or died too, it is gone.
        psutil.wait_procs([agent], timeout=0.5)
        for encoder in encoders:
            with contextlib.suppress(psutil.NoSuchProcess):
                encoder.resume()
        psutil.wait_procs(encoders, timeout=10)

    def close(self) -> None:
        for pid in [self._process.pid, *self.agents]:
            with contextlib.suppress(psutil.NoSuchProcess):
                process = psutil.Process(pid)
                for child in process.children(recursive=True):
                    child.resume()
                if pid == self._process.pid:
                    self.kill()
                elif "fastcheck_dask.agent.process" in process.cmdline():
                    process.wait(timeout=20)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        # The agent has the same stdout: it ends when both have.
        self._thread.join(timeout=20)
        self._process.stdout.close()


@pytest.fixture
def trainer_of() -> Iterator[Callable[..., Trainer]]:
    """Return a function that starts a trainer process on a host; each is ended, with its agent."""
    with contextlib.ExitStack() as stack:

        def start(host: TrainingHost, **options: Any) -> Trainer:
            made = Trainer(host, **options)
            stack.callback(made.close)
            return made

        yield start
