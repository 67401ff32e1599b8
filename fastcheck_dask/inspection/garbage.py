"""Remove what saves that died have left in a location; never anything committed, or being written."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from fastcheck_dask.engine.roots import folder_name, unneeded
from fastcheck_dask.errors import CommitConflictError, ConfigError, TierError
from fastcheck_dask.ids import joined, parted
from fastcheck_dask.inspection.leftovers import Kind, Leftover, find
from fastcheck_dask.inspection.ranks import rank_folders, rank_prefix
from fastcheck_dask.tiers.checkpoint_folder import COMMITS, CheckpointFolder, marker_path

GRACE_SECONDS = 86400.0
#: A save may write nothing for a while: its nodes may be busy, and clocks differ.
LEAST_GRACE_SECONDS = 600.0
_RECENT = "it was added to within the grace time: a save may be under way"


@dataclass(frozen=True)
class Collected:
    """What was removed, and what was left."""

    removed: tuple[Leftover, ...]
    #: Each with the reason.
    kept: tuple[tuple[Leftover, str], ...]

    @property
    def nbytes(self) -> int:
        """Bytes that were removed."""
        return sum(leftover.nbytes for leftover in self.removed)


def collect(
    folder: CheckpointFolder,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    now: Callable[[], float] = time.time,
) -> Collected:
    """Remove unfinished attempts, temporaries, and manifests without a checkpoint.

    Parameters
    ----------
    folder : CheckpointFolder
        The location. Its run may be going on.
    grace_seconds : float
        What was added to more recently than that is taken to be in use; at least ten minutes.
    dry_run : bool
        Remove nothing, only say what would be.
    now : callable
        Seconds, by the clock of this machine.

    Returns
    -------
    Collected

    Raises
    ------
    ConfigError
        If the grace is too short.
    TierError
        If the store refuses.

    Notes
    -----
    A checkpoint that is complete and has no marker is kept: the marker may have been lost. Whether there is a
    marker is asked once more just before anything is removed.
    """
    if not grace_seconds >= LEAST_GRACE_SECONDS:
        raise ConfigError(
            f"a grace of at least {LEAST_GRACE_SECONDS:g} s is wanted, so that no save that is being written "
            f"is touched; got {grace_seconds:g} s"
        )
    removed, kept = [], []
    oldest = now() - grace_seconds
    stale_temporaries = False
    for leftover in find(folder.store.listing(""), folder.store.temporaries()):
        if (reason := _kept(folder, leftover, oldest)) is not None:
            kept.append((leftover, reason))
            continue
        try:
            if leftover.kind is Kind.TEMPORARY:
                stale_temporaries = True
            elif not dry_run:
                _remove(folder, leftover)
        except CommitConflictError as error:
            kept.append((leftover, str(error)))
        else:
            removed.append(leftover)
    if stale_temporaries and not dry_run:
        folder.store.remove_temporaries(older_than_seconds=grace_seconds)
    return Collected(tuple(removed), tuple(kept))


def collect_all(
    folder: CheckpointFolder,
    *,
    grace_seconds: float = GRACE_SECONDS,
    dry_run: bool = False,
    now: Callable[[], float] = time.time,
) -> Collected:
    """Do the same in the folders of all ranks, and at the roots of groups, too; see :func:`collect`."""
    found = collect(folder, grace_seconds=grace_seconds, dry_run=dry_run, now=now)
    removed, kept = list(found.removed), list(found.kept)
    of_roots = _collect_roots(folder, grace_seconds=grace_seconds, dry_run=dry_run, now=now)
    removed += of_roots.removed
    kept += of_roots.kept
    for rank, part in rank_folders(folder, folder.store.list("")).items():
        of_rank = collect(part, grace_seconds=grace_seconds, dry_run=dry_run, now=now)
        removed += [_named(one, rank) for one in of_rank.removed if one.kind is not Kind.TEMPORARY]
        kept += [(_named(one, rank), why) for one, why in of_rank.kept if one.kind is not Kind.TEMPORARY]
        of_roots = _collect_roots(part, grace_seconds=grace_seconds, dry_run=dry_run, now=now)
        removed += of_roots.removed
        kept += of_roots.kept
    return Collected(tuple(removed), tuple(kept))


def _collect_roots(
    folder: CheckpointFolder, *, grace_seconds: float, dry_run: bool, now: Callable[[], float]
) -> Collected:
    """Do the same where groups of checkpoints lie, and with what was committed there and nothing needs.

    Only in folders of the run itself: of a copy of it, the original may need what the copy does not.
    """
    links = (link for marker in folder.committed() for link in marker.refs if link.location is not None)
    removed: list[Leftover] = []
    kept: list[tuple[Leftover, str]] = []
    own = folder_name(folder.store)
    for location, link in {str(link.location): link for link in links}.items():
        try:
            part = folder.at(link)
            if parted(parted(location)[0])[1] != own:
                continue
            found = collect(part, grace_seconds=grace_seconds, dry_run=dry_run, now=now)
            removed += [_at(one, location) for one in found.removed]
            kept += [(_at(one, location), why) for one, why in found.kept]
            for marker in unneeded(folder, part, location=location):
                if (one := _unneeded(part, marker.directory)).modified_unix > now() - grace_seconds:
                    kept.append((_at(one, location), _RECENT))
                    continue
                if not dry_run:
                    part.remove(marker.directory)
                removed.append(_at(one, location))
        except TierError as error:
            kept.append((Leftover(Kind.UNNEEDED, location, 0, 0, 0.0), f"it cannot be looked at: {error}"))
    return Collected(tuple(removed), tuple(kept))


def _unneeded(part: CheckpointFolder, directory: str) -> Leftover:
    marker = [stored for stored in part.store.listing(COMMITS) if stored.path == marker_path(directory)]
    members = [*part.store.listing(directory), *marker]
    return Leftover(
        Kind.UNNEEDED,
        directory,
        len(members),
        sum(stored.nbytes for stored in members),
        max((stored.modified_unix for stored in members), default=0.0),
    )


def _at(leftover: Leftover, location: str) -> Leftover:
    return replace(leftover, name=joined(location, leftover.name))


def _named(leftover: Leftover, rank: int) -> Leftover:
    """Name what lies in a rank's folder from the location of all."""
    return replace(leftover, name=rank_prefix(rank) + leftover.name)


def _kept(folder: CheckpointFolder, leftover: Leftover, oldest: float) -> str | None:
    """Say why something is not removed; None if it is."""
    if leftover.modified_unix > oldest:
        return _RECENT
    if leftover.kind is Kind.UNMARKED:
        return "it is complete, and its commit marker may have been lost"
    directory = leftover.name.partition("/")[0]
    if leftover.kind is Kind.UNFINISHED and folder.store.exists(marker_path(directory)):
        return "it was committed just now"
    return None


def _remove(folder: CheckpointFolder, leftover: Leftover) -> None:
    if leftover.kind is Kind.UNFINISHED:
        folder.clear_uncommitted(leftover.name)
        return
    directory = leftover.name.rpartition("/")[2].removesuffix(".json")
    if folder.store.exists(marker_path(directory)):
        raise CommitConflictError(f"{directory} was committed just now")
    folder.store.delete(leftover.name)
