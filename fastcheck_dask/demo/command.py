"""``fastcheck demo``: the story, then what it gave."""

from __future__ import annotations

import importlib.util
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from rich.console import Console

from fastcheck_dask.demo.processes import DemoFailedError
from fastcheck_dask.demo.progress import Screen
from fastcheck_dask.demo.report import show, write_summary
from fastcheck_dask.demo.story import tell_story, work_folder
from fastcheck_dask.errors import ConfigError

_NEEDED = {"torch": "torch", "sklearn": "scikit-learn", "matplotlib": "matplotlib"}


def run_demo(out: Path, *, seed: int, keep: bool, quick: bool) -> bool:
    """Run the demonstration; return whether everything came out as it must.

    Parameters
    ----------
    out : Path
        Receives ``recovery.png``, ``summary.json`` and, with `keep`, a folder with checkpoints and logs.
    seed : int
        Of the trainings.
    keep, quick : bool
        Whether to keep the checkpoints; whether to take small networks and few steps.

    Raises
    ------
    FastCheckError
        If it could not be played to the end.
    """
    _check_installed()
    console = Console()
    started = time.monotonic()
    with _sigterm_unwinds():
        try:
            with work_folder(out, keep=keep) as folder, Screen(console) as screen:
                outcomes = tell_story(folder, seed=seed, quick=quick, screen=screen)
        except OSError as error:
            raise ConfigError(f"the demonstration cannot use {out}: {error}") from error
        seconds = time.monotonic() - started
        ok = write_summary(out / "summary.json", outcomes, seed=seed, quick=quick, seconds=seconds)
        show(console, outcomes)
        # Slow to import, and needed only now.
        from fastcheck_dask.demo.plot import draw

        draw(out / "recovery.png", outcomes)
    files = f"Plot: {out / 'recovery.png'}, numbers: {out / 'summary.json'}"
    console.print(f"{seconds:.0f} s. {files}", highlight=False, soft_wrap=True)
    if keep:
        console.print(f"Checkpoints and logs: {folder}", highlight=False, soft_wrap=True)
    return ok


def _check_installed() -> None:
    missing = [name for module, name in _NEEDED.items() if importlib.util.find_spec(module) is None]
    if missing:
        raise DemoFailedError(
            f"the demonstration needs {', '.join(missing)}: pip install 'fastcheck-dask[demo]'"
        )


@contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Have SIGTERM end us as Ctrl-C does: with everything cleaned up."""

    def unwind(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signal.SIGTERM, unwind)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
