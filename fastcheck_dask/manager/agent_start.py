"""Start the agent's process so that it imports what the trainer imported, wherever it is started."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.machinery import PathFinder
from pathlib import Path

import fastcheck_codecs

import fastcheck_dask
from fastcheck_dask.errors import CoordinationError

_PACKAGES = (fastcheck_dask, fastcheck_codecs)


def start_agent(socket_fd: int) -> subprocess.Popen[bytes]:
    """Start an agent that talks over an inherited socket.

    Raises
    ------
    CoordinationError
        If the system refuses another process.
    """
    # -P: the working directory may hold files that are named like modules of the standard library.
    module = "fastcheck_dask.agent.process"
    command = [sys.executable, "-P", "-m", module, str(socket_fd), str(os.getpid())]
    try:
        return subprocess.Popen(
            command,
            pass_fds=(socket_fd,),
            stdin=subprocess.DEVNULL,
            # Whoever reads the trainer's output to its end need not wait for the agent's.
            stdout=subprocess.DEVNULL,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(import_path(sys.path))},
            # A process group of its own: what kills the trainer's group must not kill the save in flight.
            start_new_session=True,
        )
    except OSError as error:
        raise CoordinationError(f"the agent cannot be started ({command[0]}): {error}") from error


def import_path(places: list[str]) -> list[str]:
    """Return where the agent looks for modules: as the trainer does, and so that it finds our own packages.

    The trainer may have found them on a path that is gone from `places`, or before another one was put first.
    """
    found = list(dict.fromkeys(_absolute(place) for place in places))
    for package in _PACKAGES:
        assert package.__file__ is not None
        spec = PathFinder.find_spec(package.__name__, found)
        if spec is None or spec.origin is None or _differ(spec.origin, package.__file__):
            found.insert(0, str(Path(package.__file__).absolute().parents[1]))
    # A path with the separator in it cannot be said in the environment.
    return [place for place in found if place and os.pathsep not in place]


def _absolute(place: str) -> str:
    try:
        return str(Path(place).absolute())
    except FileNotFoundError:
        # Relative to a working directory that was removed.
        return ""


def _differ(one: str, other: str) -> bool:
    return Path(one).resolve() != Path(other).resolve()
