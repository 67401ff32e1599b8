"""The cgroup whose memory a process uses, and how many of its processes the kernel ended for want of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

_ROOT = Path("/")
#: Of cgroups v2 and v1: in both, a line ``oom_kill <count>``.
_V2, _V1 = "memory.events", "memory.oom_control"


@dataclass(frozen=True)
class MemoryGroup:
    """A cgroup as it was when it was looked at."""

    #: Its folder.
    path: str
    #: Number of the folder: another container may have the same path, and a new one the old one's.
    inode: int
    #: Processes of it that the kernel has ended for want of memory, its own limit or the machine's.
    oom_kills: int

    def now(self) -> MemoryGroup | None:
        """Return how it is now; None if it is not there any more, or not to be seen from here."""
        found = _read(Path(self.path))
        return found if found is not None and found.inode == self.inode else None


def group_of_this_process(root: Path = _ROOT) -> MemoryGroup | None:
    """Return the cgroup that counts for this process; None if none can be seen.

    Parameters
    ----------
    root : Path
        Where ``proc`` and ``sys`` are.

    Notes
    -----
    In a container the folder of the own cgroup is often the root of the tree, whatever its path is outside.
    """
    try:
        lines = (root / "proc/self/cgroup").read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    for line in lines:
        # hierarchy:controllers:/path, with no controllers in v2
        _, controllers, path = ([*line.split(":", 2), "", "", ""])[:3]
        if controllers not in ("", "memory"):
            continue
        tree = root / ("sys/fs/cgroup/memory" if controllers else "sys/fs/cgroup")
        parts = [part for part in path.split("/") if part not in ("", ".", "..")]
        for folder in (tree.joinpath(*parts), tree):
            if (found := _read(folder)) is not None:
                return found
    return None


def _read(folder: Path) -> MemoryGroup | None:
    for name in (_V2, _V1):
        try:
            inode = folder.stat().st_ino
            lines = (folder / name).read_text(encoding="ascii").splitlines()
        except OSError:
            continue
        counts = [line.split()[1] for line in lines if line.startswith("oom_kill ")]
        if counts and counts[0].isdigit():
            return MemoryGroup(str(folder), inode, int(counts[0]))
    return None
