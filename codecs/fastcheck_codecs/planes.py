"""Byte planes: each is elided, raw, sparse, packed or entropy-coded, as a sample says."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from fastcheck_codecs.bitops import (
    SCRATCH,
    U8,
    U16,
    Bytes,
    Words,
    balance,
    give_pair,
    join_pair,
    take_halves,
    take_pair,
    widen,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.packing import get_packed, get_sparse, put_packed, put_sparse
from fastcheck_codecs.sections import SMALL, Mode, Section, Sink, Source, expand, squeeze

_UNIFORM = 1 / 256
#: Chance that two bytes of a plane are equal, below which entropy coding does not pay for its time: a
#: quarter bit of a wide word, that is 1 % of it, costs a fifth of all the time that the word takes.
_NOISE = {1: 1.06 * _UNIFORM, 2: 1.15 * _UNIFORM, 4: 1.5 * _UNIFORM, 8: 1.5 * _UNIFORM}
_SAMPLE_COUNT = 1536
#: One byte in so many other than zero, below which a list of them is smaller and decodes faster than packing.
_SPARSE_SHARE = 6
#: Shares of values that fit the pattern, from which packing is worth the time that its escapes cost.
_QUADS_FIT = 0.89
_NIBBLES_FIT = 0.95
#: The same for nibbles where bytes are equal as often as this: zstd codes such planes badly.
_NIBBLES_FIT_FEW, _FEW = 0.85, 0.18

#: Chance that two bytes are equal below which it does not matter whether a plane is centred around zero.
_WIDE = 0.2
#: Share of bytes near zero below which a plane cannot be sparse.
_DENSE = 0.5
#: Whether a byte is -1, 0 or 1; one of 0 to 14; one of -7 to 7.
_FITS = np.zeros((256, 3))
_FITS[[255, 0, 1], 0] = 1
_FITS[:15, 1] = 1
_FITS[[*range(249, 256), *range(8)], 2] = 1
#: Keeps the planes apart in one histogram.
_SHIFTS = np.arange(8, dtype=U16) * np.uint16(256)


class Traits(NamedTuple):
    """What a sample says of one byte plane.

    Attributes
    ----------
    collisions : float
        Chance that two bytes are equal.
    quads, upward, around : float
        Share of bytes that are -1 to 1, 0 to 14, and -7 to 7.
    """

    collisions: float
    quads: float
    upward: float
    around: float

    @property
    def packing(self) -> tuple[Mode, int] | None:
        """How to pack the plane, and its lowest value; None if that does not suit it."""
        if self.quads >= _QUADS_FIT:
            return Mode.QUADS, 255
        wanted = _NIBBLES_FIT_FEW if self.collisions >= _FEW else _NIBBLES_FIT
        if max(self.upward, self.around) >= wanted:
            return Mode.NIBBLES, (0 if self.upward >= self.around else 249)
        return None


def histogram(sample: Words) -> npt.NDArray[np.float64]:
    """Count the bytes in each plane of contiguous words.

    Returns
    -------
    ndarray of float64, shape (itemsize, 256)
        The lowest plane first.
    """
    width = sample.itemsize
    keys = sample.view(U8)
    if width > 1:
        keys = (keys.reshape(-1, width) + _SHIFTS[:width]).ravel()
    return np.bincount(keys, minlength=256 * width).reshape(width, 256).astype(np.float64)


def collisions(counts: npt.NDArray[np.float64], count: int) -> npt.NDArray[np.float64]:
    """Estimate for each plane of a histogram of `count` words the chance that two bytes are equal.

    It is 1/256 where they are noise. Unlike an entropy taken from counts it has no bias on small samples.
    """
    squares: npt.NDArray[np.float64] = np.einsum("ij,ij->i", counts, counts)
    squares -= count
    squares /= max(count * (count - 1), 1)
    return squares


def order0(counts: npt.NDArray[np.float64], count: int) -> float:
    """Sum the entropies of planes, given a histogram of `count` words; in bits per word."""
    shares = counts[counts > 0] / count
    return -float(shares @ np.log2(shares))


#: Traits of a plane that is too small for a survey to pay.
UNKNOWN = Traits(collisions=1, quads=0, upward=0, around=0)


def pick(words: Words) -> Words:
    """Copy about 1500 words, evenly spread: the sample that decisions are made from."""
    # An odd step meets no even period.
    return words[:: (words.size // _SAMPLE_COUNT) | 1].copy()


def traits_of(counts: npt.NDArray[np.float64], count: int) -> list[Traits]:
    """Sum up a histogram of `count` words, plane by plane, the lowest first."""
    table = np.empty((len(counts), 4))
    table[:, 0] = collisions(counts, count)
    np.divide(counts @ _FITS, count, out=table[:, 1:])
    return [Traits._make(row) for row in table.tolist()]


def survey(words: Words, *, signed: bool = False) -> list[Traits]:
    """Look at a sample of a block, plane by plane, the lowest first.

    Parameters
    ----------
    words : ndarray of unsigned, shape (n,)
        At least one.
    signed : bool
        Whether the planes are those of balanced digits.
    """
    sample = pick(words)
    if signed:
        balance(sample)
    return traits_of(histogram(sample), sample.size)


def is_noise(traits: Traits, width: int) -> bool:
    """Say whether a plane of words of `width` bytes is better stored as it is."""
    return traits.collisions < _NOISE[width]


def put_plane(sink: Sink, plane: Bytes, traits: Traits | None = None, *, width: int = 1) -> None:
    """Write one byte plane in the mode that suits it.

    Parameters
    ----------
    sink : Sink
    plane : ndarray of uint8, shape (n,)
        Not changed.
    traits : Traits, optional
        Of a sample of it, if they are known.
    width : int
        Bytes of the words it belongs to: what gains little on a wide word is not worth coding.

    Raises
    ------
    NoRoomError
        If it does not fit.
    """
    if traits is None and plane.size >= SMALL:
        traits = survey(plane)[0]
    # No need to count where the sample shows that hardly any byte is zero.
    dense = traits is not None and plane.size >= SMALL and traits.quads < _DENSE
    filled = plane.size if dense else int(np.count_nonzero(plane))
    if filled == 0:
        sink.section(Mode.ELIDED, 0)
    elif traits is None or plane.size < SMALL:
        sink.section(Mode.RAW, plane.size)[:] = plane
    elif filled * _SPARSE_SHARE < plane.size:
        put_sparse(sink, plane)
    elif packing := traits.packing:
        put_packed(sink, plane, packing[0], lowest=packing[1])
    else:
        _put_bytes(sink, plane, noise=is_noise(traits, width))


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
        where, values = get_sparse(section, room.size)
        room[:] = 0
        room[where] = values
    elif mode in (Mode.QUADS, Mode.NIBBLES):
        get_packed(section, out=room)
    elif mode is Mode.ENTROPY and data.size < room.size:
        expand(data, out=room)
    elif mode is Mode.ELIDED and data.size == 0:
        room[:] = 0
    else:
        raise CodecError(f"damaged section: {mode.name} of {data.size} bytes for {room.size}")
    return room


def put_halves(
    sink: Sink,
    pair: npt.NDArray[np.uint16],
    traits: Sequence[Traits] | None = None,
    *,
    width: int = 2,
) -> None:
    """Write 16-bit values as two byte planes, the lower first; `pair` is destroyed."""
    low, high = SCRATCH.room("low", pair.size), SCRATCH.room("high", pair.size)
    take_halves(pair, 0, low=low, high=high)
    put_plane(sink, low, traits[0] if traits else None, width=width)
    put_plane(sink, high, traits[1] if traits else None, width=width)


def get_pair(
    source: Source, first: Section, *, room: npt.NDArray[np.uint16], signed: bool = False
) -> npt.NDArray[np.uint16] | None:
    """Read what `put_pairs` or `put_halves` wrote; `first` is its first section.

    Returns
    -------
    ndarray of uint16, shape (n,), optional
        `room`, or the data of the section themselves; None where every value is zero.
    """
    if first.mode in (Mode.PAIR, Mode.PLAIN):
        if first.data.size != 2 * room.size:
            raise CodecError(f"damaged section: pair of {first.data.size} bytes for {room.size} values")
        return first.data.view(U16)
    low = get_plane(first, room=SCRATCH.room("low", room.size))
    second = source.section()
    if second.mode is Mode.ELIDED and not second.data.size:
        if first.mode is Mode.ELIDED:
            return None
        widen(low, out=room, signed=signed)
    elif second.mode is Mode.SPARSE:
        widen(low, out=room, signed=signed)
        where, values = get_sparse(second, room.size)
        room[where] += values.astype(U16) << np.uint16(8)
    else:
        high = get_plane(second, room=SCRATCH.room("high", room.size))
        join_pair(low, high, out=room, signed=signed)
    return room


def put_planes(
    sink: Sink, words: Words, traits: Sequence[Traits] | None = None, *, signed: bool = False
) -> None:
    """Write a block of words, plane by plane from the lowest.

    Parameters
    ----------
    sink : Sink
    words : ndarray of unsigned, shape (n,)
        Aligned, not changed; 1, 2, 4 or 8 bytes each. Must not lie in the scratch buffer ``spare``.
    traits : sequence of Traits, optional
        Of their planes, if they are known.
    signed : bool
        Whether they are differences, about as often below zero as above: then digits are balanced.
    """
    if words.itemsize == 1:
        put_plane(sink, words.view(U8), traits[0] if traits else None)
    else:
        put_pairs(sink, words, words.itemsize // 2, traits=traits, signed=signed)


def put_pairs(
    sink: Sink, words: Words, pairs: int, *, traits: Sequence[Traits] | None = None, signed: bool = False
) -> None:
    """Write the lowest `pairs` times 16 bits of each word; those that are noise are not split."""
    if pairs == 0:
        return
    width = words.itemsize
    traits = traits or survey(words, signed=signed)
    plain = 0
    for position in range(pairs):
        both, above = traits[2 * position : 2 * position + 2], traits[2 * position + 2 : 2 * position + 3]
        if words.size >= SMALL and all(is_noise(plane, width) for plane in both):
            # Carries are one more pass over all words; they matter where the next digit is small.
            free = signed and position == plain and all(plane.collisions < _WIDE for plane in above)
            plain += free
            section = sink.section(Mode.PLAIN if free else Mode.PAIR, 2 * words.size)
            take_pair(words, position, out=section.view(U16), signed=signed, plain=plain)
        else:
            low, high = SCRATCH.room("low", words.size), SCRATCH.room("high", words.size)
            take_halves(words, position, low=low, high=high, signed=signed, plain=plain)
            put_plane(sink, low, both[0], width=width)
            put_plane(sink, high, both[1], width=width)


def get_planes(source: Source, *, out: Words, signed: bool = False) -> None:
    """Undo `put_planes`."""
    if out.itemsize == 1:
        room = out.view(U8)
        plane = get_plane(source.section(), room=room)
        if plane is not room:
            np.copyto(room, plane)
    else:
        get_pairs(source, out.itemsize // 2, out=out, signed=signed)


def get_pairs(source: Source, pairs: int, *, out: Words, signed: bool = False) -> None:
    """Undo `put_pairs`; the bits above them become zero."""
    room = SCRATCH.room("pair", out.size, U16)
    if pairs == 0:
        out[:] = 0
    for position in range(pairs):
        first = source.section()
        pair: Any = get_pair(source, first, room=room, signed=signed)
        if pair is not None:
            give_pair(out, position, pair=pair, signed=signed and first.mode is not Mode.PLAIN)
        elif position == 0:
            out[:] = 0
