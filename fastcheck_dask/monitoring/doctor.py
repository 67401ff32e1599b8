"""What ``fastcheck doctor`` finds on this machine: what is installed, shared memory, cores, the folder."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Final, Literal

from dask.utils import format_bytes
from fastcheck_codecs import kernels

from fastcheck_dask.config import Settings
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.ids import is_url, new_token
from fastcheck_dask.node.machine import memory_limit_bytes
from fastcheck_dask.tiers.local import SHARED_MEMORY
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.store import ObjectStore
from fastcheck_dask.version import __version__

#: *advice*: it works, and could be better. *problem*: something will not work.
Level = Literal["ok", "advice", "problem"]

_PACKAGES: Final = ("dask", "distributed", "zarr", "numcodecs", "numpy")
#: What is missing without each of the optional packages, and the extra that brings it.
_OPTIONAL: Final = {
    "torch": ("PyTorch states", "torch"),
    "obstore": ("the object tier in S3", "s3"),
    "prometheus-client": ("metrics for Prometheus", "metrics"),
    "bokeh": ("the page on the dashboard", "dashboard"),
    "pure-sasl": ("SASL credentials for ZooKeeper", "sasl"),
}
#: Less shared memory than this share of what the process may use is worth a word.
_SHARED_SHARE: Final = 0.25
_FEW_CORES: Final = 4


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at."""

    what: str
    level: Level
    found: str
    #: What to do; empty if all is well.
    advice: str = ""


def installation(version_of: Callable[[str], str] = version) -> list[Finding]:
    """Look at what is installed."""
    found = [Finding("python", "ok", f"{platform.python_version()} on {platform.platform()}")]
    packages = ", ".join(f"{name} {version_of(name)}" for name in _PACKAGES)
    found.append(Finding("fastcheck", "ok", f"{__version__}; {packages}"))
    if kernels() == "c":
        found.append(Finding("codec kernels", "ok", "compiled"))
    else:
        advice = "install a C compiler and FastCheck again: encoding gets about 1.25 times as fast"
        found.append(Finding("codec kernels", "advice", "numpy", advice))
    for name, (what, extra) in _OPTIONAL.items():
        try:
            found.append(Finding(name, "ok", version_of(name)))
        except PackageNotFoundError:
            advice = f"only if you want {what}: pip install 'fastcheck-dask[{extra}]'"
            found.append(Finding(name, "ok", "not installed", advice))
    return found


def machine(settings: Settings) -> list[Finding]:
    """Look at shared memory and cores."""
    folder = Path(settings.local_dir) if settings.local_dir else SHARED_MEMORY
    try:
        room = os.statvfs(folder)
    except OSError as error:
        advice = "make the folder, or set fastcheck.local-dir to one that is there"
        return [Finding("local tier", "problem", f"{folder}: {error.strerror}", advice)]
    free, total = room.f_bavail * room.f_frsize, room.f_blocks * room.f_frsize
    return [
        local_tier(str(folder), free, total, memory_bytes=memory_limit_bytes()),
        cores(len(os.sched_getaffinity(0)), settings.encoders),
    ]


def local_tier(folder: str, free: int, total: int, *, memory_bytes: int) -> Finding:
    """Judge the room of the local tier. Pure."""
    found = f"{folder}: {format_bytes(free)} free of {format_bytes(total)}; the state fits twice up to "
    found += format_bytes(free // 2)
    if total < memory_bytes * _SHARED_SHARE:
        advice = (
            f"it is small beside {format_bytes(memory_bytes)} of memory: enlarge it (in a container "
            "--shm-size, else mount -o remount,size=...), or set fastcheck.local-dir"
        )
        return Finding("local tier", "advice", found, advice)
    return Finding("local tier", "ok", found)


def cores(available: int, encoders: int) -> Finding:
    """Judge the cores. Pure."""
    found = f"{available} cores, {encoders} encoder processes"
    if encoders > available:
        advice = f"more encoders than cores: set fastcheck.encoders to at most {available}"
        return Finding("cores", "advice", found, advice)
    if available < _FEW_CORES:
        return Finding("cores", "advice", found, "encoding competes with the training for them")
    return Finding("cores", "ok", found)


def checkpoint_dir(
    location: str,
    opener: Callable[[str], ObjectStore] = open_store,
    *,
    environment: Mapping[str, str] = os.environ,
) -> list[Finding]:
    """Write an object into the object tier, read it, and delete it; a folder that is missing is not made.

    Parameters
    ----------
    location : str
        As `FastCheckManager` takes it.
    opener : callable
        Opens it.
    environment : mapping
        Of this process.
    """
    found = []
    if location.startswith("s3://"):
        found.append(_credentials(environment))
    elif not is_url(location) and not Path(location).exists():
        parent = next(path for path in Path(location).absolute().parents if path.exists())
        if os.access(parent, os.W_OK | os.X_OK):
            return [Finding("checkpoint dir", "ok", f"{location} is not there and can be made")]
        advice = "make it, or give the user of the training write access"
        return [Finding("checkpoint dir", "problem", f"{location} cannot be made in {parent}", advice)]
    name, wanted = f".fastcheck-doctor-{new_token()}", b"fastcheck doctor"
    try:
        store = opener(location)
        try:
            store.write(name, wanted)
            read = store.read(name)
        finally:
            store.delete(name)
    except FastCheckError as error:
        advice = "every storage node and the training host have to be able to write there"
        return [*found, Finding("checkpoint dir", "problem", str(error), advice)]
    if read != wanted:
        advice = "do not keep checkpoints there"
        return [*found, Finding("checkpoint dir", "problem", f"{location} gave other bytes back", advice)]
    advice = "" if is_url(location) else "storage nodes on other machines need the same folder (NFS), or S3"
    return [*found, Finding("checkpoint dir", "ok", f"{location}: written, read, deleted", advice)]


def _credentials(environment: Mapping[str, str]) -> Finding:
    names = sorted(name for name in environment if name.startswith("AWS_"))
    advice = "the storage nodes need credentials, too"
    if "AWS_ACCESS_KEY_ID" in names or "AWS_PROFILE" in names or "AWS_WEB_IDENTITY_TOKEN_FILE" in names:
        return Finding("s3 credentials", "ok", f"in the environment: {', '.join(names)}", advice)
    return Finding(
        "s3 credentials", "advice", "none in the environment: those of the machine are used", advice
    )
