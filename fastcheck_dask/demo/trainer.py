"""The training process as the demonstration sees it: started, followed, killed."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any

from fastcheck_dask.demo.processes import Child, DemoFailedError
from fastcheck_dask.demo.progress import Screen
from fastcheck_dask.demo.results import Attempt
from fastcheck_dask.demo.scenario import TITLES, Scenario

_SILENCE_SECONDS = 300.0


@dataclass(frozen=True)
class Storage:
    """Where a training process saves."""

    checkpoint_dir: Path
    scheduler: str
    coordinator: str
    #: Folder of the local tier; None for shared memory.
    local_dir: Path | None

    def arguments(self) -> list[str]:
        """Return the arguments of the training process."""
        local = [] if self.local_dir is None else ["--local-dir", str(self.local_dir)]
        return [
            *("--checkpoint-dir", str(self.checkpoint_dir)),
            *("--scheduler", self.scheduler),
            *("--coordinator", self.coordinator),
            *local,
        ]


class Trainer:
    """One training process; a context manager that ends it.

    Parameters
    ----------
    scenario : Scenario
        What it trains.
    storage : Storage or None
        None for a run without checkpoints.
    name, title : str
        Of the log, and on the screen.
    stay_at : int, optional
        The step at which it waits to be killed.
    """

    def __init__(
        self,
        scenario: Scenario,
        storage: Storage | None,
        *,
        name: str,
        title: str,
        seed: int,
        quick: bool,
        logs: Path,
        environment: dict[str, str],
        screen: Screen,
        stay_at: int | None = None,
    ) -> None:
        self._total = scenario.steps
        self._bar = screen.training(f"{TITLES[scenario.model]}: {title}", scenario.steps)
        self.attempt = Attempt()
        self.first_step_at: float | None = None
        command = ["-m", "fastcheck_dask.demo.train", "--model", scenario.model]
        command += ["--steps", str(scenario.steps), "--seed", str(seed)]
        command += ["--quick"] if quick else []
        if storage is not None:
            command += [*storage.arguments(), "--save-every", str(scenario.save_every)]
        command += [] if stay_at is None else ["--stay-at", str(stay_at)]
        self._child = Child(f"{scenario.model}-{name}", command, logs=logs, environment=environment)

    def follow(self, until: Callable[[Attempt], bool]) -> None:
        """Take events until a condition holds.

        Raises
        ------
        DemoFailedError
            If the process ends before.
        """
        while not until(self.attempt):
            event = self._event()
            if event is None:
                raise self._child.failed()
            if event["event"] == "done":
                raise DemoFailedError(f"{self._child.name} was done before it could be killed")

    def finish(self) -> None:
        """Take events until the process has ended; `DemoFailedError` unless it ended well."""
        while self._event() is not None:
            pass
        if self.attempt.digests is None or self._child.status() != 0:
            raise self._child.failed()

    def kill(self) -> None:
        """SIGKILL it, its agent, and the agent's encoders, as if their machine had died. Idempotent."""
        self._child.kill_with_all()
        self._bar.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.kill()

    def _event(self) -> dict[str, Any] | None:
        line = self._child.line(_SILENCE_SECONDS)
        if line is None:
            return None
        event: dict[str, Any] = json.loads(line)
        self.attempt.take(event)
        if event["event"] == "step":
            if self.first_step_at is None:
                self.first_step_at = time.monotonic()
            self._bar.step(event["step"], event["loss"])
        return event
