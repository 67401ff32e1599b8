"""What lies in a location and belongs to no committed checkpoint. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum

from fastcheck_dask.ids import parse_directory_name
from fastcheck_dask.layout.zarr_tree import DOCUMENT, manifest_path
from fastcheck_dask.tiers import plans
from fastcheck_dask.tiers.checkpoint_folder import marker_path
from fastcheck_dask.tiers.store import Stored


class Kind(StrEnum):
    """What a leftover is."""

    #: A save that did not finish, or that is being written.
    UNFINISHED = "unfinished"
    #: A checkpoint that was written to its end and has no commit marker: the marker may have been lost.
    UNMARKED = "unmarked"
    #: A manifest without a checkpoint.
    MANIFEST = "manifest"
    #: What a save meant to be stored against, that wrote nothing.
    PLAN = "plan"
    #: A group that was committed at its root, and that no checkpoint of the run needs.
    UNNEEDED = "unneeded"
    #: A file that a writer did not finish.
    TEMPORARY = "temporary"


@dataclass(frozen=True)
class Leftover:
    """Something that belongs to no committed checkpoint."""

    kind: Kind
    #: Name of the checkpoint's directory, or of the one object.
    name: str
    objects: int
    nbytes: int
    #: When something was last added to it, by the clock of the store; seconds.
    modified_unix: float


def find(listing: Iterable[Stored], temporaries: Iterable[Stored]) -> tuple[Leftover, ...]:
    """Return what belongs to no committed checkpoint, by name.

    Parameters
    ----------
    listing : iterable of Stored
        Everything in the location.
    temporaries : iterable of Stored
        Its unfinished writes.

    Notes
    -----
    A checkpoint is committed if there is something under the name of its marker, be it damaged. What has
    another name than a checkpoint's directory is not FastCheck's, and is passed over.
    """
    paths: dict[str, Stored] = {stored.path: stored for stored in listing}
    by_directory: dict[str, list[Stored]] = {}
    for stored in paths.values():
        top, slash, _ = stored.path.partition("/")
        if slash and parse_directory_name(top) is not None and marker_path(top) not in paths:
            by_directory.setdefault(top, []).append(stored)
    found = []
    for directory, members in by_directory.items():
        kind = Kind.UNMARKED if f"{directory}/{DOCUMENT}" in paths else Kind.UNFINISHED
        members += [
            paths[path] for path in (manifest_path(directory), plans.path_of(directory)) if path in paths
        ]
        found.append(_leftover(kind, directory, members))
    for kind, place in ((Kind.MANIFEST, manifest_path), (Kind.PLAN, plans.path_of)):
        for path, stored in paths.items():
            directory = path.rpartition("/")[2].removesuffix(".json")
            if (
                parse_directory_name(directory) is not None
                and path == place(directory)
                and marker_path(directory) not in paths
                and directory not in by_directory
            ):
                found.append(_leftover(kind, path, [stored]))
    found += [_leftover(Kind.TEMPORARY, stored.path, [stored]) for stored in temporaries]
    return tuple(sorted(found, key=lambda leftover: leftover.name))


def _leftover(kind: Kind, name: str, members: list[Stored]) -> Leftover:
    return Leftover(
        kind,
        name,
        len(members),
        sum(stored.nbytes for stored in members),
        max(stored.modified_unix for stored in members),
    )
