"""One live manager for each run on this host, and for each checkpoint directory."""

from __future__ import annotations

import itertools
import logging
from pathlib import Path

from fastcheck_dask.errors import RunInUseError, TierError
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.local import LocalTier, SlotState
from fastcheck_dask.tiers.process_lock import ProcessLock

log = logging.getLogger(__name__)

_LOCK = "trainer.lock"


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
    takeover : bool
        Whether a live manager of the same run may have the directory: it is about to be fenced.

    Raises
    ------
    RunInUseError
        If another live manager has either.
    """

    def __init__(self, run: str, local: Path, location: Path | None, *, takeover: bool = False) -> None:
        self._role = f"trainer of run {run}"
        self._locks: list[ProcessLock] = []
        try:
            self._take(local / _LOCK, f"run {run}", takeover=False)
            if location is not None:
                self._take_folder(location, takeover=takeover)
        except BaseException:
            self.release()
            raise

    def _take_folder(self, location: Path, *, takeover: bool) -> None:
        try:
            (location / PRIVATE).mkdir(parents=True, exist_ok=True)
            self._take(location / PRIVATE / _LOCK, f"the checkpoint directory {location}", takeover=takeover)
        except (TierError, OSError) as error:
            # A file system without locks, or read-only now: the coordinator still refuses a second owner.
            log.warning("%s is not locked against other runs: %s", location, error)

    def _take(self, path: Path, what: str, *, takeover: bool) -> None:
        lock = ProcessLock(path, role=self._role)
        if lock.acquire():
            self._locks.append(lock)
            return
        holder = lock.holder()
        if takeover and holder is not None and holder.role == self._role:
            log.warning("%s is taken over from %s", what, holder)
            return
        raise RunInUseError(
            f"{what} is used by {holder or 'another manager'}; close it, use another checkpoint_dir or "
            "run_id, or take the run from it with takeover=True"
        )

    def release(self) -> None:
        """Give both back. Idempotent."""
        for lock in self._locks:
            lock.release()


def root_for_takeover(run: str, root: str | None) -> str:
    """Return a root of the local tier in which no live manager has the run, and remove what dead ones left.

    An owner that is taken over may be asleep in the middle of a copy: its slots are left to it, or it would
    write into ours when it wakes up.
    """
    base = _base(run, root)
    for place in base.glob("takeover~*"):
        if (place / run).is_dir() and not _in_use(place / run):
            with LocalTier(run, place) as left:
                left.remove()
    # No run can have such a name.
    places = itertools.chain((base,), (base / f"takeover~{number}" for number in itertools.count(1)))
    return str(next(place for place in places if not _in_use(place / run)))


def root_after_takeover(run: str, root: str | None) -> str | None:
    """Return the root of the local tier in which the run's last owner was, and remove what others left.

    An owner that had taken the run over, and died, left its slots apart from the usual ones. While the one
    before it lives, the usual ones are locked, and nothing is changed.
    """
    base = _base(run, root)
    apart = [place for place in base.glob("takeover~*") if (place / run).is_dir()]
    if not apart or _held(base / run / _LOCK):
        return root
    left = [place for place in (base, *apart) if not _held(place / run / _LOCK)]
    newest = max(left, key=lambda place: _generation(run, place))
    for place in left:
        if place != newest and not _in_use(place / run):
            with LocalTier(run, place) as tier:
                tier.remove()
    return str(newest)


def _base(run: str, root: str | None) -> Path:
    with LocalTier(run, Path(root) if root else None) as usual:
        return usual.path.parent


def _generation(run: str, place: Path) -> int:
    with LocalTier(run, place, readonly=True) as tier:
        found = [slot.status for slot in tier.slots]
    return max((status.generation or 0 for status in found if status.state is SlotState.COMMITTED), default=0)


def _held(lock: Path) -> bool:
    return ProcessLock(lock).holder() is not None


def _in_use(folder: Path) -> bool:
    return any(_held(folder / name) for name in (_LOCK, "agent.lock"))
