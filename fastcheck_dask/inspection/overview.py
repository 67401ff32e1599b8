"""Every checkpoint of a location at a glance: committed, incomplete, damaged, left over."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastcheck_dask.errors import CorruptDataError, RootAwayError, ShardUnavailableError
from fastcheck_dask.inspection import leftovers
from fastcheck_dask.inspection.contents import step_of
from fastcheck_dask.inspection.leftovers import Leftover
from fastcheck_dask.inspection.ranks import Joint, Part, rank_prefix, survey_ranks
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import documents, inline_chunks, manifest_path
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, DamagedMarker, Needs
from fastcheck_dask.tiers.joint_marker import rank_of_location
from fastcheck_dask.tiers.store import Stored
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
    #: Directories of other checkpoints that have chunks of it, in full those of other locations.
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
class JointListed:
    """One checkpoint of several ranks."""

    number: int
    tag: str
    created_unix: float
    world_size: int
    #: By rank; None where it is not there.
    parts: tuple[Listed | None, ...]
    #: What is missing; None if all is there.
    problem: str | None

    @property
    def complete(self) -> bool:
        """Whether every object of every rank is there."""
        return self.problem is None

    @property
    def there(self) -> tuple[Listed, ...]:
        """The parts that are there."""
        return tuple(part for part in self.parts if part is not None)

    @property
    def step(self) -> int | None:
        """The step that the first rank's state says it is of; None if it does not say."""
        return next((part.step for part in self.there if part.step is not None), None)

    @property
    def raw_bytes(self) -> int:
        """Of all parts that are there."""
        return sum(part.raw_bytes for part in self.there)

    @property
    def stored_bytes(self) -> int:
        """Of all parts that are there."""
        return sum(part.stored_bytes for part in self.there)

    @property
    def flags(self) -> tuple[str, ...]:
        """Why it is not taken for healthy, by any rank."""
        return tuple(sorted({flag for part in self.there for flag in part.flags}))


@dataclass(frozen=True)
class Overview:
    """What lies in a location."""

    location: str
    #: Oldest generation first, by number.
    checkpoints: tuple[Listed, ...]
    #: Of several ranks, oldest first.
    joint: tuple[JointListed, ...]
    #: Directories of what one rank committed and not all have.
    unjoined: tuple[str, ...]
    damaged: tuple[DamagedMarker, ...]
    leftovers: tuple[Leftover, ...]

    @property
    def sound(self) -> bool:
        """Whether every checkpoint is complete, and every marker can be read."""
        single = all(one.complete for one in self.checkpoints)
        return single and all(one.complete for one in self.joint) and not self.damaged


def overview(folder: CheckpointFolder) -> Overview:
    """List a location: one listing, one small marker and one manifest for each checkpoint, no data.

    Raises
    ------
    TierError
        If the store does not answer.
    """
    listing = folder.store.listing("")
    found = list(leftovers.find(listing, folder.store.temporaries()))
    survey = folder.survey()
    own = _Sizes(listing)
    checkpoints = tuple(_listed(folder, marker, own) for marker in survey.committed)
    by_rank = _by_rank(listing)
    ranks = survey_ranks(folder, (stored.path for stored in listing))
    for rank, members in by_rank.items():
        prefix = rank_prefix(rank)
        found += [replace(one, name=prefix + one.name) for one in leftovers.find(members, ())]
    sizes = {rank: _Sizes(members) for rank, members in by_rank.items()}
    joint = tuple(_joint_listed(one, sizes) for one in ranks.joint)
    unjoined = tuple(part.prefix + part.marker.directory for part in ranks.unjoined)
    damaged = survey.damaged + ranks.damaged
    return Overview(folder.store.location, checkpoints, joint, unjoined, damaged, tuple(found))


def _by_rank(listing: Sequence[Stored]) -> dict[int, list[Stored]]:
    """Sort what lies in the ranks' folders by rank, each named from the folder."""
    found: dict[int, list[Stored]] = {}
    for stored in listing:
        top, _, path = stored.path.partition("/")
        if (rank := rank_of_location(top)) is not None and path:
            found.setdefault(rank, []).append(stored._replace(path=path))
    return found


class _Sizes:
    """Bytes of the objects of one folder, by directory and key."""

    def __init__(self, listing: Sequence[Stored]) -> None:
        self._all = {stored.path: stored.nbytes for stored in listing}
        self._by_directory: dict[str, dict[str, int]] = {}
        for path, nbytes in self._all.items():
            directory, _, key = path.partition("/")
            self._by_directory.setdefault(directory, {})[key] = nbytes

    def of(self, directory: str) -> dict[str, int]:
        return self._by_directory.get(directory, {})

    def manifest(self, directory: str) -> int:
        return self._all.get(manifest_path(directory), 0)


def _joint_listed(one: Joint, sizes: dict[int, _Sizes]) -> JointListed:
    def listed(part: Part | None) -> Listed | None:
        return None if part is None else _listed(part.folder, part.marker, sizes[part.rank or 0])

    parts = tuple(listed(part) for part in one.parts)
    problem = one.problem
    for rank, part in enumerate(parts):
        if problem is None and part is not None and part.problem is not None:
            problem = f"rank {rank}: {part.problem}"
    marker = one.marker
    return JointListed(marker.number, marker.tag, marker.created_unix, marker.world_size, parts, problem)


def _listed(folder: CheckpointFolder, marker: CommitMarker, known: _Sizes) -> Listed:
    manifest, problem, sizes = None, None, known.of(marker.directory)
    try:
        manifest = folder.load_manifest(marker)
        stored = StoredCheckpoint(folder, marker, manifest)
        # A link that is missing further down is told here, too.
        stored.open_all()
        problem = what_is_missing(manifest, sizes, keys=stored.own_keys, needs=marker.needs)
    except (CorruptDataError, ShardUnavailableError, RootAwayError) as error:
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
        sum(sizes.values()) + known.manifest(marker.directory),
        None if marker.base is None else marker.base.directory,
        tuple(link.place for link in marker.refs),
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
