"""Sections and byte planes: each plane is elided, raw, sparse or entropy-coded, as a sample says."""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import Any

import numpy as np
import numpy.typing as npt
from numcodecs import zstd

from fastcheck_codecs.bitops import (
    SCRATCH,
    U8,
    U16,
    Bytes,
    Words,
    give_pair,
    join_pair,
    split_pair,
    take_pair,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import padded

#: mode, 3 zero bytes, length
_SECTION = struct.Struct("<B3xI")
#: count of values, bytes of the bitmap
_SPARSE = struct.Struct("<II")

_UNIFORM = 1 / 256
#: Chance that two bytes of a plane are equal, above which entropy coding pays for its time.
_PLANE_NOISE = 1.06 * _UNIFORM
#: The same for two planes at once; higher, because splitting them costs time as well.
_PAIR_NOISE = 1.25 * _UNIFORM
_SAMPLE_COUNT = 4096
_SMALL_SAMPLE = 64
#: Share of bytes other than zero, below which a bitmap is faster and smaller than zstd.
_SPARSE_SHARE = 10
_LEVEL = 1
_ZSTD_MAGIC = b"\x28\xb5\x2f\xfd"


class Mode(IntEnum):
    """How the bytes of one section are stored."""

    ELIDED = 0
    RAW = 1
    SPARSE = 2
    ENTROPY = 3
    #: Two byte planes that did not compress, left together as 16-bit values.
    PAIR = 4


class NoRoomError(Exception):
    """What is being encoded does not get small enough; its block is stored raw."""


class Sink:
    """Writes sections into a caller's memory and stops where raw storage would be smaller.

    Parameters
    ----------
    memory : ndarray of uint8
        Filled from the start; its size is the limit.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.position = 0

    def reserve(self, nbytes: int) -> Bytes:
        """Claim the next bytes, padded with zeros to the alignment, and return them unset."""
        start, end = self.position, self.position + nbytes
        stop = start + padded(nbytes)
        if stop > self._memory.size:
            raise NoRoomError
        self._memory[end:stop] = 0
        self.position = stop
        return self._memory[start:end]

    def section(self, mode: Mode, nbytes: int) -> Bytes:
        """Claim a section and return its unset data."""
        self.reserve(_SECTION.size)[:] = np.frombuffer(_SECTION.pack(mode, nbytes), U8)
        return self.reserve(nbytes)


class Source:
    """Reads what a `Sink` wrote; every length is checked before it is believed."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.position = 0

    def take(self, nbytes: int) -> Bytes:
        """Return the next bytes and skip their padding; a view."""
        start = self.position
        if start + padded(nbytes) > self._memory.size:
            raise CodecError(f"damaged block: {nbytes} bytes wanted at {start} of {self._memory.size}")
        self.position = start + padded(nbytes)
        return self._memory[start : start + nbytes]

    def section(self) -> tuple[Mode, Bytes]:
        """Return mode and data of the next section."""
        mode, nbytes = _SECTION.unpack(self.take(_SECTION.size).tobytes())
        if mode > max(Mode):
            raise CodecError(f"damaged block: unknown section mode {mode}")
        return Mode(mode), self.take(nbytes)

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self.position != self._memory.size:
            raise CodecError(f"damaged block: {self._memory.size - self.position} bytes are left over")


def collision(sample: Bytes) -> float:
    """Estimate the chance that two values of a plane are equal; 1/256 where it is noise.

    Unlike an entropy taken from counts it has no bias on small samples.
    """
    if sample.size < 2:
        return 1.0
    counts = np.bincount(sample, minlength=256)
    return (float(counts @ counts) - sample.size) / (sample.size * (sample.size - 1.0))


def stride(count: int) -> int:
    """Give an odd step that picks about 4096 of `count` values; odd, so that it meets no even period."""
    return (count // _SAMPLE_COUNT) | 1


def _is_noise(sample: Bytes, limit: float) -> bool:
    return sample.size >= _SMALL_SAMPLE and collision(sample) < limit


def _squeeze(data: Bytes) -> Any:
    """Compress, or return `data` where that gains nothing: the length alone tells a reader which."""
    if data.size < _SMALL_SAMPLE:
        return data
    packed = zstd.compress(data, _LEVEL)
    return packed if len(packed) < data.size else data


def _expand(data: Bytes, *, out: Bytes) -> None:
    """Undo `_squeeze` or plain zstd into exactly `out`."""
    if data.size == out.size:
        np.copyto(out, data)
        return
    size = _content_size(data)
    if size != out.size:
        raise CodecError(f"damaged section: zstd frame of {size} bytes, expected {out.size}")
    try:
        zstd.decompress(data, out)
    except (RuntimeError, ValueError) as error:
        raise CodecError(f"damaged section: {error}") from error


def _content_size(frame: Bytes) -> int | None:
    """Read the decompressed size from a zstd frame header (RFC 8878, 3.1.1.1); None if it has none.

    numcodecs accepts a destination larger than the content and leaves its end as it was, so the size
    has to be known to be exact beforehand.
    """
    start = frame[:18].tobytes()
    if len(start) < 6 or not start.startswith(_ZSTD_MAGIC):
        return None
    descriptor = start[4]
    single = bool(descriptor & 0x20)
    width = (1 if single else 0, 2, 4, 8)[descriptor >> 6]
    offset = 5 + (0 if single else 1) + (0, 1, 2, 4)[descriptor & 3]
    field = start[offset : offset + width]
    if width == 0 or len(field) < width:
        return None
    return int.from_bytes(field, "little") + (256 if width == 2 else 0)


def put_plane(sink: Sink, plane: Bytes) -> None:
    """Write one byte plane in the mode that suits it.

    Parameters
    ----------
    sink : Sink
    plane : ndarray of uint8, shape (n,)
        Not changed.

    Raises
    ------
    NoRoomError
        If it does not fit.
    """
    filled = int(np.count_nonzero(plane))
    if filled == 0:
        sink.section(Mode.ELIDED, 0)
    elif filled * _SPARSE_SHARE < plane.size:
        _put_sparse(sink, plane, filled)
    elif _is_noise(plane[:: stride(plane.size)], _PLANE_NOISE):
        sink.section(Mode.RAW, plane.size)[:] = plane
    else:
        packed = _squeeze(plane)
        mode = Mode.RAW if packed is plane else Mode.ENTROPY
        sink.section(mode, len(packed))[:] = np.frombuffer(packed, U8)


def _put_sparse(sink: Sink, plane: Bytes, filled: int) -> None:
    mask = SCRATCH.room("mask", plane.size, np.dtype(np.bool_))
    np.not_equal(plane, 0, out=mask)
    bitmap = _squeeze(np.packbits(mask, bitorder="little"))
    values = _squeeze(plane[np.flatnonzero(mask)])
    data = sink.section(Mode.SPARSE, _SPARSE.size + len(bitmap) + len(values))
    data[: _SPARSE.size] = np.frombuffer(_SPARSE.pack(filled, len(bitmap)), U8)
    data[_SPARSE.size : _SPARSE.size + len(bitmap)] = np.frombuffer(bitmap, U8)
    data[_SPARSE.size + len(bitmap) :] = np.frombuffer(values, U8)


def get_plane(mode: Mode, data: Bytes, *, out: Bytes) -> None:
    """Undo `put_plane`, given the section.

    Raises
    ------
    CodecError
        If the section does not hold exactly ``out.size`` bytes.
    """
    if mode is Mode.SPARSE:
        _get_sparse(data, out)
    elif mode is Mode.ENTROPY and data.size < out.size:
        _expand(data, out=out)
    elif mode is Mode.RAW and data.size == out.size:
        np.copyto(out, data)
    elif mode is Mode.ELIDED and data.size == 0:
        out[:] = 0
    else:
        raise CodecError(f"damaged section: {mode.name} of {data.size} bytes for {out.size}")


def _get_sparse(data: Bytes, out: Bytes) -> None:
    if data.size < _SPARSE.size:
        raise CodecError("damaged section: sparse plane cut short")
    filled, bitmap_nbytes = _SPARSE.unpack(data[: _SPARSE.size].tobytes())
    body = data[_SPARSE.size :]
    full_nbytes = -(-out.size // 8)
    if filled > out.size or bitmap_nbytes > min(full_nbytes, body.size) or body.size - bitmap_nbytes > filled:
        raise CodecError("damaged section: lengths of a sparse plane do not fit")
    bitmap = np.empty(full_nbytes, U8)
    _expand(body[:bitmap_nbytes], out=bitmap)
    where = np.flatnonzero(np.unpackbits(bitmap, count=out.size, bitorder="little").view(np.bool_))
    if where.size != filled:
        raise CodecError(f"damaged section: sparse plane has {where.size} values, it says {filled}")
    values = np.empty(filled, U8)
    _expand(body[bitmap_nbytes:], out=values)
    out[:] = 0
    out[where] = values


def put_halves(sink: Sink, pair: npt.NDArray[np.uint16]) -> None:
    """Write 16-bit values as two byte planes, the lower first; `pair` is destroyed."""
    low, high = SCRATCH.room("low", pair.size), SCRATCH.room("high", pair.size)
    split_pair(pair, low=low, high=high)
    put_plane(sink, low)
    put_plane(sink, high)


def put_pair(sink: Sink, words: Words, position: int) -> None:
    """Write bits ``[16 * position, 16 * position + 16)`` of each word, as they are if they are noise."""
    sample = (words[:: stride(words.size)] >> words.dtype.type(16 * position)).astype(U16)
    planes = sample.astype(U8), (sample >> np.uint16(8)).astype(U8)
    if all(_is_noise(plane, _PAIR_NOISE) for plane in planes):
        take_pair(words, position, out=sink.section(Mode.PAIR, 2 * words.size).view(U16))
        return
    pair = SCRATCH.room("pair", words.size, U16)
    take_pair(words, position, out=pair)
    put_halves(sink, pair)


def get_pair(source: Source, *, out: npt.NDArray[np.uint16]) -> None:
    """Undo `put_pair` or `put_halves`."""
    mode, data = source.section()
    if mode is Mode.PAIR:
        if data.size != 2 * out.size:
            raise CodecError(f"damaged section: pair of {data.size} bytes for {out.size} values")
        np.copyto(out, data.view(U16))
        return
    low, high = SCRATCH.room("low", out.size), SCRATCH.room("high", out.size)
    get_plane(mode, data, out=low)
    mode, data = source.section()
    get_plane(mode, data, out=high)
    join_pair(low, high, out=out)


def put_planes(sink: Sink, words: Words) -> None:
    """Write a block of words, plane by plane from the lowest.

    Parameters
    ----------
    sink : Sink
    words : ndarray of unsigned, shape (n,)
        Aligned, not changed; 1, 2, 4 or 8 bytes each. Must not lie in the scratch buffer ``spare``.
    """
    if words.itemsize == 1:
        put_plane(sink, words.view(U8))
        return
    for position in range(words.itemsize // 2):
        put_pair(sink, words, position)


def get_planes(source: Source, *, out: Words) -> None:
    """Undo `put_planes`."""
    if out.itemsize == 1:
        mode, data = source.section()
        get_plane(mode, data, out=out.view(U8))
        return
    get_low_pairs(source, out.itemsize // 2, out=out)


def get_low_pairs(source: Source, pairs: int, *, out: Words) -> None:
    """Read the lowest pairs of each word; the bits above them become zero."""
    if out.itemsize == 2:
        if pairs:
            get_pair(source, out=out)
        return
    pair = SCRATCH.room("pair", out.size, U16)
    for position in range(pairs):
        get_pair(source, out=pair)
        give_pair(out, position, pair=pair)
