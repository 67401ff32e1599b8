"""Find the arrays of a snapshot that are the cast of another one: the storage nodes need not hold those.

Which arrays may be is guessed by a few elements of each, whatever their names; the guess is then verified
over all their bits by the encoder processes, before it is decided where the chunks of the save lie.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from fastcheck_dask.engine.delivery import together
from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.engine.plan import MESSAGE_CHUNKS, CastCheck, Content
from fastcheck_dask.engine.save import JOB_BYTES, Encoder, Snapshot
from fastcheck_dask.layout.casts import CAST_DTYPES, SOURCE_DTYPE, cast
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.tiers.local import Slot

#: Elements of an array that are looked at; an array of fewer is not derived.
_SAMPLE = 64
#: Sources that are verified for one array: more that agree in the sample are mostly zeros.
_GUESSES = 4


async def derive(snapshot: Snapshot, encoder: Encoder) -> Snapshot:
    """Return the snapshot with its derived arrays marked, and the digests of their chunks noted.

    Parameters
    ----------
    snapshot : Snapshot
        Complete in its slot, which nobody writes meanwhile.
    encoder : Encoder
        Verifies the guesses.

    Returns
    -------
    Snapshot
        The same one if nothing in it is derived. A derived array has the chunk shape of its source, so that
        each of its chunks is the cast of one chunk.
    """
    guesses = await asyncio.to_thread(_guesses_in_slot, snapshot)
    by_path = {spec.path: spec for spec in snapshot.content.arrays}
    derived: dict[str, ArraySpec] = {}
    digests: dict[str, str] = {}
    for attempt in range(_GUESSES):
        trying = [
            as_cast(by_path[path], by_path[sources[attempt]])
            for path, sources in guesses.items()
            if path not in derived and attempt < len(sources)
        ]
        for spec, found in await _verified(trying, snapshot, encoder):
            derived[spec.path] = spec
            digests |= found
    if not derived:
        return snapshot
    arrays = tuple(derived.get(spec.path, spec) for spec in snapshot.content.arrays)
    content = Content(arrays, snapshot.content.placement, snapshot.content.layout)
    return replace(snapshot, content=content, derived_digests=digests)


def as_cast(spec: ArraySpec, source: ArraySpec) -> ArraySpec:
    """Return the description of an array as the cast of another one, chunk by chunk."""
    return replace(spec, chunk_shape=source.chunk_shape, source=source.path)


def guesses(arrays: Iterable[ArraySpec], bits_of: Callable[[ArraySpec], Bits]) -> dict[str, list[str]]:
    """Say which arrays may be casts, judging by a few elements spread over each.

    Parameters
    ----------
    arrays : iterable of ArraySpec
        Of one state.
    bits_of : callable
        Gives the bits of an array, uint8; a few elements of those that may matter are read.

    Returns
    -------
    dict of str to list of str
        By the path of the narrower array: the float32 arrays of the same shape that have the same values,
        rounded, where both were looked at, in their order in the state.
    """
    alike: dict[tuple[int, ...], tuple[list[ArraySpec], list[ArraySpec]]] = {}
    for spec in arrays:
        if spec.nbytes >= _SAMPLE * spec.itemsize and spec.dtype in (SOURCE_DTYPE, *CAST_DTYPES):
            alike.setdefault(spec.shape, ([], []))[spec.dtype in CAST_DTYPES].append(spec)
    found: dict[str, list[str]] = {}
    for sources, narrow in alike.values():
        if sources and narrow:
            found |= _matches(sources, narrow, bits_of)
    return found


def _matches(
    sources: list[ArraySpec], narrow: list[ArraySpec], bits_of: Callable[[ArraySpec], Bits]
) -> dict[str, list[str]]:
    """Compare arrays of one shape by their samples: as many casts as there are dtypes, not pairs."""
    samples = np.stack([_sample(spec, bits_of) for spec in sources])
    by_sample: dict[tuple[str, bytes], list[str]] = {}
    for dtype in {spec.dtype for spec in narrow}:
        rounded = cast(samples.reshape(-1), dtype).reshape(len(sources), -1)
        for spec, row in zip(sources, rounded, strict=True):
            by_sample.setdefault((dtype, row.tobytes()), []).append(spec.path)
    samples_of = {spec.path: (spec.dtype, _sample(spec, bits_of).tobytes()) for spec in narrow}
    return {path: by_sample[key] for path, key in samples_of.items() if key in by_sample}


def _sample(spec: ArraySpec, bits_of: Callable[[ArraySpec], Bits]) -> Bits:
    elements = bits_of(spec).reshape(-1, spec.itemsize)
    return elements[_spread(len(elements))].reshape(-1)


@lru_cache(maxsize=256)
def _spread(count: int) -> npt.NDArray[np.intp]:
    return np.linspace(0, count - 1, _SAMPLE).astype(np.intp)


def _guesses_in_slot(snapshot: Snapshot) -> dict[str, list[str]]:
    offsets = snapshot.content.placement.offsets
    with Slot(snapshot.slot, readonly=True) as slot:
        data = slot.data
        return guesses(
            snapshot.content.arrays, lambda spec: data[offsets[spec.path] : offsets[spec.path] + spec.nbytes]
        )


async def _verified(
    trying: list[ArraySpec], snapshot: Snapshot, encoder: Encoder
) -> list[tuple[ArraySpec, Mapping[str, str]]]:
    """Return those arrays that are what they are taken for, each with the digests of its chunks."""
    if not trying:
        return []
    digests: dict[str, dict[str, str]] = {spec.path: {} for spec in trying}
    refuted: set[str] = set()
    waiting = _checks(trying, snapshot.content)

    async def lane() -> None:
        for path, checks in waiting:
            # The first chunk that differs decides: the others of the array need not be read.
            if path in refuted:
                continue
            for check, digest in zip(checks, await encoder.check(checks, snapshot.slot), strict=True):
                if digest is None:
                    refuted.add(path)
                else:
                    digests[path][check.key] = digest

    await together(lane() for _ in range(encoder.parallel))
    return [(spec, digests[spec.path]) for spec in trying if spec.path not in refuted]


def _checks(trying: list[ArraySpec], content: Content) -> Iterator[tuple[str, list[CastCheck]]]:
    """Yield the path of an array and some of its chunks to verify, until all were yielded."""
    by_path = {spec.path: spec for spec in content.arrays}
    offsets = content.placement.offsets
    for spec in trying:
        assert spec.source is not None
        source_start, start = offsets[spec.source], offsets[spec.path]
        checks = [
            CastCheck(
                chunk.key,
                spec.dtype,
                source=(source_start + source.offset, source.nbytes),
                narrow=(start + chunk.offset, chunk.nbytes),
            )
            for chunk, source in zip(spec.chunks, by_path[spec.source].chunks, strict=True)
        ]
        at_once = min(MESSAGE_CHUNKS, max(1, JOB_BYTES // checks[0].source[1]))
        for first in range(0, len(checks), at_once):
            yield spec.path, checks[first : first + at_once]
