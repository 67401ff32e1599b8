"""The local tier: two slots in shared memory, which outlive the process that writes them."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
from pathlib import Path
from types import TracebackType

from fastcheck_dask.errors import ConfigError, LayoutError
from fastcheck_dask.ids import check_name
from fastcheck_dask.tiers.slot import Slot
from fastcheck_dask.tiers.slot_header import SlotState, SlotStatus

__all__ = ["LocalTier", "Slot", "SlotState", "SlotStatus"]

SHARED_MEMORY = Path("/dev/shm")  # noqa: S108


class LocalTier:
    """The two slots of one run on this host.

    Parameters
    ----------
    run : str
        The run id; names the folder.
    root : Path, optional
        Where the run's folder stands; ``/dev/shm/fastcheck-<uid>`` unless given.
    readonly : bool
        Make nothing, refuse transitions, and map the data read-only.

    Raises
    ------
    ConfigError
        If a folder cannot be made, or the run's folder (or the default root) is a symbolic link, belongs to
        somebody else, or is open to others.
    """

    def __init__(self, run: str, root: Path | None = None, *, readonly: bool = False) -> None:
        check_name(run, "run")
        self._root = SHARED_MEMORY / f"fastcheck-{os.geteuid()}" if root is None else Path(root).absolute()
        self._path = self._root / run
        self._readonly = readonly
        self._prepare(private_root=root is None)
        self.slots = (
            Slot(self._path / "slot0", readonly=readonly),
            Slot(self._path / "slot1", readonly=readonly),
        )

    @property
    def path(self) -> Path:
        """Folder of the run."""
        return self._path

    def close(self) -> None:
        """Release both mappings; the slots stay. Idempotent."""
        for slot in self.slots:
            slot.close()

    def remove(self) -> None:
        """Unlink everything of the run, its folder, and the root if nothing else is in it. Idempotent.

        To be called by the process that owns the run: others' locks in the folder are unlinked, too.
        `LayoutError` if the tier was opened read-only.
        """
        if self._readonly:
            raise LayoutError(f"{self._path}: this tier was opened read-only")
        self.close()
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(self._path)
        # Other runs are in it, or it is a mount point.
        with contextlib.suppress(OSError):
            self._root.rmdir()

    def __enter__(self) -> LocalTier:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _prepare(self, *, private_root: bool) -> None:
        # Another run's `remove` may take the empty root away between the two calls.
        for last in (False, False, True):
            try:
                if private_root:
                    _private_folder(self._root, make=not self._readonly)
                elif not self._readonly:
                    self._root.mkdir(parents=True, exist_ok=True)
                _private_folder(self._path, make=not self._readonly)
            except FileNotFoundError as error:
                if last:
                    raise ConfigError(_cannot_make(self._path, error)) from error
            except OSError as error:
                raise ConfigError(_cannot_make(self._path, error)) from error
            else:
                return


def _cannot_make(path: Path, error: OSError) -> str:
    return f"local folder {path}: {error.strerror or error}; choose another with local_dir=..."


def _private_folder(path: Path, *, make: bool) -> None:
    """Make a folder that only we can enter, or check that the one which is there is such."""
    if make:
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
    try:
        info = path.lstat()
    except FileNotFoundError:
        if make:
            raise
        return
    if not stat.S_ISDIR(info.st_mode):
        wrong = "is not a folder (a symbolic link is not followed here)"
    elif info.st_uid != os.geteuid():
        wrong = f"belongs to user {info.st_uid}, not to {os.geteuid()}"
    elif info.st_mode & 0o077:
        wrong = f"is open to other users (mode {stat.S_IMODE(info.st_mode):04o}, wanted 0700)"
    else:
        return
    raise ConfigError(f"local folder {path} {wrong}; remove it, or choose another with local_dir=...")
