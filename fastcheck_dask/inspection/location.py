"""From what a user names to the checkpoint that is meant; nothing is ever made on the way."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from urllib.parse import urlsplit

from fastcheck_dask.errors import CheckpointNotFoundError, ConfigError
from fastcheck_dask.ids import is_url, normalised, parse_directory_name, parted
from fastcheck_dask.inspection.ranks import rank_folder
from fastcheck_dask.layout.zarr_tree import PRIVATE
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker
from fastcheck_dask.tiers.joint_marker import JointFolder, location_of_rank
from fastcheck_dask.tiers.object_store import open_store

#: Tags that an error names.
_SHOWN_TAGS = 8


def open_folder(url: str) -> tuple[CheckpointFolder, str | None]:
    """Open a location to read it.

    Parameters
    ----------
    url : str
        A checkpoint directory (a folder, ``file://...``, ``s3://...``), or the directory of one checkpoint
        in it (``.../00000012-tag``).

    Returns
    -------
    CheckpointFolder
        The location.
    str or None
        Name of the directory, if one checkpoint was named.

    Raises
    ------
    ConfigError
        If there is no such folder, or a checkpoint's directory was taken away from its location.
    """
    local = _local_path(url)
    if local is not None and not local.is_dir():
        what = "is a file" if local.exists() else "does not exist"
        raise ConfigError(f"{url} {what}; wanted a checkpoint directory, or s3://bucket/folder")
    # One spelling, so that "." and links lead to the location as well.
    url = normalised(url)
    above, name = parted(url)
    if parse_directory_name(name) is None or _is_location(url):
        return CheckpointFolder(open_store(url)), None
    if not above or not _is_location(above):
        raise ConfigError(
            f"{url} is the directory of a checkpoint, and {PRIVATE}/ is not beside it: it holds the commit "
            "marker and the manifest; name the checkpoint where it was saved, or copy them along"
        )
    return CheckpointFolder(open_store(above)), name


def choose(
    folder: CheckpointFolder,
    committed: Sequence[CommitMarker],
    tag: str | None,
    *,
    directory: str | None = None,
) -> CommitMarker:
    """Return the marker of the checkpoint that is meant.

    Parameters
    ----------
    folder : CheckpointFolder
        The location, for the message of an error.
    committed : sequence of CommitMarker
        Oldest generation first.
    tag : str or None
        A tag, of which the newest generation is meant, or the name of a directory (``00000012-tag``); None
        means the newest checkpoint.
    directory : str, optional
        The directory that the location itself named.

    Raises
    ------
    CheckpointNotFoundError
        If there is none; names those that there are.
    """
    for marker in reversed(committed):
        if directory is not None and marker.directory != directory:
            continue
        if tag is None or tag in (marker.tag, marker.directory):
            return marker
    wanted = " ".join(filter(None, (directory, tag)))
    tags = ", ".join(marker.tag for marker in reversed(committed[-_SHOWN_TAGS:])) or "none"
    more = f" and {len(committed) - _SHOWN_TAGS} older ones" if len(committed) > _SHOWN_TAGS else ""
    raise CheckpointNotFoundError(
        f"{folder.store.location} has no committed checkpoint{f' {wanted!r}' if wanted else ''}; the newest "
        f"tags are: {tags}{more}{of_ranks(folder.store.location)}"
    )


def open_part(
    url: str, tag: str | None, *, rank: int | None = None
) -> tuple[CheckpointFolder, list[CommitMarker], CommitMarker]:
    """Open the checkpoint that is meant, of a location of several ranks the part of one.

    Returns
    -------
    CheckpointFolder
        Where it lies.
    list of CommitMarker
        All that are committed there, oldest first.
    CommitMarker
        Its own.

    Raises
    ------
    ConfigError
        If there is no such folder or rank.
    CheckpointNotFoundError
        If there is no such checkpoint, or the newest one is of several ranks and none was named.
    """
    folder, directory = open_folder(url)
    if rank is not None:
        folder, committed = rank_folder(folder, rank)
    else:
        committed = folder.committed()
    marker = choose(folder, committed, tag, directory=directory)
    if rank is None and tag is None and directory is None:
        joint = JointFolder(folder.store.location).markers()
        if joint and joint[-1].created_unix > marker.created_unix:
            location = folder.store.location
            raise CheckpointNotFoundError(
                f"the newest checkpoint in {location} is {joint[-1].tag!r} of {joint[-1].world_size} ranks"
                f"{of_ranks(location)}; or name the tag of one that a single process saved ({marker.tag!r})"
            )
    return folder, committed, marker


def of_ranks(location: str) -> str:
    """Return where the checkpoints of a run with several ranks lie; empty for a location of no such run."""
    markers = JointFolder(location).markers()
    if not markers:
        return ""
    return (
        f"; {markers[-1].world_size} ranks save here, each into a folder of its own: give a rank (--rank 0), "
        f"or name one of them, {location_of_rank(location, 0)}"
    )


def _local_path(url: str) -> Path | None:
    if not is_url(url):
        return Path(url).expanduser()
    parts = urlsplit(url)
    return Path(parts.path) if parts.scheme == "file" else None


def _is_location(url: str) -> bool:
    local = _local_path(url)
    if local is not None:
        return (local / PRIVATE).is_dir()
    return bool(open_store(url).list(PRIVATE))
