"""One live manager for each run on this host, and for each checkpoint directory."""

from __future__ import annotations

import logging
from pathlib import Path

from fastcheck_dask.errors import RunInUseError, TierError
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.process_lock import ProcessLock

log = logging.getLogger(__name__)


class Ownership:
    """Locks that end with the process: on the run's slots, and on the checkpoint directory.

    Parameters
    ----------
    run : str
        The run.
    local : Path
        Folder of its slots.
    location : Path or None
        The checkpoint directory, if it is a folder. Another run must not write into it, even before either
        has committed.

    Raises
    ------
    RunInUseError
        If another live manager has either.
    """

    def __init__(self, run: str, local: Path, location: Path | None) -> None:
        self._locks: list[ProcessLock] = []
        try:
            self._take(local / "trainer.lock", f"run {run}")
            if location is not None:
                self._take_folder(location)
        except BaseException:
            self.release()
            raise

    def _take_folder(self, location: Path) -> None:
        try:
            (location / PRIVATE).mkdir(parents=True, exist_ok=True)
            self._take(location / PRIVATE / "trainer.lock", f"the checkpoint directory {location}")
        except (TierError, OSError) as error:
            # A file system without locks, or read-only now: the coordinator still refuses a second owner.
            log.warning("%s is not locked against other runs: %s", location, error)

    def _take(self, path: Path, what: str) -> None:
        lock = ProcessLock(path, role="trainer")
        if not lock.acquire():
            raise RunInUseError(
                f"{what} is used by {lock.holder() or 'another manager'}; close it, or use another "
                "checkpoint_dir or run_id"
            )
        self._locks.append(lock)

    def release(self) -> None:
        """Give both back. Idempotent."""
        for lock in self._locks:
            lock.release()
