"""Every checkpoint of a location at a glance: committed, incomplete, damaged, left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fastcheck_dask.errors import CorruptDataError, ShardUnavailableError
from fastcheck_dask.inspection import leftovers
from fastcheck_dask.inspection.contents import step_of
from fastcheck_dask.inspection.leftovers import Leftover
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import documents, inline_chunks, manifest_path
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, DamagedMarker, Needs
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint


@dataclass(frozen=True)
class Listed:
    """One committed checkpoint, by what can be said without reading its data."""

    generation: int
    tag: str
    directory: str
    run: str
    created_unix: float
    #: The step that the state says it is of; None if it does not say.
    step: int | None
    arrays: int | None
    raw_bytes: int
    #: Of all its objects, the manifest included.
    stored_bytes: int
    #: Directory of the checkpoint against which it is stored; None if it has no deltas.
    base: str | None
    #: Directories of other checkpoints that have chunks of it.
    refs: tuple[str, ...]
    #: Why it is not taken for healthy.
    flags: tuple[str, ...]
    #: Names of its groups that are of an older step than the rest.
    older: tuple[str, ...]
    #: What is missing; None if all is there.
    problem: str | None

    @property
    def complete(self) -> bool:
        """Whether every object is there; whether they are intact is for `verification` to say."""
        return self.problem is None


@dataclass(frozen=True)
class Overview:
    """What lies in a location."""

    location: str
    #: Oldest generation first, by number.
    checkpoints: tuple[Listed, ...]
    damaged: tuple[DamagedMarker, ...]
    leftovers: tuple[Leftover, ...]


def overview(folder: CheckpointFolder) -> Overview:
    """List a location: one listing, one small marker and one manifest for each checkpoint, no data.

    Raises
    ------
    TierError
        If the store does not answer.
    """
    listing = folder.store.listing("")
    found = leftovers.find(listing, folder.store.temporaries())
    survey = folder.survey()
    sizes: dict[str, dict[str, int]] = {}
    for stored in listing:
        directory, _, key = stored.path.partition("/")
        sizes.setdefault(directory, {})[key] = stored.nbytes
    own = {stored.path: stored.nbytes for stored in listing}
    listed = []
    for marker in survey.committed:
        nbytes = own.get(manifest_path(marker.directory), 0)
        listed.append(_listed(folder, marker, sizes.get(marker.directory, {}), nbytes))
    return Overview(folder.store.location, tuple(listed), survey.damaged, found)


def _listed(
    folder: CheckpointFolder, marker: CommitMarker, sizes: dict[str, int], manifest_nbytes: int
) -> Listed:
    manifest, problem = None, None
    try:
        manifest = folder.load_manifest(marker)
        stored = StoredCheckpoint(folder, marker, manifest)
        # A link that is missing further down is told here, too.
        stored.open_all()
        problem = what_is_missing(manifest, sizes, keys=stored.own_keys, needs=marker.needs)
    except (CorruptDataError, ShardUnavailableError) as error:
        problem = str(error)
    return Listed(
        marker.generation,
        marker.tag,
        marker.directory,
        marker.run,
        marker.created_unix,
        step_of(manifest) if manifest is not None else None,
        len(manifest.arrays) if manifest is not None else None,
        marker.raw_bytes,
        sum(sizes.values()) + manifest_nbytes,
        None if marker.base is None else marker.base.directory,
        tuple(link.directory for link in marker.refs),
        marker.flags,
        marker.older,
        problem,
    )


def what_is_missing(
    manifest: Manifest, sizes: dict[str, int], *, keys: Sequence[str], needs: Needs
) -> str | None:
    """Say which objects of a checkpoint are missing or empty, by a listing of its directory; None if none.

    `keys` are the chunks that are its own, and `needs` are the checkpoints that have the others.
    """
    inline = list(inline_arrays(manifest.tree))
    wanted = (*keys, *documents(manifest, inline, base=needs.shown), *inline_chunks(inline))
    missing = [key for key in wanted if not sizes.get(key)]
    if not missing:
        return None
    more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
    return f"{missing[0]}{more} of {len(wanted)} objects are missing or empty"
