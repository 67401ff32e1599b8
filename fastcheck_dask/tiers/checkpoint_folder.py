"""Checkpoints in an object store: written, published by a commit marker, listed and read back."""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CorruptDataError,
    ShardUnavailableError,
    UnknownFormatError,
)
from fastcheck_dask.ids import directory_name, parse_directory_name
from fastcheck_dask.layout.manifest import LIMIT_BYTES, Manifest, digest_of_manifest
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import (
    DOCUMENT,
    PRIVATE,
    documents,
    inline_chunks,
    manifest_path,
    root_document,
)
from fastcheck_dask.tiers.commit_marker import CommitMarker
from fastcheck_dask.tiers.store import ObjectStore, Payload

__all__ = ["CheckpointFolder", "CommitMarker", "DamagedMarker", "Survey", "marker_path"]

logger = logging.getLogger(__name__)

_COMMITS = f"{PRIVATE}/commits"
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

    def write_chunk(self, directory: str, key: str, payload: Payload) -> None:
        """Write one encoded chunk of a checkpoint that is not committed yet."""
        self.store.write(f"{directory}/{key}", payload)

    def write_metadata(self, manifest: Manifest) -> None:
        """Write all but the root group's document and the marker: other documents, inline arrays, manifest.

        Nothing is written if this author committed it already.

        Raises
        ------
        CommitConflictError
            If the generation was committed by another author.
        """
        data = manifest.to_bytes()
        present = self._present_marker(manifest)
        if present is not None:
            self._same(present, CommitMarker.of(manifest, data))
            return
        directory = directory_name(manifest.generation, manifest.tag)
        inline = list(inline_arrays(manifest.tree))
        wanted = documents(manifest, inline) | inline_chunks(inline)
        del wanted[DOCUMENT]
        for path, content in wanted.items():
            self.store.write(f"{directory}/{path}", content)
        self.store.write(manifest_path(directory), data)

    def publish(self, manifest: Manifest, manifest_bytes: bytes | None = None) -> CommitMarker:
        """Make a completely written checkpoint visible. Idempotent.

        Parameters
        ----------
        manifest : Manifest
            Of the checkpoint; its chunks and metadata have been written.
        manifest_bytes : bytes, optional
            Of the manifest, as the commit record's digest was taken; by default ``manifest.to_bytes()``.

        Returns
        -------
        CommitMarker
            The marker that is in force.

        Raises
        ------
        ShardUnavailableError
            If a chunk, a document or the manifest is missing or empty; nothing was published.
        CorruptDataError
            If the manifest that was written is another one; nothing was published.
        CommitConflictError
            If the generation was committed by another author.
        """
        data = manifest.to_bytes() if manifest_bytes is None else manifest_bytes
        marker = CommitMarker.of(manifest, data)
        present = self._present_marker(manifest)
        if present is not None:
            return self._same(present, marker)
        directory = marker.directory
        self._check_complete(manifest, marker)
        self.store.sync(directory)
        self.store.sync(manifest_path(directory))
        root = root_document(manifest, list(inline_arrays(manifest.tree)))
        self.store.write(f"{directory}/{DOCUMENT}", root)
        if self.store.read(f"{directory}/{DOCUMENT}") != root:
            raise CorruptDataError(f"{directory}/{DOCUMENT} in {self.store.location}: read back other bytes")
        self.store.sync(f"{directory}/{DOCUMENT}")
        if not self.store.create(marker_path(directory), marker.to_bytes()):
            present = self.marker(directory)
            if present is None:
                raise CommitConflictError(f"{directory} in {self.store.location}: its marker comes and goes")
            return self._same(present, marker)
        logger.info(
            "generation %d (%s) is committed in %s", marker.generation, marker.tag, self.store.location
        )
        return marker

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

    def clear_others(self, manifest: Manifest) -> None:
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
        wanted = documents(manifest, inline)
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
        """Remove a checkpoint, the marker first: it is never visible in part. Idempotent."""
        if parse_directory_name(directory) is None:
            raise ConfigError(f"{directory!r} is not the directory of a checkpoint")
        self.store.delete(marker_path(directory))
        self.store.sync(marker_path(directory))
        self._remove_data(directory)

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
        for path in self.store.list(_COMMITS):
            name = path.removeprefix(f"{_COMMITS}/")
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
        if CommitMarker.of(manifest, data) != marker:
            raise CorruptDataError(f"{where}: not the manifest of {marker.directory}, token {marker.token}")
        return manifest

    def read_chunk(self, directory: str, key: str) -> npt.NDArray[np.uint8]:
        """Return one encoded chunk, not checked, as read-only uint8 of shape (n,).

        Raises
        ------
        ShardUnavailableError
            If it is missing or empty.
        """
        data = self.store.read(f"{directory}/{key}")
        if not data:
            raise ShardUnavailableError(f"{directory}/{key} in {self.store.location} is empty")
        return np.frombuffer(data, np.uint8)

    def _present_marker(self, manifest: Manifest) -> CommitMarker | None:
        """Return the manifest's own marker if it is there; raise if its generation has another one."""
        own = directory_name(manifest.generation, manifest.tag)
        for path in self.store.list(_COMMITS):
            directory = path.removeprefix(f"{_COMMITS}/").removesuffix(_SUFFIX)
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
        exact = {**documents(manifest, inline), **inline_chunks(inline)}
        exact.pop(DOCUMENT)
        for key, data in exact.items():
            name = f"{marker.directory}/{key}"
            if self.store.size(name) != len(data):
                raise CorruptDataError(f"{name} in {location}: expected {len(data):,} bytes")
        for key in manifest.chunks:
            if self.store.size(f"{marker.directory}/{key}") == 0:
                raise ShardUnavailableError(f"{marker.directory}/{key} in {location} is empty")

    def _remove_data(self, directory: str) -> None:
        # The root document first: what is left of the tree then is nothing that zarr opens.
        self.store.delete(f"{directory}/{DOCUMENT}")
        self.store.delete_tree(directory)
        self.store.delete(manifest_path(directory))


def marker_path(directory: str) -> str:
    """Return where the commit marker of a checkpoint lies, relative to the location."""
    return f"{_COMMITS}/{directory}{_SUFFIX}"
