"""How small and how fast the codecs are on the tensors of a checkpoint that the user has saved."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

import numpy as np
from fastcheck_codecs import PrefixIndex, XorDelta, delta_is_smaller, max_encoded_nbytes
from fastcheck_codecs.dtypes import by_name
from fastcheck_codecs.header import Entry, Header, read_header

from fastcheck_dask.engine.encode import Bits
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    ConfigError,
    CorruptDataError,
    UnrecoverableError,
)
from fastcheck_dask.layout.chunks import Chunk
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker
from fastcheck_dask.tiers.stored_checkpoint import StoredCheckpoint

SAMPLE_BYTES = 64 * 2**20
#: The widths of a prefix that are tried; 12 bits of a float32 are its sign, its exponent, and 3 more.
PREFIX_BITS = range(7, 17)
RESIDUALS = ("xor", "difference", "auto")
WEIGHTS, MOMENTA, SECOND_MOMENTS = "weights", "momenta", "second moments"

#: What is read of one chunk at most: several of the blocks in which the codecs work.
_PIECE_BYTES = 4 * 2**20
#: And at least so many pieces share what is measured, where not all of it is.
_PIECES = 16
#: Starts and ends of pieces are multiples of it, whatever the dtype.
_GRAIN = 64
#: Names that optimizers of torch and of others give; they only group what is printed.
_NAMES = {
    MOMENTA: {"exp_avg", "momentum_buffer", "momentum", "mu", "m", "exp_inf"},
    SECOND_MOMENTS: {"exp_avg_sq", "max_exp_avg_sq", "square_avg", "acc_delta", "sum", "nu", "v"},
}


@dataclass(frozen=True)
class Measured:
    """What one way of encoding made of the samples; times in seconds of one core."""

    raw_bytes: int
    encoded_bytes: int
    encode_seconds: float
    decode_seconds: float

    @property
    def ratio(self) -> float:
        """Raw bytes for each encoded one."""
        return self.raw_bytes / self.encoded_bytes

    @property
    def encode_bytes_per_second(self) -> float:
        """Raw bytes encoded in a second."""
        return self.raw_bytes / max(self.encode_seconds, 1e-9)

    @property
    def decode_bytes_per_second(self) -> float:
        """Raw bytes decoded in a second."""
        return self.raw_bytes / max(self.decode_seconds, 1e-9)


@dataclass(frozen=True)
class Curve:
    """The measurements on one kind of tensors of one dtype."""

    kind: str
    dtype: str
    #: Bytes of all tensors of the kind, sampled or not.
    total_bytes: int
    sampled_bytes: int
    #: By `prefix_bits`, "auto" the last.
    prefix: dict[int | str, Measured]
    #: Raw bytes by the kind of block that "auto" wrote.
    auto_blocks: dict[str, int]
    #: By `residual`; "whole" is `PrefixIndex` on the same samples. Empty without a checkpoint before.
    delta: dict[str, Measured] = field(default_factory=dict)
    #: Raw bytes by the residual that "auto" chose.
    auto_residuals: dict[str, int] = field(default_factory=dict)
    #: Raw bytes of which a save would send the delta.
    sent_as_delta_bytes: int = 0

    @property
    def name(self) -> str:
        """Kind and dtype."""
        return f"{self.kind}, {self.dtype}"

    @property
    def best_prefix_bits(self) -> int:
        """The explicit `prefix_bits` with the smallest payloads."""
        explicit = {bits: m for bits, m in self.prefix.items() if isinstance(bits, int)}
        return min(explicit, key=lambda bits: (explicit[bits].encoded_bytes, bits))


@dataclass(frozen=True)
class Tuning:
    """What `tune` found."""

    generation: int
    tag: str
    #: Tag of the checkpoint before, if there is one that deltas can be made against.
    before: str | None
    curves: tuple[Curve, ...]
    #: Bytes of the tensors that have no exponent, and so no prefix.
    other_bytes: int
    #: Bytes of the tensors that the storage nodes were not sent, being casts of others.
    derived_bytes: int

    @property
    def auto(self) -> Measured:
        """What "auto" made of all samples together; each kind counts by the bytes that there are of it."""
        parts = [(curve.prefix["auto"], curve.total_bytes) for curve in self.curves]
        total = sum(nbytes for _, nbytes in parts)
        return Measured(
            total,
            round(sum(nbytes / measured.ratio for measured, nbytes in parts)),
            sum(nbytes / measured.encode_bytes_per_second for measured, nbytes in parts),
            sum(nbytes / measured.decode_bytes_per_second for measured, nbytes in parts),
        )


class _Sample(NamedTuple):
    path: str
    dtype: str
    bits: Bits
    before: Bits | None


def tune(folder: CheckpointFolder, *, tag: str | None = None, sample_bytes: int = SAMPLE_BYTES) -> Tuning:
    """Measure the codecs on a committed checkpoint; nothing is written.

    Parameters
    ----------
    folder : CheckpointFolder
        Where it lies. The run may be going on: what is committed does not change.
    tag : str, optional
        Which one; by default the newest.
    sample_bytes : int
        Most bytes that are measured, spread over the tensors.

    Raises
    ------
    CheckpointNotFoundError
        If there is no committed checkpoint, or none with the tag.
    UnrecoverableError
        If it has no floats to measure.
    CorruptDataError, ShardUnavailableError
        If it is damaged.
    """
    if sample_bytes < _GRAIN:
        raise ConfigError(f"a sample has at least {_GRAIN} bytes, not {sample_bytes}")
    marker, older = _chosen(folder, tag)
    manifest = folder.load_manifest(marker)
    before = None if older is None else (older, folder.load_manifest(older))
    chunks = _floats(manifest)
    if not chunks:
        raise UnrecoverableError("a curve", (f"generation {manifest.generation} has no tensors of floats",))
    curves = []
    reader = _Reader(folder, (marker, manifest), before)
    for name, alike in chunks.items():
        samples = reader.read(alike, sample_bytes // len(chunks))
        curves.append(_curve(name, samples, sum(chunk.nbytes for chunk in alike)))
    floats = sum(curve.total_bytes for curve in curves)
    has_deltas = any(curve.delta for curve in curves)
    return Tuning(
        manifest.generation,
        manifest.tag,
        older.tag if older is not None and has_deltas else None,
        tuple(curves),
        manifest.raw_bytes - floats,
        manifest.derived_bytes,
    )


def _chosen(folder: CheckpointFolder, tag: str | None) -> tuple[CommitMarker, CommitMarker | None]:
    """Return the checkpoint that is asked for and the one before it."""
    committed = folder.committed()
    for at in reversed(range(len(committed))):
        if tag is None or committed[at].tag == tag:
            return committed[at], committed[at - 1] if at else None
    if tag is None:
        raise CheckpointNotFoundError(f"{folder.store.location} has no committed checkpoint")
    tags = ", ".join(marker.tag for marker in reversed(committed[-8:])) or "none"
    raise CheckpointNotFoundError(
        f"{folder.store.location} has no committed checkpoint {tag!r}; the newest tags are: {tags}"
    )


def _floats(manifest: Manifest) -> dict[tuple[str, str], list[Chunk]]:
    """Return the chunks by kind and dtype: the best P of one dtype says nothing about another."""
    found: dict[tuple[str, str], list[Chunk]] = {}
    for spec in manifest.arrays:
        if by_name(codec_dtype(spec.dtype)).exponent_bits and spec.nbytes:
            found.setdefault((kind_of(spec.path), spec.dtype), []).extend(spec.chunks)
    order = (WEIGHTS, MOMENTA, SECOND_MOMENTS)
    return dict(sorted(found.items(), key=lambda item: (order.index(item[0][0]), item[0][1])))


def kind_of(path: str) -> str:
    """Say what a tensor is, going by its path; that decides where it is printed and nothing else.

    Examples
    --------
    >>> kind_of("optimizer/state/0/exp_avg_sq")
    'second moments'
    >>> kind_of("model/layers.0.weight")
    'weights'
    """
    parts = path.split("/")
    # Only where an optimizer keeps them: a model may well have a tensor "v".
    if any(part.startswith(("opt", "state")) for part in parts[:-1]):
        for kind, names in _NAMES.items():
            if names.intersection(parts):
                return kind
    return WEIGHTS


def spread(chunks: Sequence[Chunk], budget_bytes: int) -> list[tuple[Chunk, int, int]]:
    """Choose pieces of chunks, evenly spread, of at most so many bytes together.

    Parameters
    ----------
    chunks : sequence of Chunk
    budget_bytes : int
        At least 64.

    Returns
    -------
    list of (Chunk, start, stop)
        Offsets inside the chunk in bytes; at least one piece if there are chunks.
    """
    if sum(chunk.nbytes for chunk in chunks) <= budget_bytes:
        return [(chunk, 0, chunk.nbytes) for chunk in chunks]
    share = budget_bytes // min(_PIECES, len(chunks))
    limit = max(_GRAIN, min(_PIECE_BYTES, share // _GRAIN * _GRAIN))
    sizes = [min(chunk.nbytes, limit) for chunk in chunks]
    total = sum(sizes)
    if total <= budget_bytes:
        chosen = list(zip(chunks, sizes, strict=True))
    else:
        # Each chunk pays with its size for being chosen; what it is given does not suffice for all.
        chosen, credit = [], 0
        for chunk, size in zip(chunks, sizes, strict=True):
            credit += size * budget_bytes
            if credit >= size * total:
                credit -= size * total
                chosen.append((chunk, size))
    starts = ((chunk, size, (chunk.nbytes - size) // 2 // _GRAIN * _GRAIN) for chunk, size in chosen)
    return [(chunk, start, start + size) for chunk, size, start in starts]


class _Reader:
    """Reads pieces of chunks and the bits that they had a checkpoint before."""

    def __init__(
        self,
        folder: CheckpointFolder,
        now: tuple[CommitMarker, Manifest],
        before: tuple[CommitMarker, Manifest] | None,
    ) -> None:
        self._now = StoredCheckpoint(folder, *now)
        self._before = None if before is None else StoredCheckpoint(folder, *before)

    def read(self, chunks: list[Chunk], budget_bytes: int) -> list[_Sample]:
        samples = []
        for chunk, start, stop in spread(chunks, max(budget_bytes, _GRAIN)):
            bits = self._now.read(chunk.key)[0][start:stop].copy()
            samples.append(_Sample(chunk.path, codec_dtype(chunk.dtype), bits, None))
            if self._before is None:
                continue
            old = self._before.manifest.chunks.get(chunk.key)
            if old is not None and (old.dtype, old.nbytes) == (chunk.dtype, chunk.nbytes):
                before = self._before.read(old.key)[0][start:stop].copy()
                samples[-1] = samples[-1]._replace(before=before)
        return samples


def _curve(name: tuple[str, str], samples: list[_Sample], total_bytes: int) -> Curve:
    prefix: dict[int | str, Measured] = {}
    settings: tuple[int | str, ...] = (*PREFIX_BITS, "auto")
    for bits in settings:
        prefix[bits], headers = measure(samples, partial(_whole, prefix_bits=bits))
    # Those of the last one, "auto".
    blocks = _count(headers, lambda entry: entry.block.name.lower())
    pairs = [sample for sample in samples if sample.before is not None]
    delta: dict[str, Measured] = {}
    residuals: dict[str, int] = {}
    if pairs:
        delta["whole"], _ = measure(pairs, partial(_whole, prefix_bits="auto"))
        for residual in RESIDUALS:
            delta[residual], headers = measure(pairs, partial(_against, residual=residual))
        residuals = _count(headers, lambda entry: entry.residual.name.lower())
    return Curve(
        *name,
        total_bytes,
        sum(sample.bits.size for sample in samples),
        prefix,
        blocks,
        delta,
        residuals,
        sum(s.bits.size for s in pairs if delta_is_smaller(s.bits, s.before, dtype=s.dtype)),
    )


def _whole(sample: _Sample, prefix_bits: int | str) -> PrefixIndex:
    return PrefixIndex(prefix_bits=prefix_bits, dtype=sample.dtype)


def _against(sample: _Sample, residual: str) -> XorDelta:
    return XorDelta(base=sample.before, residual=residual, dtype=sample.dtype)


def measure(
    samples: Sequence[_Sample], codec_for: Callable[[_Sample], PrefixIndex | XorDelta]
) -> tuple[Measured, list[Header]]:
    """Encode and decode samples, one after the other; return what it took, and the headers of the payloads.

    Raises
    ------
    CorruptDataError
        If what was decoded differs from the sample.
    """
    largest = max(sample.bits.size for sample in samples)
    out, back = np.empty(max_encoded_nbytes(largest), np.uint8), np.empty(largest, np.uint8)
    # The first pass over fresh memory and cold code is not what a save sees.
    _encode_decode(codec_for(samples[0]), samples[0], out=out, back=back)
    encoded, seconds, headers = 0, [0.0, 0.0], []
    for sample in samples:
        length, *took = _encode_decode(codec_for(sample), sample, out=out, back=back)
        encoded += length
        seconds = [before + more for before, more in zip(seconds, took, strict=True)]
        headers.append(read_header(out[:length]))
    return Measured(sum(sample.bits.size for sample in samples), encoded, *seconds), headers


def _encode_decode(
    codec: PrefixIndex | XorDelta, sample: _Sample, *, out: Bits, back: Bits
) -> tuple[int, float, float]:
    decoded = back[: sample.bits.size]
    started = time.perf_counter()
    length = codec.encode_into(sample.bits, out)
    between = time.perf_counter()
    codec.decode(out[:length], out=decoded)
    ended = time.perf_counter()
    if not np.array_equal(decoded, sample.bits):
        raise CorruptDataError(f"{sample.path}: {codec!r} did not give back what was encoded")
    return length, between - started, ended - between


def _count(headers: list[Header], name: Callable[[Entry], str]) -> dict[str, int]:
    """Count raw bytes by what the block tables say; the blocks of one payload count alike."""
    counted: Counter[str] = Counter()
    for header in headers:
        for entry in header.entries:
            counted[name(entry)] += header.raw_nbytes // len(header.entries)
    return dict(counted.most_common())
