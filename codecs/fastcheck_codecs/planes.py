"""Byte planes: each is elided, raw, sparse, packed or entropy-coded, as a sample says."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

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
from fastcheck_codecs.packing import get_packed, get_sparse, put_packed, put_sparse
from fastcheck_codecs.sections import SMALL, Mode, Section, Sink, Source, expand, squeeze

_UNIFORM = 1 / 256
#: Chance that two bytes of a plane are equal, above which entropy coding pays for its time.
_PLANE_NOISE = 1.06 * _UNIFORM
#: The same for two planes at once; higher, because splitting them costs time as well.
_PAIR_NOISE = 1.25 * _UNIFORM
_SAMPLE_COUNT = 2048
#: One byte in so many other than zero, below which a list of them is faster and smaller than packing.
_SPARSE_SHARE = 16
#: Shares of values that fit the pattern, from which packing is smaller than entropy coding of bytes.
_QUADS_FIT = 0.9
_NIBBLES_FIT = 0.94

Histogram = npt.NDArray[np.intp]


def stride(count: int) -> int:
    """Give an odd step that picks about 2048 of `count` values; odd, so that it meets no even period."""
    return (count // _SAMPLE_COUNT) | 1


def survey(words: Words) -> Histogram:
    """Count the bytes in each plane of a sample.

    Parameters
    ----------
    words : ndarray of unsigned, shape (n,)

    Returns
    -------
    ndarray of intp, shape (itemsize, 256)
        The lowest plane first.
    """
    sample = np.ascontiguousarray(words[:: stride(words.size)])
    width = sample.itemsize
    keys = sample.view(U8).reshape(-1, width) + np.arange(0, 256 * width, 256, dtype=U16)
    return np.bincount(keys.ravel(), minlength=256 * width).reshape(width, 256)


def collisions(histogram: Histogram) -> npt.NDArray[np.float64]:
    """Estimate for each plane the chance that two of its bytes are equal; 1/256 where it is noise.

    Unlike an entropy taken from counts it has no bias on small samples.
    """
    count = float(histogram[0].sum())
    if count < 2:
        return np.ones(len(histogram))
    squares = np.einsum("ij,ij->i", histogram, histogram)
    chances: npt.NDArray[np.float64] = (squares - count) / (count * (count - 1.0))
    return chances


def _pattern(counts: Histogram) -> tuple[Mode, int] | None:
    """Choose how to pack a plane with these counts, and the lowest value; None if it does not suit."""
    total = int(counts.sum())
    if counts[0] + counts[1] + counts[255] >= _QUADS_FIT * total:
        return Mode.QUADS, 255
    upward = int(counts[:15].sum())
    around = int(counts[:8].sum() + counts[249:].sum())
    if max(upward, around) >= _NIBBLES_FIT * total:
        return Mode.NIBBLES, (0 if upward >= around else 249)
    return None


def put_plane(sink: Sink, plane: Bytes, histogram: Histogram | None = None) -> None:
    """Write one byte plane in the mode that suits it.

    Parameters
    ----------
    sink : Sink
    plane : ndarray of uint8, shape (n,)
        Not changed.
    histogram : ndarray of intp, shape (256,), optional
        Counts of a sample of it, if they are known.

    Raises
    ------
    NoRoomError
        If it does not fit.
    """
    filled = int(np.count_nonzero(plane))
    if filled == 0:
        sink.section(Mode.ELIDED, 0)
    elif plane.size < SMALL:
        sink.section(Mode.RAW, plane.size)[:] = plane
    elif filled * _SPARSE_SHARE < plane.size:
        put_sparse(sink, plane)
    else:
        counts = survey(plane)[0] if histogram is None else histogram
        if pattern := _pattern(counts):
            put_packed(sink, plane, pattern[0], lowest=pattern[1])
        else:
            _put_bytes(sink, plane, noise=bool(collisions(counts[np.newaxis])[0] < _PLANE_NOISE))


def _put_bytes(sink: Sink, plane: Bytes, *, noise: bool) -> None:
    stored = plane if noise else squeeze(plane)
    mode = Mode.RAW if stored is plane else Mode.ENTROPY
    sink.section(mode, len(stored))[:] = np.frombuffer(stored, U8)


def get_plane(section: Section, *, room: Bytes) -> Bytes:
    """Undo `put_plane`, given the section.

    Parameters
    ----------
    section : Section
    room : ndarray of uint8, shape (n,)
        May be written to.

    Returns
    -------
    ndarray of uint8, shape (n,)
        `room`, or where nothing had to be done the data of the section themselves.

    Raises
    ------
    CodecError
        If the section does not hold exactly n bytes.
    """
    mode, _, data = section
    if mode is Mode.RAW and data.size == room.size:
        return data
    if mode is Mode.SPARSE:
        get_sparse(section, out=room)
    elif mode in (Mode.QUADS, Mode.NIBBLES):
        get_packed(section, out=room)
    elif mode is Mode.ENTROPY and data.size < room.size:
        expand(data, out=room)
    elif mode is Mode.ELIDED and data.size == 0:
        room[:] = 0
    else:
        raise CodecError(f"damaged section: {mode.name} of {data.size} bytes for {room.size}")
    return room


def put_halves(sink: Sink, pair: npt.NDArray[np.uint16], histogram: Histogram | None = None) -> None:
    """Write 16-bit values as two byte planes, the lower first; `pair` is destroyed."""
    low, high = SCRATCH.room("low", pair.size), SCRATCH.room("high", pair.size)
    split_pair(pair, low=low, high=high)
    put_plane(sink, low, None if histogram is None else histogram[0])
    put_plane(sink, high, None if histogram is None else histogram[1])


def get_pair(source: Source, *, room: npt.NDArray[np.uint16]) -> npt.NDArray[np.uint16] | None:
    """Read what `put_pairs` or `put_halves` wrote.

    Returns
    -------
    ndarray of uint16, shape (n,), optional
        `room`, or the data of the section themselves; None where every value is zero.
    """
    first = source.section()
    if first.mode is Mode.PAIR:
        if first.data.size != 2 * room.size:
            raise CodecError(f"damaged section: pair of {first.data.size} bytes for {room.size} values")
        return first.data.view(U16)
    low = get_plane(first, room=SCRATCH.room("low", room.size))
    second = source.section()
    if second.mode is Mode.ELIDED and not second.data.size:
        if first.mode is Mode.ELIDED:
            return None
        np.copyto(room, low)
        return room
    join_pair(low, get_plane(second, room=SCRATCH.room("high", room.size)), out=room)
    return room


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
    else:
        put_pairs(sink, words, words.itemsize // 2)


def put_pairs(sink: Sink, words: Words, pairs: int) -> None:
    """Write the lowest `pairs` times 16 bits of each word; those that are noise are not split."""
    if pairs == 0:
        return
    histogram = survey(words)
    noise = collisions(histogram) < _PAIR_NOISE
    noise &= words.size >= SMALL
    for position in range(pairs):
        planes = slice(2 * position, 2 * position + 2)
        if noise[planes].all():
            take_pair(words, position, out=sink.section(Mode.PAIR, 2 * words.size).view(U16))
        else:
            pair = SCRATCH.room("pair", words.size, U16)
            take_pair(words, position, out=pair)
            put_halves(sink, pair, histogram[planes])


def get_planes(source: Source, *, out: Words) -> None:
    """Undo `put_planes`."""
    if out.itemsize == 1:
        room = out.view(U8)
        plane = get_plane(source.section(), room=room)
        if plane is not room:
            np.copyto(room, plane)
    else:
        get_pairs(source, out.itemsize // 2, out=out)


def get_pairs(source: Source, pairs: int, *, out: Words) -> None:
    """Undo `put_pairs`; the bits above them become zero."""
    room = SCRATCH.room("pair", out.size, U16)
    if pairs == 0:
        out[:] = 0
    for position in range(pairs):
        pair: Any = get_pair(source, room=room)
        if pair is not None:
            give_pair(out, position, pair=pair)
        elif position == 0:
            out[:] = 0
