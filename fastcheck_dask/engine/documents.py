"""What else lies with a checkpoint in the object tier than encoded chunks: compared with what was written.

A state is restored from the manifest; zarr documents and the chunks of inline arrays are for other readers.
They follow from the manifest, bit for bit, so that damage is found by comparing and mended by writing.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.state import inline_arrays
from fastcheck_dask.layout.zarr_tree import documents, documents_of, inline_chunks
from fastcheck_dask.tiers.checkpoint_folder import WHOLE, CheckpointFolder, CommitMarker, Needs, marker_path

log = logging.getLogger(__name__)

#: Objects that are read at once: they are small, and reading waits for the store.
_READERS = 8


@dataclass(frozen=True)
class Damage:
    """An object that is not as it was written."""

    #: Relative to the location.
    name: str
    detail: str


@dataclass(frozen=True)
class Included:
    """What was loaded, of a checkpoint that was not loaded whole."""

    #: The tree of the chosen leaves.
    tree: Any
    arrays: Sequence[ArraySpec]


def exact_objects(manifest: Manifest, needs: Needs, *, of: Included | None = None) -> dict[str, bytes]:
    """Return the objects of a checkpoint that follow from its manifest and what it needs, by their key.

    Of a part, those of its arrays and of the groups above them: the root group's describes all the others.
    """
    if of is not None:
        inline = list(inline_arrays(of.tree))
        return documents_of(of.arrays, inline, base=needs.shown) | inline_chunks(inline)
    inline = list(inline_arrays(manifest.tree))
    return documents(manifest, inline, base=needs.shown) | inline_chunks(inline)


def check(
    folder: CheckpointFolder, marker: CommitMarker, manifest: Manifest, *, of: Included | None = None
) -> list[str]:
    """Name in the log what is damaged beside the chunks of a checkpoint that was loaded, and write it anew.

    With `of`, what is beside the chunks of that part.

    Returns
    -------
    list of str
        Each object with what is wrong with it, and whether it was written anew.
    """
    damaged = find_damaged(folder, marker, manifest, of=of)
    if not damaged:
        return []
    mended = set(mend(folder, marker, manifest, damaged=damaged))
    told = [f"{d.name}: {d.detail}{'; it was written anew' if d.name in mended else ''}" for d in damaged]
    for line in told:
        log.debug("%s", line)
    log.warning(
        "generation %d (%s) is loaded, and %d objects that other readers need are damaged or missing in %s, "
        "of which %d were written anew; the first: %s",
        marker.generation,
        marker.tag,
        len(damaged),
        folder.store.location,
        len(mended),
        told[0],
    )
    return told


def find_damaged(
    folder: CheckpointFolder, marker: CommitMarker, manifest: Manifest, *, of: Included | None = None
) -> list[Damage]:
    """Compare the commit marker and all objects that follow from the manifest; blocks, and raises nothing.

    With `of`, only the objects of that part are compared.

    Notes
    -----
    Reads as many small objects as the checkpoint, or the part, has arrays and groups, several at once.
    """
    wanted: dict[str, list[bytes]] = {}
    if of is None:
        wanted[marker_path(marker.directory)] = [marker.to_bytes()]
    # It may be made whole at this moment: then the marker is the last to change.
    for needs in (marker.needs, WHOLE) if marker.needs.links else (WHOLE,):
        for key, data in exact_objects(manifest, needs, of=of).items():
            wanted.setdefault(f"{marker.directory}/{key}", []).append(data)
    try:
        # Asked once for all: in S3 each size would be a request. Of a part, all may be far more.
        listing = () if of is not None else folder.store.listing(marker.directory)
        sizes = {stored.path: stored.nbytes for stored in listing}
    except FastCheckError as error:
        return [Damage(marker.directory, f"cannot be listed: {error}")]

    def compare(name: str) -> Damage | None:
        return _compare(folder, name, wanted[name], size=sizes.get(name))

    with ThreadPoolExecutor(_READERS, thread_name_prefix="fastcheck-documents") as pool:
        found = pool.map(compare, wanted)
        return [damage for damage in found if damage is not None]


def _compare(folder: CheckpointFolder, name: str, wanted: list[bytes], *, size: int | None) -> Damage | None:
    try:
        if size is None:
            size = folder.store.size(name)
        # A file that was replaced by a huge one is not read.
        if size in map(len, wanted) and folder.store.read(name) in wanted:
            return None
    except FastCheckError as error:
        return Damage(name, str(error))
    return Damage(name, f"{size:,} bytes that are not the {len(wanted[0]):,} that its manifest gives")


def mend(
    folder: CheckpointFolder, marker: CommitMarker, manifest: Manifest, *, damaged: list[Damage]
) -> list[str]:
    """Write damaged objects of a whole checkpoint anew, as long as it is committed; return their names.

    A store that cannot be written is logged: whoever reads a checkpoint may have no right to write it.
    """
    if marker.needs.links:
        # Whoever makes it whole at this moment writes the same objects.
        return []
    path = marker_path(marker.directory)
    wanted = {f"{marker.directory}/{key}": data for key, data in exact_objects(manifest, WHOLE).items()}
    wanted[path] = marker.to_bytes()
    mended: list[str] = []
    try:
        if not folder.store.exists(path):
            return []
        for damage in damaged:
            if damage.name in wanted:
                folder.store.write(damage.name, wanted[damage.name])
                mended.append(damage.name)
        folder.store.sync(marker.directory)
        if not folder.store.exists(path):
            # Retention removed it meanwhile: nothing may be left that zarr opens.
            for name in mended:
                folder.store.delete(name)
            return []
    except FastCheckError as error:
        log.warning("what is damaged in %s was not written anew: %s", marker.directory, error)
    return mended
