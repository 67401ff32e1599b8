"""Child processes that are killed for real, and never left behind."""

from __future__ import annotations

import ctypes
import os
import queue
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil

from fastcheck_dask.clock import Deadline
from fastcheck_dask.errors import FastCheckError

_PR_SET_CHILD_SUBREAPER = 36
_LEASH = Path(__file__).parents[1] / "leash.py"
_KILL_SECONDS = 20.0


class DemoFailedError(FastCheckError):
    """The demonstration could not go on; says at what."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        self.message = message

    def __str__(self) -> str:
        return self.message


class Child:
    """A process whose lines on stdout are read; stderr goes to a file.

    The kernel kills it when the thread that made it ends. To be used from one thread.

    Parameters
    ----------
    name : str
        For messages; also names the log.
    command : sequence of str
        Arguments of the Python interpreter.
    logs : Path
        Folder of the logs.
    environment : mapping of str to str
        Is added to ours.
    """

    def __init__(
        self, name: str, command: Sequence[str], *, logs: Path, environment: Mapping[str, str]
    ) -> None:
        self.name = name
        self._log = logs / f"{name}.log"
        self._lines: queue.Queue[str | None] = queue.Queue()
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-S", "-E", str(_LEASH), str(os.getpid()), sys.executable, *command],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**os.environ, **environment},
                # Ctrl-C in the terminal is for the demonstration, which then ends its children.
                process_group=0,
            )
        self._reader = threading.Thread(target=self._read, name=f"demo-{name}", daemon=True)
        self._reader.start()

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def line(self, seconds: float) -> str | None:
        """Wait for the next line; None when there will be no more.

        Raises
        ------
        DemoFailedError
            If none comes within `seconds`.
        """
        try:
            return self._lines.get(timeout=seconds)
        except queue.Empty:
            raise DemoFailedError(f"{self.name} said nothing for {seconds:.0f} s; see {self._log}") from None

    def status(self) -> int:
        """Wait for its end after the last line; return its exit status."""
        return self._process.wait(_KILL_SECONDS)

    def running(self) -> bool:
        """Say whether it still runs."""
        return self._process.poll() is None

    def failed(self) -> DemoFailedError:
        """Return the error to raise when it ended before its time."""
        text = self._log.read_text(errors="replace").strip().splitlines() or ["(it wrote nothing)"]
        return DemoFailedError(
            f"{self.name} ended with status {self.status()}: {text[-1]} (all of it: {self._log})"
        )

    def kill_with_all(self) -> list[int]:
        """SIGKILL it and every process that descends from it; return their pids. Idempotent."""
        with suppress(psutil.NoSuchProcess):
            own = psutil.Process(self.pid)
            below = own.children(recursive=True)
            # First: so it has no time to notice that the others are gone.
            self._process.kill()
            _kill(below)
            self._finish()
            return [own.pid, *(process.pid for process in below)]
        self._finish()
        return []

    def _finish(self) -> None:
        self._process.kill()
        self._process.wait()
        self._reader.join()
        assert self._process.stdout is not None
        self._process.stdout.close()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.decode(errors="replace").rstrip("\n"))
        self._lines.put(None)


def _kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=_KILL_SECONDS)
    if alive:
        raise DemoFailedError(f"processes {sorted(p.pid for p in alive)} do not die")


@contextmanager
def no_orphans() -> Iterator[None]:
    """Kill every process that was started within the block and still runs at its end.

    An agent outlives its trainer by design; here it becomes our child then, and can be found.
    """
    prctl = ctypes.CDLL(None).prctl
    before = set(psutil.Process().children(recursive=True))
    prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        deadline = Deadline.after(_KILL_SECONDS)
        # A process may have started another while we looked.
        while left := [p for p in psutil.Process().children(recursive=True) if p not in before]:
            _kill(left)
            if deadline.passed:
                break
        prctl(_PR_SET_CHILD_SUBREAPER, 0)
