"""Prefix blocks of floats: exponents relative to their neighbours, or a table of prefixes.

Both take the top 16 bits of each word apart and leave the rest, which is nearly noise, as it is.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_codecs.bitops import (
    BOOL,
    SCRATCH,
    SIGNED,
    U8,
    U16,
    Bytes,
    Words,
    give_pair,
    pack_bits,
    shift_cast,
    take_pair,
    unpack_bits,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.planes import (
    UNKNOWN,
    Traits,
    get_pair,
    get_pairs,
    get_plane,
    histogram,
    is_noise,
    pick,
    put_halves,
    put_pairs,
    put_plane,
    stride,
    traits_of,
)
from fastcheck_codecs.sections import Mode, Sink, Source

#: Values that share one reference exponent.
ROW = 1024
#: One exponent in so many is looked at to choose the reference; a prime, as kernels of 3 x 3 have a period.
_ROW_STEP = 11
#: How far the reference lies above the mean: four bits then reach from 5 above to 9 below.
ABOVE_MEAN = 5

_COUNT = struct.Struct("<I")
I16 = SIGNED[2]

Pair = npt.NDArray[np.uint16]
Numbers = npt.NDArray[np.unsignedinteger[Any]]


def references(exponents: Numbers) -> Numbers:
    """Choose a reference exponent for each row: near its mean, zeros left out.

    Parameters
    ----------
    exponents : ndarray of uint8 or uint16, shape (n,)

    Returns
    -------
    ndarray of the same dtype, shape (ceil(n / 1024),)

    Notes
    -----
    The maximum of a row depends on its largest value alone; relative to the mean, indices vary less.
    """
    full = exponents.size // ROW
    sample = np.ascontiguousarray(exponents[: full * ROW].reshape(-1, ROW)[:, ::_ROW_STEP])
    # Counting costs twice as much as adding up, and zeros are rare.
    filled = sample.shape[1] if sample.all() else np.maximum(np.count_nonzero(sample, axis=1), 1)
    means = sample.sum(axis=1, dtype=np.uint32) // filled
    last = exponents[full * ROW :]
    if last.size:
        means = np.append(means, last.sum(dtype=np.uint32) // max(np.count_nonzero(last), 1))
    means += ABOVE_MEAN
    chosen: Numbers = means.astype(exponents.dtype)
    return chosen


def _below(exponents: Numbers, reference: Numbers, *, out: Numbers) -> None:
    """Compute ``reference of the row - exponent``, which is its own inverse; `out` may be `exponents`."""
    full = exponents.size - exponents.size % ROW
    rows = reference[: full // ROW, np.newaxis]
    np.subtract(rows, exponents[:full].reshape(-1, ROW), out=out[:full].reshape(-1, ROW))
    if full < exponents.size:
        np.subtract(reference[-1], exponents[full:], out=out[full:])


def _get_numbers(source: Source, *, room: Numbers) -> Numbers:
    """Read a plane or a pair, as numbers are wide; the result may be `room` or a view of the source."""
    if room.dtype == U8:
        return get_plane(source.section(), room=room.view(U8))
    numbers = get_pair(source, source.section(), room=room)
    if numbers is None:
        room[:] = 0
        return room
    return numbers


def _give_top(words: Words, top: Pair) -> None:
    if words.itemsize == 2:
        np.copyto(words, top)
    else:
        give_pair(words, words.itemsize // 2 - 1, pair=top)


def _number_type(bits: int) -> np.dtype[Any]:
    return U8 if bits <= 8 else U16


def _rest_mask(exponent_bits: int) -> np.uint16:
    """Select the sign and the mantissa bits of the top 16."""
    return np.uint16(0x8000 | ((1 << (15 - exponent_bits)) - 1))


def put_index(sink: Sink, words: Words, *, exponent_bits: int) -> None:
    """Write a block with each exponent as its distance below a reference for its row.

    Parameters
    ----------
    sink : Sink
    words : ndarray of unsigned, shape (n,)
        Bits of floats of 2, 4 or 8 bytes; aligned, not changed.
    exponent_bits : int
        5, 8 or 11.

    Notes
    -----
    Source: FastCheck, "prefix index". A table of whole prefixes saves 2 to 3 bits of 32 on optimizer
    moments whatever its size; the exponent alone, relative to its neighbourhood, saves 5. Its distances
    nearly always fit four bits, and are packed two to a byte.
    """
    count, position = words.size, words.itemsize // 2 - 1
    top = SCRATCH.room("top", count, U16)
    take_pair(words, position, out=top)
    exponents = SCRATCH.room("exponent", count, _number_type(exponent_bits))
    _exponents(top, exponent_bits, out=exponents)
    reference = references(exponents)
    traits = _survey(words, reference, exponent_bits)
    put_pairs(sink, words, position, traits=traits)
    if exponent_bits < 8:
        np.bitwise_and(top, _rest_mask(exponent_bits), out=top)
        put_halves(sink, top, width=words.itemsize)
    else:
        _put_rest(sink, top, traits[2 * position], exponent_bits=exponent_bits)
    _below(exponents, reference, out=exponents)
    if exponents.dtype == U8:
        put_plane(sink, exponents.view(U8), traits[-1])
        put_plane(sink, reference.view(U8), UNKNOWN)
    else:
        put_halves(sink, exponents)
        put_halves(sink, reference, (UNKNOWN, UNKNOWN))


def _exponents(top: Pair, exponent_bits: int, *, out: Numbers) -> None:
    """Take the exponents out of the top 16 bits."""
    shift_cast(top, 15 - exponent_bits, out=out)
    if exponent_bits != 8:  # the cast to 8 bits dropped the sign
        np.bitwise_and(out, out.dtype.type((1 << exponent_bits) - 1), out=out)


def _survey(words: Words, reference: Numbers, exponent_bits: int) -> list[Traits]:
    """Look at a sample of a block as it will be written.

    Returns
    -------
    list of Traits
        Of the planes below the top 16 bits, of the rest, and of the distances; the latter tell something only
        where they are planes.
    """
    sample, step = pick(words), stride(words.size)
    tops = sample.view(U16)[words.itemsize // 2 - 1 :: words.itemsize // 2]
    whole = np.ascontiguousarray(tops)
    distances = np.empty(sample.size, reference.dtype)
    _exponents(whole, exponent_bits, out=distances)
    np.subtract(reference[np.arange(sample.size) * step // ROW], distances, out=distances)
    rest = np.zeros(sample.size, U8)
    if exponent_bits >= 8:
        _narrow(whole, exponent_bits, out=rest)
    np.copyto(tops, distances, casting="unsafe")
    np.left_shift(tops, np.uint16(8), out=tops)
    np.bitwise_or(tops, rest, out=tops)
    return traits_of(histogram(sample), sample.size)


def _put_rest(sink: Sink, top: Pair, traits: Traits, *, exponent_bits: int) -> None:
    """Write sign and mantissa bits of the top 16, at once to their place where they are noise."""
    if is_noise(traits, 4):
        _narrow(top, exponent_bits, out=sink.section(Mode.RAW, top.size))
    else:
        rest = SCRATCH.room("low", top.size)
        _narrow(top, exponent_bits, out=rest)
        put_plane(sink, rest, traits, width=4)


def _narrow(top: Pair, exponent_bits: int, *, out: Bytes) -> None:
    """Put the mantissa bits of the top 16 above the sign, into 8 bits."""
    np.copyto(out, top, casting="unsafe")
    if exponent_bits > 8:
        np.bitwise_and(out, np.uint8((1 << (15 - exponent_bits)) - 1), out=out)
    np.add(out, out, out=out)  # where the exponent has 8 bits, its lowest leaves at the top
    sign = SCRATCH.room("high", top.size, BOOL)
    np.less(top.view(I16), 0, out=sign)
    np.bitwise_or(out, sign.view(U8), out=out)


def get_index(source: Source, *, exponent_bits: int, out: Words) -> None:
    """Undo `put_index`."""
    count = out.size
    get_pairs(source, out.itemsize // 2 - 1, out=out)
    top = _get_rest(source, count, exponent_bits)
    dtype = _number_type(exponent_bits)
    exponents = _get_numbers(source, room=SCRATCH.room("exponent", count, dtype))
    reference = _get_numbers(source, room=np.empty(-(-count // ROW), dtype))
    field = SCRATCH.room("spare", count, U16)
    absolute = SCRATCH.room("exponent", count, dtype)
    _below(exponents, reference, out=absolute)
    np.copyto(field, absolute)
    np.left_shift(field, np.uint16(15 - exponent_bits), out=field)
    np.bitwise_or(top, field, out=top)
    _give_top(out, top)


def _get_rest(source: Source, count: int, exponent_bits: int) -> Pair:
    """Read sign and mantissa bits back to their places in the top 16; the others are zero."""
    top = SCRATCH.room("pair", count, U16)
    if exponent_bits < 8:
        pair = get_pair(source, source.section(), room=top)
        np.copyto(top, np.uint16(0) if pair is None else pair)
    else:
        rest: Bytes = get_plane(source.section(), room=SCRATCH.room("low", count))
        sign = SCRATCH.room("spare", count, U16)
        np.copyto(top, rest)
        np.left_shift(top, np.uint16(15), out=sign)
        np.right_shift(top, np.uint16(1), out=top)
        np.bitwise_or(top, sign, out=top)
    return top


def put_table(sink: Sink, words: Words, *, prefix_bits: int) -> None:
    """Write a block as indices into the table of the prefixes that occur, and the bits after them.

    Parameters
    ----------
    sink : Sink
    words : ndarray of unsigned, shape (n,)
        Bits of floats of 2, 4 or 8 bytes; aligned, not changed.
    prefix_bits : int
        7 to 16.
    """
    count = words.size
    put_pairs(sink, words, words.itemsize // 2 - 1)
    top = SCRATCH.room("pair", count, U16)
    take_pair(words, words.itemsize // 2 - 1, out=top)
    kept_bits = 16 - prefix_bits
    prefixes = SCRATCH.room("spare", count, U16)
    np.right_shift(top, np.uint16(kept_bits), out=prefixes)
    seen = np.zeros(1 << prefix_bits, np.bool_)
    seen[prefixes] = True
    table = np.flatnonzero(seen).astype(U16)
    places = (np.cumsum(seen) - 1).astype(U16)
    sink.reserve(_COUNT.size)[:] = np.frombuffer(_COUNT.pack(table.size), U8)
    sink.reserve(2 * table.size)[:] = table.view(U8)
    _put_bits(sink, places[prefixes], (table.size - 1).bit_length())
    _put_bits(sink, top, kept_bits)


def _put_bits(sink: Sink, values: Pair, width: int) -> None:
    pack_bits(values, width=width, out=sink.reserve(width * -(-values.size // 8)))


def _get_bits(source: Source, width: int, *, out: Pair) -> None:
    unpack_bits(source.take(width * -(-out.size // 8)), width=width, out=out)


def get_table(source: Source, *, prefix_bits: int, out: Words) -> None:
    """Undo `put_table`."""
    get_pairs(source, out.itemsize // 2 - 1, out=out)
    (entries,) = _COUNT.unpack(source.take(_COUNT.size).tobytes())
    if not 1 <= entries <= 1 << prefix_bits:
        raise CodecError(f"damaged block: table of {entries} prefixes of {prefix_bits} bits")
    table = source.take(2 * entries).view(U16)
    index = SCRATCH.room("spare", out.size, U16)
    _get_bits(source, (entries - 1).bit_length(), out=index)
    if int(index.max(initial=0)) >= entries:
        raise CodecError("damaged block: an index points behind its table")
    top = SCRATCH.room("pair", out.size, U16)
    _get_bits(source, 16 - prefix_bits, out=top)
    top |= table[index] << np.uint16(16 - prefix_bits)
    _give_top(out, top)
