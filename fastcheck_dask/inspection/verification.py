"""Verify every stored object of a checkpoint, and say whether it can be restored."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from fastcheck_codecs import PrefixIndex, XorDelta, encode_raw_into, max_encoded_nbytes

from fastcheck_dask.engine.documents import exact_objects
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.errors import FastCheckError, RootAwayError, ShardUnavailableError
from fastcheck_dask.inspection.chunks import ChunkReader, decoded, in_order
from fastcheck_dask.inspection.leftovers import Kind, find
from fastcheck_dask.layout.chunks import Chunk
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.zarr_tree import manifest_path
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker, Survey, marker_path
from fastcheck_dask.tiers.store import Stored

#: Is told how many raw bytes were verified.
Advance = Callable[[int], None]


class Fault(StrEnum):
    """What is wrong with an object."""

    MISSING = "missing"
    DAMAGED = "damaged"
    #: It belongs to no checkpoint: somebody else put it there.
    UNEXPECTED = "unexpected"
    #: A checkpoint that is complete, and that no marker makes one.
    UNMARKED = "unmarked"
    #: It decodes to what was saved, and is not what this version writes.
    ODD = "odd"


@dataclass(frozen=True)
class Problem:
    """One object that is not as it was saved."""

    #: Name relative to the location, or in full where it lies in another one.
    name: str
    fault: Fault
    detail: str
    #: Whether the state cannot be restored because of it; the zarr documents are for other readers only.
    fatal: bool


@dataclass(frozen=True)
class Verified:
    """What was found in one checkpoint."""

    generation: int
    tag: str
    directory: str
    objects: int
    raw_bytes: int
    problems: tuple[Problem, ...]

    @property
    def intact(self) -> bool:
        """Whether everything is as it was saved."""
        return not self.problems

    @property
    def restorable(self) -> bool:
        """Whether the object tier alone gives the state, bit for bit."""
        return not any(problem.fatal for problem in self.problems)


def verify(
    folder: CheckpointFolder,
    marker: CommitMarker,
    *,
    strict: bool = False,
    advance: Advance = lambda _: None,
) -> Verified:
    """Verify one committed checkpoint.

    Parameters
    ----------
    folder : CheckpointFolder
        Where it lies.
    marker : CommitMarker
        Of the checkpoint.
    strict : bool
        Also encode every chunk again that lies in its own directory: a chunk has bits that do not matter
        (padding), and if those were changed it decodes to what was saved all the same. Takes several times as
        long, and complains of what another version has written.
    advance : callable
        Is called with the raw bytes of each chunk after it was verified.

    Notes
    -----
    The marker, the manifest, every zarr document and the chunks of inline arrays are compared byte by byte
    with what was written, all other chunks are decoded and compared by their digests, and nothing else may
    be there. A few chunks are in memory at once.
    """
    try:
        manifest = folder.load_manifest(marker)
    except FastCheckError as error:
        problem = as_problem(manifest_path(marker.directory), error, fatal=True)
        return Verified(marker.generation, marker.tag, marker.directory, 1, 0, (problem,))
    problems = _verify_marker(folder, marker)
    exact = exact_objects(manifest, marker.needs)
    problems += _verify_exact(folder, marker.directory, exact)
    reader = ChunkReader(folder, manifest, marker)
    try:
        here = set(manifest.chunks) if reader.stored is None else set(reader.stored.own_keys)
    except FastCheckError as error:
        # Without what it needs there is no telling which chunks are its own.
        problems.append(as_problem(marker_path(marker.directory), error, fatal=True))
        return _verified(marker, manifest, problems, 2 + len(exact))

    def check(chunk: Chunk) -> Problem | None:
        name = f"{marker.directory}/{chunk.key}"
        try:
            if reader.stored is not None:
                name = reader.stored.place_of(chunk.key)
                bits = reader.read(chunk)
                if not strict or chunk.key not in here:
                    return None
                payload = folder.read_chunk(marker.directory, chunk.key)
            else:
                payload = folder.read_chunk(marker.directory, chunk.key)
                bits = decoded(payload, chunk, want=manifest.digests[chunk.key], where=reader.where)
            odd = strict and not _is_canonical(
                payload, bits, codec_dtype(chunk.dtype), reader.before(chunk, payload)
            )
        except FastCheckError as error:
            return as_problem(name, error, fatal=True)
        finally:
            advance(chunk.nbytes)
        if odd:
            detail = "it decodes to what was saved, in other bytes than this version of FastCheck writes"
            return Problem(name, Fault.ODD, detail, fatal=False)
        return None

    checked = in_order(manifest.chunks.values(), check, nbytes=lambda chunk: chunk.nbytes)
    problems += [found for found in checked if found is not None]
    problems += _unexpected(folder, marker.directory, {*exact, *here})
    return _verified(marker, manifest, problems, 2 + len(exact) + len(here))


def _verified(marker: CommitMarker, manifest: Manifest, problems: list[Problem], objects: int) -> Verified:
    return Verified(
        marker.generation, marker.tag, marker.directory, objects, manifest.raw_bytes, tuple(problems)
    )


def verify_rest(
    folder: CheckpointFolder, *, survey: Survey | None = None, listing: Iterable[Stored] | None = None
) -> tuple[Problem, ...]:
    """Return what is wrong with a location apart from its committed checkpoints.

    These are damaged markers, and checkpoints that were written to the end and have no marker. `survey` and
    `listing` are its markers and everything that lies there, if they are known already.
    """
    damaged = (folder.survey() if survey is None else survey).damaged
    problems = [Problem(marker.path, Fault.DAMAGED, marker.reason, fatal=True) for marker in damaged]
    for leftover in find(folder.store.listing("") if listing is None else listing, ()):
        # A save that is under way has this state, too, for a moment.
        if leftover.kind is Kind.UNMARKED and not folder.store.exists(marker_path(leftover.name)):
            detail = (
                f"{leftover.name} is complete and not committed: its commit marker was lost, or its save "
                "died just before the end; put the marker back if you have it"
            )
            problems.append(Problem(marker_path(leftover.name), Fault.UNMARKED, detail, fatal=True))
    return tuple(problems)


def _is_canonical(payload: Bits, bits: Bits, dtype: str, before: Bits | None) -> bool:
    """Say whether a payload is, byte for byte, one of those that a save makes of these bits."""
    if before is not None:
        return np.array_equal(payload, XorDelta(base=before, dtype=dtype).encode(bits))
    if np.array_equal(payload, PrefixIndex(dtype=dtype).encode(bits)):
        return True
    out = np.empty(max_encoded_nbytes(bits.size), np.uint8)
    return np.array_equal(payload, out[: encode_raw_into(bits, out, dtype=dtype)])


def _verify_marker(folder: CheckpointFolder, marker: CommitMarker) -> list[Problem]:
    """Compare the marker's bytes: others that mean the same were not written by FastCheck."""
    path = marker_path(marker.directory)
    try:
        if folder.store.read(path) == marker.to_bytes():
            return []
    except FastCheckError as error:
        return [as_problem(path, error, fatal=True)]
    return [
        Problem(path, Fault.DAMAGED, "it says the right thing in other bytes than were written", fatal=False)
    ]


