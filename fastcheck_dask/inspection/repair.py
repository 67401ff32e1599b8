"""Write damaged objects of a committed checkpoint anew, from whatever else has the same bits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

from fastcheck_codecs import PrefixIndex

from fastcheck_dask.engine.documents import exact_objects
from fastcheck_dask.engine.encode import Bits, digest
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.ids import directory_name, is_url, parse_directory_name
from fastcheck_dask.inspection.chunks import ChunkReader, in_order
from fastcheck_dask.inspection.verification import Fault, Verified, verify
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.layout.chunks import Chunk
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import DOCUMENT, manifest_path, root_document
from fastcheck_dask.tiers.checkpoint_folder import WHOLE, CheckpointFolder, CommitMarker, marker_path

log = logging.getLogger(__name__)

#: Gives manifest bytes of a checkpoint, verified or not, or None.
ManifestSource = Callable[[CommitMarker], bytes | None]
#: Gives the raw bits of data chunks that it can get, verified or not.
ChunkSource = Callable[[Manifest, Sequence[str]], Iterable[tuple[str, Bits]]]


@dataclass
class Repaired:
    """What was written anew, and what could not be."""

    #: Each with where its bits came from.
    repaired: list[str] = field(default_factory=list)
    left: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Sources:
    """Where else the bits of a checkpoint may be, besides the location itself."""

    folders: Sequence[CheckpointFolder] = ()
    manifest: ManifestSource | None = None
    chunks: ChunkSource | None = None


def repair(folder: CheckpointFolder, marker: CommitMarker, found: Verified, sources: Sources) -> Repaired:
    """Write the damaged objects of one checkpoint anew.

    Parameters
    ----------
    folder : CheckpointFolder
        Where it lies.
    marker : CommitMarker
        Of the checkpoint.
    found : Verified
        What is wrong.
    sources : Sources
        Where other copies may be.

    Returns
    -------
    Repaired

    Raises
    ------
    TierError
        If the store cannot be written.

    Notes
    -----
    A chunk comes from where its digest says the same bits are: the float32 source of a derived array, any
    checkpoint of this location or of `sources.folders`, the storage nodes. It counts only if its digest is
    right, and is written in place of the damaged one, all at once. What is unexpected is left where it is.
    """
    done = Repaired()
    names = _to_repair(found)
    manifest = _manifest(folder, marker, names, sources, done)
    if manifest is None:
        return done
    if done.repaired:
        # Without its manifest, nothing else could be verified.
        names = _to_repair(verify(folder, marker))
    if (path := marker_path(marker.directory)) in names:
        folder.store.write(path, marker.to_bytes())
        done.repaired.append(f"{path} from its manifest")
    for key, data in exact_objects(manifest, marker.needs).items():
        if (name := f"{marker.directory}/{key}") in names:
            folder.store.write(name, data)
            done.repaired.append(f"{name} from the manifest")
    # What another checkpoint has is repaired there.
    wanted = [key for key in manifest.chunks if f"{marker.directory}/{key}" in names]
    _repair_chunks(folder, manifest, marker.directory, wanted, sources, done)
    done.left += sorted(name for name in names if _is_elsewhere(name, marker))
    folder.store.sync(marker.directory)
    return done


def _is_elsewhere(name: str, marker: CommitMarker) -> bool:
    """Say whether an object belongs to a checkpoint that this one needs."""
    if name.startswith("/") or is_url(name):
        return True
    directory = name.partition("/")[0]
    return directory != marker.directory and parse_directory_name(directory) is not None


def _to_repair(found: Verified) -> set[str]:
    return {problem.name for problem in found.problems if problem.fault is not Fault.UNEXPECTED}


def _manifest(
    folder: CheckpointFolder, marker: CommitMarker, names: set[str], sources: Sources, done: Repaired
) -> Manifest | None:
    path = manifest_path(marker.directory)
    if path not in names:
        return folder.load_manifest(marker)
    for where, data in _manifest_copies(path, marker, sources):
        if data is not None and digest_of_manifest(data) == marker.manifest_sha256:
            folder.store.write(path, data)
            folder.store.sync(path)
            done.repaired.append(f"{path} from {where}")
            return folder.load_manifest(marker)
    done.left.append(path)
    return None


def _manifest_copies(path: str, marker: CommitMarker, sources: Sources) -> Iterable[tuple[str, bytes | None]]:
    for other in sources.folders:
        if other.store.exists(path):
            yield other.store.location, other.store.read(path)
    if sources.manifest is not None:
        yield "the storage nodes", sources.manifest(marker)


def _repair_chunks(
    folder: CheckpointFolder,
    manifest: Manifest,
    directory: str,
    wanted: list[str],
    sources: Sources,
    done: Repaired,
) -> None:
    def write(key: str, bits: Bits, where: str) -> bool:
        if digest(bits) != manifest.digests[key]:
            log.warning("%s of %s: %s gives other bits", key, directory, where)
            return False
        payload = PrefixIndex(dtype=codec_dtype(manifest.chunks[key].dtype)).encode(bits)
        folder.write_chunk(directory, key, payload)
        done.repaired.append(f"{directory}/{key} from {where}")
        return True

    copies = _Copies([folder, *sources.folders], {manifest.digests[key] for key in wanted})
    left = []
    for key in wanted:
        found = copies.get(manifest.digests[key])
        if found is None or not write(key, *found):
            left.append(key)
    if left and sources.chunks is not None:
        try:
            for key, bits in sources.chunks(manifest, [key for key in left if key not in manifest.sources]):
                if write(key, bits, "the storage nodes"):
                    left.remove(key)
        except FastCheckError as error:
            log.warning("%s: the storage nodes do not give what is missing: %s", directory, error)
    # Last: the source of a cast may have been repaired just now.
    left = [key for key in left if not _from_source(folder, manifest, key, write)]
    done.left += [f"{directory}/{key}" for key in left]


def _from_source(
    folder: CheckpointFolder, manifest: Manifest, key: str, write: Callable[[str, Bits, str], bool]
) -> bool:
    if key not in manifest.sources:
        return False
    source = manifest.chunks[manifest.sources[key]]
    try:
        bits = ChunkReader(folder, manifest).read(source)
    except FastCheckError:
        return False
    return write(key, cast(bits, manifest.chunks[key].dtype), f"{source.key}, of which it is the cast")


class _Copies:
    """Chunks of any checkpoint that are known to have certain digests."""

    def __init__(self, folders: Sequence[CheckpointFolder], digests: set[str]) -> None:
        self._places: dict[str, list[tuple[ChunkReader, Chunk]]] = {}
        if not digests:
            return
        for folder in folders:
            for marker in folder.committed():
                try:
                    manifest = folder.load_manifest(marker)
                except FastCheckError:
                    continue
                reader = ChunkReader(folder, manifest, marker)
                for key, chunk in manifest.chunks.items():
                    if (known := manifest.digests[key]) in digests:
                        self._places.setdefault(known, []).append((reader, chunk))

    def get(self, wanted: str) -> tuple[Bits, str] | None:
        """Return bits with a digest and where they were found; the damaged copy itself does not give them."""
        for reader, chunk in self._places.get(wanted, ()):
            try:
                return reader.read(chunk), f"{chunk.key} of {reader.where}"
            except FastCheckError:
                continue
        return None


def repair_marker(folder: CheckpointFolder, directory: str) -> bool:
    """Write a damaged commit marker anew, if the checkpoint proves by itself which one it was.

    That there is a marker proves the commit, be it unreadable; the root group's document, which was written
    next to last, names the manifest. With both intact, and every chunk, only one marker is possible.

    Returns
    -------
    bool
        Whether it was written.
    """
    path = marker_path(directory)
    try:
        if not folder.store.exists(path):
            return False
        data = folder.store.read(manifest_path(directory))
        manifest = Manifest.from_bytes(data, where=manifest_path(directory))
        marker = _marker_by_documents(folder, manifest, data)
        if marker is None or marker.directory != directory:
            return False
        reader = ChunkReader(folder, manifest, marker)
        for _ in in_order(manifest.chunks.values(), reader.read, nbytes=lambda chunk: chunk.nbytes):
            pass
    except FastCheckError as error:
        log.warning("the commit marker of %s cannot be made again: %s", directory, error)
        return False
    folder.store.write(path, marker.to_bytes())
    folder.store.sync(path)
    return True


def _marker_by_documents(folder: CheckpointFolder, manifest: Manifest, data: bytes) -> CommitMarker | None:
    """Return the marker that fits the root group's document: of a whole checkpoint, or as it was planned."""
    directory = directory_name(manifest.generation, manifest.tag)
    found = folder.store.read(f"{directory}/{DOCUMENT}")
    planned = folder.planned(directory, manifest.token)
    for needs in (WHOLE, *(() if planned is None else (planned.needs,))):
        if found == root_document(manifest, list(inline_arrays(manifest.tree)), base=needs.shown):
            return CommitMarker.of(manifest, data, needs=needs)
    return None
