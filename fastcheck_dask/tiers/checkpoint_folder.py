"""Checkpoints in an object store: written, published by a commit marker, listed and read back."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CorruptDataError,
    RootAwayError,
    ShardUnavailableError,
    TierError,
    UnknownFormatError,
)
from fastcheck_dask.ids import directory_name, parse_directory_name
from fastcheck_dask.layout.manifest import LIMIT_BYTES, Manifest, digest_of_manifest
from fastcheck_dask.layout.sharing import keys_apart
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import (
    DOCUMENT,
    PRIVATE,
    documents,
    inline_chunks,
    manifest_path,
    root_document,
)
from fastcheck_dask.tiers import plans
from fastcheck_dask.tiers.commit_marker import WHOLE, BaseLink, CommitMarker, Needs, Plan
from fastcheck_dask.tiers.object_store import open_existing
from fastcheck_dask.tiers.store import ObjectStore, Parts, Payload

__all__ = [
    "COMMITS",
    "WHOLE",
    "BaseLink",
    "CheckpointFolder",
    "CommitMarker",
    "DamagedMarker",
    "Needs",
    "Plan",
    "Survey",
    "marker_path",
]

logger = logging.getLogger(__name__)

#: Where the commit markers lie.
COMMITS = f"{PRIVATE}/commits"
_REMOVALS = f"{PRIVATE}/removals"
_SUFFIX = ".json"
#: A marker has some hundred bytes.
_MARKER_LIMIT_BYTES = 64 * 2**10


class DamagedMarker(NamedTuple):
    """A file among the commit markers that is none."""

    path: str
    reason: str


class Survey(NamedTuple):
    """What the commit markers of a location say."""

    #: By generation, oldest first.
    committed: tuple[CommitMarker, ...]
    damaged: tuple[DamagedMarker, ...]


class CheckpointFolder:
    """The checkpoints of one location.

    Parameters
    ----------
    store : ObjectStore
        Where they lie.

    Notes
    -----
    A checkpoint is written in this order: chunks (by several processes at once, each calls `store.write`),
    :meth:`write_metadata`, :meth:`publish`. Whatever dies in between leaves no marker, and what is there is
    removed before the next attempt, by :meth:`clear_uncommitted` or :meth:`clear_others`. Two authors of one
    generation are kept apart by the coordinator; here the second one to publish loses. All methods block; any
    thread may call them.
    """

    def __init__(self, store: ObjectStore) -> None:
        self.store = store

    def write_chunk(self, directory: str, key: str, payload: Payload | Parts) -> None:
        """Write one encoded chunk of a checkpoint that is not committed yet."""
        self.store.write(f"{directory}/{key}", payload)

    def write_chunks(self, directory: str, chunks: Iterable[tuple[str, Payload | Parts]]) -> None:
        """Write several, as `ObjectStore.write_all` does."""
        self.store.write_all((f"{directory}/{key}", payload) for key, payload in chunks)

    def write_metadata(self, manifest: Manifest, *, needs: Needs = WHOLE) -> None:
        """Write all but the root group's document and the marker: other documents, inline arrays, manifest.

        Nothing is written if this author committed it already. `needs` are the checkpoints that have the
        chunks which are not here.

        Raises
        ------
        CommitConflictError
            If the generation was committed by another author.
        """
        data = manifest.to_bytes()
        present = self._present_marker(manifest)
        if present is not None:
            self._same(present, CommitMarker.of(manifest, data, needs=needs))
            return
        path = manifest_path(directory_name(manifest.generation, manifest.tag))
        self.store.write_all([*self._documents(manifest, needs), (path, data)])

    def _documents(self, manifest: Manifest, needs: Needs) -> list[tuple[str, bytes]]:
        """Return the documents below the root group's, and the inline arrays, with their paths."""
        directory = directory_name(manifest.generation, manifest.tag)
        inline = list(inline_arrays(manifest.tree))
        wanted = documents(manifest, inline, base=needs.shown) | inline_chunks(inline)
        del wanted[DOCUMENT]
        return [(f"{directory}/{path}", data) for path, data in wanted.items()]

    def publish(
        self, manifest: Manifest, manifest_bytes: bytes | None = None, *, needs: Needs = WHOLE
    ) -> CommitMarker:
        """Make a completely written checkpoint visible. Idempotent.

        Parameters
        ----------
        manifest : Manifest
            Of the checkpoint; its chunks and metadata have been written.
        manifest_bytes : bytes, optional
            Of the manifest, as the commit record's digest was taken; by default ``manifest.to_bytes()``.
        needs : Needs, optional
            Other checkpoints: a chunk that is the same there need not be here.

        Returns
        -------
        CommitMarker
            The marker that is in force.

        Raises
        ------
        ShardUnavailableError
            If a chunk, a document, the manifest or what it needs is missing or empty; nothing was published.
        CorruptDataError
            If the manifest that was written is another one; nothing was published.
        CommitConflictError
            If the generation was committed by another author.
        """
        data = manifest.to_bytes() if manifest_bytes is None else manifest_bytes
        marker = CommitMarker.of(manifest, data, needs=needs)
        present = self._present_marker(manifest)
        if present is not None:
            return self._same(present, marker)
        directory = marker.directory
        self._check_complete(manifest, marker)
        self.store.sync(directory)
        self.store.sync(manifest_path(directory))
        self._write_root(manifest, needs)
        if not self.store.create(marker_path(directory), marker.to_bytes()):
            present = self.marker(directory)
            if present is None:
                raise CommitConflictError(f"{directory} in {self.store.location}: its marker comes and goes")
            return self._same(present, marker)
        logger.info(
            "generation %d (%s) is committed in %s", marker.generation, marker.tag, self.store.location
        )
        return marker

    def _write_root(self, manifest: Manifest, needs: Needs) -> None:
        path = f"{directory_name(manifest.generation, manifest.tag)}/{DOCUMENT}"
        root = root_document(manifest, list(inline_arrays(manifest.tree)), base=needs.shown)
        self.store.write(path, root)
        if self.store.read(path) != root:
            raise CorruptDataError(f"{path} in {self.store.location}: read back other bytes")
        self.store.sync(path)

    def make_whole(self, marker: CommitMarker, manifest: Manifest) -> CommitMarker:
        """Say of a committed checkpoint that it needs no other any more; every chunk has been written whole.

        Idempotent. The documents come first: until the new marker is there, FastCheck reads by the old one,
        and finds what it says as well.

        Raises
        ------
        ShardUnavailableError
            If a chunk is missing or empty; the marker is as it was.
        """
        whole = replace(marker, base=None, refs=())
        self.store.write_all(self._documents(manifest, WHOLE))
        self._check_complete(manifest, whole)
        self.store.sync(whole.directory)
        self._write_root(manifest, WHOLE)
        if self.marker(whole.directory) not in (marker, whole):
            # Not to be brought back by its marker alone.
            raise ShardUnavailableError(f"{whole.directory} is not in {self.store.location} any more")
        self.store.write(marker_path(whole.directory), whole.to_bytes())
        self.store.sync(marker_path(whole.directory))
        logger.info("generation %d (%s) needs no other any more", marker.generation, marker.tag)
        return whole

    def is_shown_whole(self, marker: CommitMarker, manifest: Manifest) -> bool:
        """Say whether stock zarr finds a checkpoint described as one that needs no other."""
        with suppress(ShardUnavailableError):
            path = f"{marker.directory}/{DOCUMENT}"
            return self.store.read(path) == root_document(manifest, list(inline_arrays(manifest.tree)))
        return False

    def planned(self, directory: str, token: str) -> Plan | None:
        """Return how a checkpoint is going to lie here, if an author of it said so; else None.

        Raises
        ------
        CorruptDataError
            If what was said cannot be read.
        """
        return plans.planned(self.store, directory, token)

    def plan(self, directory: str, token: str, plan: Plan) -> Plan:
        """Say how a checkpoint is going to lie here; the first author of a token decides for all.

        Returns
        -------
        Plan
            What was decided.
        """
        return plans.plan(self.store, directory, token, wanted=plan)

    def plan_whole(self, directory: str, token: str) -> None:
        """Take back what :meth:`plan` decided, since what it names cannot be had any more."""
        self.store.delete(plans.path_of(directory))
        self.plan(directory, token, Plan())

    def at(self, link: BaseLink) -> CheckpointFolder:
        """Return the location of a checkpoint that one of this location needs; raises `RootAwayError`."""
        return self if link.location is None else CheckpointFolder(open_existing(link.location))

    def linked(self, link: BaseLink, *, by: str) -> tuple[CheckpointFolder, CommitMarker]:
        """Return a checkpoint that `by`, as messages call it, needs: its location, and its marker.

        Raises
        ------
        ShardUnavailableError
            If it is gone; `RootAwayError` if it lies in another location that does not answer.
        CorruptDataError
            If it is damaged, or another one.
        """
        of = f"{by} is stored against {link.place}, which"
        try:
            folder = self.at(link)
            found = folder.marker(link.directory)
        except CorruptDataError as error:
            raise CorruptDataError(f"{of} is damaged: {error}") from error
        except TierError as error:
            if link.location is None:
                raise
            raise RootAwayError(f"{of} cannot be reached: {error}") from error
        if found is None:
            raise ShardUnavailableError(f"{of} is not in {folder.store.location} any more")
        if found.link != replace(link, location=None):
            raise CorruptDataError(f"{of} has token {found.token} and manifest {found.manifest_sha256}")
        return folder, found

    def clear_uncommitted(self, directory: str) -> None:
        """Remove what a failed attempt left of a checkpoint.

        Raises
        ------
        CommitConflictError
            If it has a marker, be it a damaged one: then it may be committed, and is left alone.
        """
        if parse_directory_name(directory) is None:
            raise ConfigError(f"{directory!r} is not the directory of a checkpoint")
        if self.store.exists(marker_path(directory)):
            raise CommitConflictError(
                f"{directory} in {self.store.location} has a commit marker, so it is no leftover"
            )
        self._remove_data(directory)

    def clear_others(self, manifest: Manifest, *, needs: Needs = WHOLE) -> None:
        """Remove what other authors left where a committed generation is going to be written.

        Another process may be writing the same generation at this moment (a training host and the master of
        the storage nodes, or two masters one after the other): nothing is touched that it writes, too.

        Raises
        ------
        CommitConflictError
            If the generation was committed by another author.
        """
        if self._present_marker(manifest) is not None:
            return
        directory = directory_name(manifest.generation, manifest.tag)
        inline = list(inline_arrays(manifest.tree))
        wanted = documents(manifest, inline, base=needs.shown)
        root = f"{directory}/{DOCUMENT}"
        with suppress(ShardUnavailableError):
            # First: what is left of another author's tree then is nothing that zarr opens.
            if self.store.read(root) != wanted[DOCUMENT]:
                self.store.delete(root)
        kept = {f"{directory}/{key}" for key in (*wanted, *inline_chunks(inline), *manifest.chunks)}
        for path in self.store.list(directory):
            if path not in kept:
                self.store.delete(path)

    def remove(self, directory: str) -> None:
        """Remove a checkpoint, the marker first: it is never visible in part. Idempotent.

        What a process that dies in between leaves is for :meth:`finish_removals`.
        """
        if parse_directory_name(directory) is None:
            raise ConfigError(f"{directory!r} is not the directory of a checkpoint")
        self.store.write(f"{_REMOVALS}/{directory}", b"removed")
        self.store.delete(marker_path(directory))
        self.store.sync(marker_path(directory))
        self._remove_data(directory)
        self.store.delete(f"{_REMOVALS}/{directory}")

    def finish_removals(self) -> None:
        """Remove what is left of checkpoints whose removal was cut short after their marker was gone."""
        for path in self.store.list(_REMOVALS):
            directory = path.removeprefix(f"{_REMOVALS}/")
            if parse_directory_name(directory) is None:
                continue
            if not self.store.exists(marker_path(directory)):
                self._remove_data(directory)
            # Otherwise it came no further than to be named: whether it has to go is decided anew.
            self.store.delete(path)

    def marker(self, directory: str) -> CommitMarker | None:
        """Return the marker of one checkpoint, None if it is not committed; a damaged one raises.

        Raises
        ------
        CorruptDataError
            If the marker is damaged, or names another checkpoint.
        """
        path = marker_path(directory)
        where = f"{path} in {self.store.location}"
        try:
            if self.store.size(path) > _MARKER_LIMIT_BYTES:
                raise CorruptDataError(f"{where}: too large for a commit marker")
            data = self.store.read(path)
        except ShardUnavailableError:
            return None
        marker = CommitMarker.from_bytes(data, where=where)
        if marker.directory != directory:
            raise CorruptDataError(f"{where}: is the marker of {marker.directory}")
        return marker

    def survey(self) -> Survey:
        """Return the committed checkpoints, and the markers that cannot be read with the reason why."""
        committed, damaged = [], []
        for path in self.store.list(COMMITS):
            name = path.removeprefix(f"{COMMITS}/")
            if name.startswith("."):
                continue
            try:
                directory = name.removesuffix(_SUFFIX)
                if not name.endswith(_SUFFIX) or parse_directory_name(directory) is None:
                    raise UnknownFormatError(f"{path} in {self.store.location}: not a commit marker's name")
                if (marker := self.marker(directory)) is not None:
                    committed.append(marker)
            except CorruptDataError as error:
                logger.warning("skipped a commit marker: %s", error)
                damaged.append(DamagedMarker(path, str(error)))
        committed.sort(key=lambda m: (m.generation, m.created_unix, m.tag))
        return Survey(tuple(committed), tuple(damaged))

    def newest_generation(self) -> int:
        """Return the highest generation that has a marker, be it a damaged one; 0 if there is none."""
        names = (path.removeprefix(f"{COMMITS}/") for path in self.store.list(COMMITS))
        found = (parse_directory_name(name.removesuffix(_SUFFIX)) for name in names)
        return max((parsed[0] for parsed in found if parsed is not None), default=0)

    def committed(self) -> list[CommitMarker]:
        """Return the markers of all committed checkpoints, oldest generation first."""
        return list(self.survey().committed)

    def load_manifest(self, marker: CommitMarker) -> Manifest:
        """Read the manifest that a marker names.

        Raises
        ------
        ShardUnavailableError
            If it is missing.
        CorruptDataError
            If its digest is another one, or it cannot be read.
        """
        path = manifest_path(marker.directory)
        where = f"{path} in {self.store.location}"
        if (nbytes := self.store.size(path)) > LIMIT_BYTES:
            raise CorruptDataError(f"{where}: {nbytes:,} bytes, at most {LIMIT_BYTES:,} are read")
        data = self.store.read(path)
        if (got := digest_of_manifest(data)) != marker.manifest_sha256:
            raise CorruptDataError(f"{where}: sha256 {got}, the commit marker says {marker.manifest_sha256}")
        manifest = Manifest.from_bytes(data, where=where)
        if CommitMarker.of(manifest, data, needs=marker.needs) != marker:
            raise CorruptDataError(f"{where}: not the manifest of {marker.directory}, token {marker.token}")
        return manifest

    def read_chunk(self, directory: str, key: str) -> npt.NDArray[np.uint8]:
        """Return one encoded chunk, not checked, as read-only uint8 of shape (n,).

        Raises
        ------
        ShardUnavailableError
            If it is missing or empty.
        """
        return self._payload(directory, key, self.store.read(f"{directory}/{key}"))

    def read_chunk_into(self, directory: str, key: str, *, parts: Parts) -> npt.NDArray[np.uint8] | None:
        """Fill `parts` with one encoded chunk if it is as long as they together, else return it; not checked.

        Raises
        ------
        ShardUnavailableError
            If it is missing or empty.
        """
        data = self.store.read_into(f"{directory}/{key}", parts)
        return None if data is None else self._payload(directory, key, data)

    def _payload(self, directory: str, key: str, data: bytes) -> npt.NDArray[np.uint8]:
        if not data:
            raise ShardUnavailableError(f"{directory}/{key} in {self.store.location} is empty")
        return np.frombuffer(data, np.uint8)

    def _present_marker(self, manifest: Manifest) -> CommitMarker | None:
        """Return the manifest's own marker if it is there; raise if its generation has another one."""
        own = directory_name(manifest.generation, manifest.tag)
        for path in self.store.list(COMMITS):
            directory = path.removeprefix(f"{COMMITS}/").removesuffix(_SUFFIX)
            parsed = parse_directory_name(directory)
            if parsed is not None and parsed[0] == manifest.generation and directory != own:
                raise CommitConflictError(
                    f"generation {manifest.generation} in {self.store.location} is committed as {directory}, "
                    f"not as {own}"
                )
        present = self.marker(own)
        if present is not None and present.token != manifest.token:
            raise self._conflict(present, manifest.token)
        return present

    def _same(self, present: CommitMarker, wanted: CommitMarker) -> CommitMarker:
        if (present.token, present.manifest_sha256) != (wanted.token, wanted.manifest_sha256):
            raise self._conflict(present, wanted.token)
        return present

    def _conflict(self, present: CommitMarker, token: str) -> CommitConflictError:
        return CommitConflictError(
            f"{present.directory} in {self.store.location} is committed already, with token {present.token} "
            f"and manifest {present.manifest_sha256}; this author's token is {token}"
        )

    def _check_complete(self, manifest: Manifest, marker: CommitMarker) -> None:
        """Raise unless everything that the marker will vouch for is there."""
        path, location = manifest_path(marker.directory), self.store.location
        if (got := digest_of_manifest(self.store.read(path))) != marker.manifest_sha256:
            raise CorruptDataError(f"{path} in {location}: sha256 {got}, expected {marker.manifest_sha256}")
        inline = list(inline_arrays(manifest.tree))
        exact = {**documents(manifest, inline, base=marker.needs.shown), **inline_chunks(inline)}
        exact.pop(DOCUMENT)
        for key, data in exact.items():
            name = f"{marker.directory}/{key}"
            if self.store.size(name) != len(data):
                raise CorruptDataError(f"{name} in {location}: expected {len(data):,} bytes")
        for key in self._keys_here(manifest, marker):
            if self.store.size(f"{marker.directory}/{key}") == 0:
                raise ShardUnavailableError(f"{marker.directory}/{key} in {location} is empty")

    def _keys_here(self, manifest: Manifest, marker: CommitMarker) -> Iterable[str]:
        """Return the chunks that lie in the checkpoint's own directory."""
        others = [self.linked(link, by=marker.called) for link in marker.needs.links]
        return keys_apart(manifest, [folder.load_manifest(other) for folder, other in others])

    def _remove_data(self, directory: str) -> None:
        # The root document first: what is left of the tree then is nothing that zarr opens.
        self.store.delete(f"{directory}/{DOCUMENT}")
        self.store.delete_tree(directory)
        self.store.delete(manifest_path(directory))
        self.store.delete(plans.path_of(directory))


def marker_path(directory: str) -> str:
    """Return where the commit marker of a checkpoint lies, relative to the location."""
    return f"{COMMITS}/{directory}{_SUFFIX}"
