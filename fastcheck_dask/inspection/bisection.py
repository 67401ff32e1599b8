"""Find the first stored checkpoint in which a tensor became NaN or infinite, or jumped."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fastcheck_dask.errors import CorruptDataError, LayoutError, ShardUnavailableError
from fastcheck_dask.inspection.checkpoint import Checkpoint
from fastcheck_dask.inspection.chunks import in_order
from fastcheck_dask.inspection.contents import ArrayEntry, entries
from fastcheck_dask.inspection.difference import change_of, is_equal
from fastcheck_dask.inspection.numbers import as_numbers
from fastcheck_dask.layout.chunks import Chunk
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker


@dataclass(frozen=True)
class Finding:
    """One tensor in the first checkpoint in which something is wrong with it."""

    generation: int
    tag: str
    path: str
    nan: int = 0
    inf: int = 0
    #: Relative L2 distance to the checkpoint before, where that was asked for and is too large.
    jump: float | None = None


@dataclass(frozen=True)
class Bisected:
    """What was found."""

    #: All tensors of the first checkpoint that has any.
    findings: tuple[Finding, ...]
    #: Checkpoints that were looked at, oldest first.
    searched: tuple[str, ...]
    #: The last one before it, if there is one.
    last_good: str | None
    #: Checkpoints that could not be read, each with the reason.
    unreadable: tuple[str, ...]


def first_bad(
    folder: CheckpointFolder,
    markers: Sequence[CommitMarker],
    tensor: str | None = None,
    *,
    jump: float | None = None,
    advance: Callable[[int], None] = lambda _: None,
) -> Bisected:
    """Look through checkpoints, oldest first, and stop at the first with a NaN, an infinity or a jump.

    Parameters
    ----------
    folder : CheckpointFolder
        Where they lie.
    markers : sequence of CommitMarker
        Oldest first.
    tensor : str, optional
        Path of the only one to look at.
    jump : float, optional
        A relative L2 distance to the checkpoint before; a larger one is a finding, too.
    advance : callable
        Is called with 1 after each checkpoint.

    Raises
    ------
    LayoutError
        If no checkpoint that could be read has the tensor.

    Notes
    -----
    Every checkpoint is looked at, since what became NaN may have been mended in between; but a chunk with
    a digest that was seen already is not read again, so what did not change costs nothing.
    """
    finite: set[str] = set()
    searched: list[str] = []
    unreadable: list[str] = []
    last: Checkpoint | None = None
    seen = False
    for marker in markers:
        try:
            current = Checkpoint(folder, folder.load_manifest(marker), marker)
            seen = seen or tensor is None or tensor in current
            findings = _findings(current, last, tensor, finite, jump)
        except (CorruptDataError, ShardUnavailableError) as error:
            unreadable.append(str(error))
            continue
        finally:
            advance(1)
        searched.append(marker.tag)
        if findings:
            good = last.tag if last is not None else None
            return Bisected(tuple(findings), tuple(searched), good, tuple(unreadable))
        last = current
    if not seen and searched:
        raise LayoutError(f"no checkpoint in {folder.store.location} has a tensor {tensor!r}")
    return Bisected((), tuple(searched), last.tag if last is not None else None, tuple(unreadable))


def _findings(
    current: Checkpoint, last: Checkpoint | None, tensor: str | None, finite: set[str], jump: float | None
) -> list[Finding]:
    before = {} if last is None else {entry.path: entry for entry in entries(last.manifest)}
    found = []
    for entry in entries(current.manifest):
        if (entry.shared_with is not None and tensor is None) or tensor not in (None, entry.path):
            continue
        nan, inf = _count(current, entry, finite)
        moved = None
        if jump is not None and last is not None and entry.path in before:
            moved = _moved(last, current, (before[entry.path], entry))
        too_far = moved is not None and jump is not None and moved > jump
        if nan or inf or too_far:
            found.append(
                Finding(current.generation, current.tag, entry.path, nan, inf, moved if too_far else None)
            )
    return found


def _count(checkpoint: Checkpoint, entry: ArrayEntry, finite: set[str]) -> tuple[int, int]:
    """Count NaNs and infinities; what names the contents of chunks without any is added to `finite`."""

    def look(chunk: Chunk) -> tuple[int, int]:
        # The same bits may be finite numbers of one dtype, and none of another.
        contents = f"{chunk.dtype} {checkpoint.manifest.digests.get(chunk.key)}"
        if entry.bits is None and contents in finite:
            return 0, 0
        bits = (
            np.frombuffer(entry.bits, np.uint8) if entry.bits is not None else checkpoint.reader.read(chunk)
        )
        numbers = as_numbers(bits, chunk.dtype)
        if numbers is None or np.isfinite(numbers).all():
            if entry.bits is None:
                finite.add(contents)
            return 0, 0
        return int(np.isnan(numbers).sum()), int(np.isinf(numbers).sum())

    counts = list(in_order(entry.spec.chunks, look, nbytes=lambda chunk: chunk.nbytes))
    return sum(nan for nan, _ in counts), sum(inf for _, inf in counts)


def _moved(last: Checkpoint, current: Checkpoint, pair: tuple[ArrayEntry, ArrayEntry]) -> float | None:
    first, second = pair
    if (first.spec.dtype, first.spec.shape) != (second.spec.dtype, second.spec.shape):
        return None
    return 0.0 if is_equal(last, current, pair) else change_of(last, current, pair).relative_l2
