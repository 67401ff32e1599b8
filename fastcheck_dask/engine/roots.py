"""Where groups lie that have roots of their own, and what of them is removed there.

A group is a checkpoint of its own at its root, in a folder that belongs to this run and this group alone.
Only checkpoints of the run refer to what is there, so that those say what can go.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

from fastcheck_dask.config import Group
from fastcheck_dask.engine.chains import needed_of
from fastcheck_dask.errors import CommitConflictError, ShardUnavailableError
from fastcheck_dask.ids import joined, new_token, normalised, parted
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, Survey
from fastcheck_dask.tiers.commit_marker import CommitMarker
from fastcheck_dask.tiers.joint_marker import rank_of_location
from fastcheck_dask.tiers.object_store import is_there, open_existing, open_store
from fastcheck_dask.tiers.store import ObjectStore

log = logging.getLogger(__name__)

_IDENTITY = f"{PRIVATE}/identity"
_NOT_IN_NAMES = re.compile(r"[^A-Za-z0-9._=+-]")


def folder_name(store: ObjectStore) -> str | None:
    """Return the name of the folder that a run has at every root; None if it never had one.

    No two locations have the same: it is made of what is drawn at random for each, and of where it is, since
    a location may have been copied with all that is in it.
    """
    try:
        identity = store.read(_IDENTITY)
    except ShardUnavailableError:
        return None
    where = normalised(store.location)
    return f"{_shown(where)}-{hashlib.sha256(identity + b' ' + where.encode()).hexdigest()[:16]}"


def _shown(location: str) -> str:
    """Return what a location is called, for who looks at a root; of a rank's folder, also whose it is.

    >>> _shown("s3://bucket/run-7?region=eu"), _shown("/data/run-7/rank-00003")
    ('run-7', 'run-7-rank-00003')
    """
    above, last = parted(location.rstrip("/"))
    name = f"{parted(above)[1][:48]}-{last}" if rank_of_location(last) is not None else last
    return _NOT_IN_NAMES.sub("-", name).lstrip("._=+-")[:64] or "run"


def locations(store: ObjectStore, groups: Iterable[Group]) -> dict[str, str]:
    """Return where the groups of a run lie that have roots, by name.

    Raises
    ------
    TierError
        If the location of the run cannot be asked.
    """
    roots = {group.name: group.root for group in groups if group.root is not None}
    if not roots:
        return {}
    name = folder_name(store)
    if name is None:
        store.create(_IDENTITY, new_token().encode())
        name = folder_name(store)
        assert name is not None, "what was created is there"
    return {group: joined(joined(root, name), group) for group, root in roots.items()}


def groups_to_text(groups: Sequence[Group]) -> str:
    """Return groups as text for who has to persist when this process is gone; empty if none has a root."""
    if not any(group.root is not None for group in groups):
        return ""
    return json.dumps([asdict(group) for group in groups], sort_keys=True)


def groups_from_text(text: str) -> tuple[Group, ...]:
    """Undo :func:`groups_to_text`, but for the intervals: who writes a last checkpoint writes all of it.

    What cannot be read is none: then everything lies in one location.
    """
    if not text:
        return ()
    try:
        return tuple(replace(Group(**one), persist_every=1) for one in json.loads(text))
    except (ValueError, TypeError) as error:
        log.warning("groups are not written to their roots: they cannot be read: %s", error)
        return ()


def open_root(folder: CheckpointFolder, location: str) -> CheckpointFolder:
    """Return the folder of a group at its root; it is made if checkpoints of the run have nothing there yet.

    Raises
    ------
    RootAwayError
        If it should be there and is not: what were written in its place would be lost when it comes back.
    """
    known = not is_there(location) and _named(folder.committed(), location)
    return CheckpointFolder(open_existing(location) if known else open_store(location))


def clear_rivals(
    folder: CheckpointFolder, part: CheckpointFolder, *, location: str, generation: int, token: str
) -> None:
    """Remove what a failed attempt of another author committed at a root as part of a generation.

    `location` is that of `part`, as checkpoints in `folder` name it.

    Raises
    ------
    CommitConflictError
        If a checkpoint of the run needs it, or that cannot be told.
    """
    rivals = [m for m in part.committed() if m.generation == generation and m.token != token]
    if not rivals:
        return
    survey = folder.survey()
    for marker in rivals:
        if survey.damaged or marker.directory in _named(survey.committed, location):
            raise CommitConflictError(
                f"{marker.directory} in {location} has token {marker.token}, and a checkpoint in "
                f"{folder.store.location} may need it; this author's token is {token}"
            )
        log.warning("%s in %s was left by a save that failed; it is removed", marker.directory, location)
        part.remove(marker.directory)


def removable(
    parts: Sequence[CommitMarker], committed: Sequence[CommitMarker], *, location: str
) -> list[CommitMarker]:
    """Say which checkpoints at a root no checkpoint of the run needs; pure.

    Parameters
    ----------
    parts : sequence of CommitMarker
        What is there, all of the run and of one group.
    committed : sequence of CommitMarker
        What is in the location of the run.
    location : str
        The folder of the group.

    Returns
    -------
    list of CommitMarker
        The newest first: nothing goes before what needs it. What is newer than the newest of the run may be
        part of a save that is under way, and the newest may be the base of one: they stay.
    """
    if not committed or not parts:
        return []
    newest = max(marker.generation for marker in committed)
    named = _named(committed, location)
    kept = [m for m in parts if m.directory in named or m.generation > newest]
    kept.append(max(parts, key=lambda marker: marker.generation))
    by_directory = {marker.directory: marker for marker in parts}
    needed = {other.directory for marker in kept for other in needed_of(marker, by_directory)}
    left = [marker for marker in parts if marker.directory not in needed]
    return sorted(left, key=lambda marker: -marker.generation)


def unneeded(folder: CheckpointFolder, part: CheckpointFolder, *, location: str) -> list[CommitMarker]:
    """Return what :func:`removable` says of a folder at a root; nothing while a marker cannot be read."""
    # First what is there: what is committed meanwhile needs nothing that is not.
    parts, survey = part.survey(), folder.survey()
    if _unreadable(parts, part) or _unreadable(survey, folder):
        return []
    return removable(parts.committed, survey.committed, location=location)


def retire_parts(folder: CheckpointFolder, groups: Iterable[Group]) -> list[CommitMarker]:
    """Remove at the roots of groups what no checkpoint of the run needs any more.

    Raises
    ------
    TierError
        If a store refused; what was removed until then is gone entirely or will be next time.
    """
    removed = []
    for name, location in locations(folder.store, groups).items():
        if not is_there(location):
            # Nothing was written there yet, or it is not mounted: then no folder may stand there.
            continue
        part = CheckpointFolder(open_store(location))
        part.finish_removals()
        for marker in unneeded(folder, part, location=location):
            part.remove(marker.directory)
            removed.append(marker)
            log.info("generation %d of group %s was removed from %s", marker.generation, name, location)
    return removed


def _named(committed: Iterable[CommitMarker], location: str) -> set[str]:
    """Return the directories of a location that checkpoints of another one name."""
    return {link.directory for m in committed for link in m.refs if link.location == location}


def _unreadable(survey: Survey, folder: CheckpointFolder) -> bool:
    if survey.damaged:
        log.warning(
            "nothing is removed while a commit marker in %s cannot be read: %s",
            folder.store.location,
            survey.damaged[0].path,
        )
    return bool(survey.damaged)
