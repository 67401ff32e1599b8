"""Managers that leave nothing behind, and training processes to be killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.faults import wait_until

PATIENCE = 30.0


def noise(seed: int, nbytes: int = 4096) -> np.ndarray:
    """Return float32 values that do not compress to nothing."""
    return np.random.default_rng(seed).normal(size=nbytes // 4).astype(np.float32)


def agent_of(manager: FastCheckManager) -> psutil.Process:
    """Return the agent's process."""
    return psutil.Process(manager._agents.link().pid)


class StoppedAgent:
    """The agent is stopped within the block, and its encoders with it cannot be given work."""

    def __init__(self, manager: FastCheckManager) -> None:
        self.process = agent_of(manager)

    def __enter__(self) -> psutil.Process:
        self.process.suspend()
        return self.process

    def __exit__(self, *_: object) -> None:
        if self.process.is_running():
            self.process.resume()


class Trainer:
    """A Python process that runs a script and tells line by line how far it is."""

    def __init__(self, script: str, *arguments: object, cwd: Path, **options: Any) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", script, *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=cwd,
            start_new_session=True,
            **options,
        )
        self.lines: list[str] = []

    def line(self, begins: str) -> list[str]:
        """Wait for a line that begins so; return its other words."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.lines.append(line)
            if line.startswith(begins):
                return line.split()[1:]
        raise AssertionError(f"the trainer ended without {begins!r}: {self.lines}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(PATIENCE)

    def end(self) -> int:
        """Wait for its end; return the status."""
        assert self.process.stdout is not None
        self.lines += list(self.process.stdout)
        return self.process.wait(PATIENCE)

    def clean(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(PATIENCE)
        assert self.process.stdout is not None
        assert self.process.stdin is not None
        self.process.stdout.close()
        self.process.stdin.close()


def agents_at(folder: Path) -> list[psutil.Process]:
    """Return every agent and encoder on this machine that works below a folder."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        if any("fastcheck_dask.agent" in word for word in process.info["cmdline"] or ()):
            try:
                if str(folder) in str(process.environ().get("FASTCHECK_TEST_FOLDER", "")):
                    found.append(process)
            except psutil.Error:
                continue
    return found


@pytest.fixture(autouse=True)
def no_process_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Mark what a test starts by its environment, and see that all of it ends."""
    monkeypatch.setenv("FASTCHECK_TEST_FOLDER", str(tmp_path))
    yield
    try:
        wait_until(lambda: not agents_at(tmp_path), "the agents to end", seconds=PATIENCE)
    finally:
        for process in agents_at(tmp_path):
            process.kill()


@pytest.fixture
def make(tmp_path: Path, no_process_is_left: None) -> Iterator[Callable[..., FastCheckManager]]:
    """Return a function that makes managers, which are closed after the test."""
    made: list[FastCheckManager] = []

    def manager(folder: str | Path = "objects", **options: Any) -> FastCheckManager:
        defaults: dict[str, Any] = {"local_dir": tmp_path / "shm", "encoders": 1}
        made.append(FastCheckManager(tmp_path / folder, **(defaults | options)))
        return made[-1]

    yield manager
    for one in made:
        one.close(timeout=PATIENCE)


@pytest.fixture
def start_trainer(tmp_path: Path, no_process_is_left: None) -> Iterator[Callable[..., Trainer]]:
    """Return a function that runs a script in a process of its own, which is killed after the test."""
    started: list[Trainer] = []

    def start(script: str, *arguments: object, cwd: Path = tmp_path, **options: Any) -> Trainer:
        started.append(Trainer(script, *arguments, cwd=cwd, **options))
        return started[-1]

    yield start
    for one in started:
        one.clean()


class Kit:
    """The functions above, for tests: they cannot import a conftest."""

    noise = staticmethod(noise)
    agent_of = staticmethod(agent_of)
    agents_at = staticmethod(agents_at)
    stopped = StoppedAgent
    patience = PATIENCE


@pytest.fixture
def kit() -> type[Kit]:
    return Kit