def _verify_exact(folder: CheckpointFolder, directory: str, exact: dict[str, bytes]) -> list[Problem]:
    def check(item: tuple[str, bytes]) -> Problem | None:
        key, wanted = item
        name = f"{directory}/{key}"
        try:
            # A file that was replaced by a huge one is not read.
            size = folder.store.size(name)
            if size == len(wanted) and folder.store.read(name) == wanted:
                return None
        except FastCheckError as error:
            return as_problem(name, error, fatal=False)
        detail = f"{size:,} bytes that are not the {len(wanted):,} that its manifest gives"
        return Problem(name, Fault.DAMAGED, detail, fatal=False)

    checked = in_order(exact.items(), check, nbytes=lambda item: len(item[1]))
    return [found for found in checked if found is not None]


def _unexpected(folder: CheckpointFolder, directory: str, wanted: set[str]) -> list[Problem]:
    keys = (name.removeprefix(f"{directory}/") for name in folder.store.list(directory))
    detail = "it is no part of the checkpoint; nothing of it is restored, but stock zarr may show it"
    return [
        Problem(f"{directory}/{key}", Fault.UNEXPECTED, detail, fatal=False)
        for key in keys
        if key not in wanted
    ]


def as_problem(name: str, error: FastCheckError, *, fatal: bool) -> Problem:
    """Return what an error of reading an object says of it."""
    away = isinstance(error, ShardUnavailableError | RootAwayError)
    fault = Fault.MISSING if away else Fault.DAMAGED
    return Problem(name, fault, str(error), fatal=fatal)
