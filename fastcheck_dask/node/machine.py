"""How much memory this process may use: what the machine has, or less where a container limits it."""

from __future__ import annotations

import re
from pathlib import Path

from fastcheck_dask.errors import ConfigError

_MEMORY_TOTAL = re.compile(r"^MemTotal:\s+(\d+) kB$", re.MULTILINE)


def memory_limit_bytes(root: Path = Path("/")) -> int:
    """Return the smaller of physical memory and the limits of the cgroups that this process is in.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are.

    Raises
    ------
    ConfigError
        If the system does not say how much memory it has.

    Notes
    -----
    A limit may be on any cgroup above the one of the process (v1 and v2). In a container the folders of the
    upper ones, and often the own one, are not there; what is there stands at the root of the tree.
    """
    try:
        found = _MEMORY_TOTAL.search((root / "proc/meminfo").read_text(encoding="ascii"))
    except OSError as error:
        raise ConfigError(
            f"the memory of this machine is not known ({error}); give --memory as a size"
        ) from error
    if found is None:
        raise ConfigError("the memory of this machine is not known; give --memory as a size")
    return min([int(found[1]) * 1024, *_cgroup_limits(root)])


def check_memory(wanted_bytes: int, limit_bytes: int) -> None:
    """Raise `ConfigError` unless a node can take so many bytes.

    Parameters
    ----------
    wanted_bytes : int
        What checkpoints may take.
    limit_bytes : int
        What the process may use at all.
    """
    if wanted_bytes < 1:
        raise ConfigError(f"the memory of a storage node must be at least 1 byte, got {wanted_bytes}")
    if wanted_bytes > limit_bytes:
        raise ConfigError(
            f"the memory of a storage node would be {wanted_bytes:,} bytes, and this machine or its "
            f"container has {limit_bytes:,}; give less (--memory), or a share of it (--memory 50%)"
        )


def _cgroup_limits(root: Path) -> list[int]:
    """Return every limit that the cgroups of this process have."""
    limits = []
    for file in _limit_files(root):
        try:
            text = file.read_text(encoding="ascii").strip()
        except OSError:
            continue
        # "max" in v2; v1 writes a number beyond any memory.
        if text.isdigit() and int(text) > 0:
            limits.append(int(text))
    return limits


def _limit_files(root: Path) -> list[Path]:
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    files = [
        root / "sys/fs/cgroup/memory.max",
        root / "sys/fs/cgroup/memory/memory.limit_in_bytes",
    ]
    for line in lines:
        # hierarchy:controllers:/path, with no controllers in v2
        _, controllers, path = ([*line.split(":", 2), "", "", ""])[:3]
        if controllers == "":
            tree, name = root / "sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            tree, name = root / "sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        files += [tree.joinpath(*parts[:count], name) for count in range(1, len(parts) + 1)]
    return files
