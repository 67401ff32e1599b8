"""Which process is which, and whether it still runs, from Linux's /proc."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from fastcheck_dask.errors import ConfigError

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


@dataclass(frozen=True)
class ProcessIdentity:
    """One process of one boot of this machine: a pid alone is given again to others."""

    pid: int
    #: Clock ticks since boot at which it started, field 22 of /proc/<pid>/stat.
    started: int
    boot: str

    @classmethod
    def of_this_process(cls) -> ProcessIdentity:
        """Return who we are; raise `ConfigError` where there is no /proc."""
        pid = os.getpid()
        found = _state_and_start(pid)
        if found is None or not _BOOT_ID.exists():
            raise ConfigError(
                "coordination through a file needs Linux's /proc to tell live processes from dead ones; "
                "use zk://host:port/root here"
            )
        return cls(pid, found[1], boot_id())

    def alive(self) -> bool:
        """Say whether that very process still runs; a zombie does not."""
        if self.boot != boot_id():
            return False
        found = _state_and_start(self.pid)
        return found is not None and found[0] not in "ZXx" and found[1] == self.started


def boot_id() -> str:
    """Return the random id that the kernel drew when it booted."""
    return _BOOT_ID.read_text().strip()


def _state_and_start(pid: int) -> tuple[str, int] | None:
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The second field is the program's name in parentheses, which may itself hold spaces and parentheses.
    after_name = stat.rpartition(")")[2].split()
    return after_name[0], int(after_name[19])
