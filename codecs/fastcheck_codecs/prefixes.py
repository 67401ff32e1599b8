"""Prefix blocks of floats: an index of the exponent below the local maximum, or a table of prefixes.

Both take the top 16 bits of each word apart and leave the rest, which is nearly noise, as it is.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_codecs.bitops import (
    SCRATCH,
    U8,
    U16,
    Words,
    give_pair,
    nibble_nbytes,
    pack_bits,
    pack_nibbles,
    take_pair,
    unpack_bits,
    unpack_nibbles,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.planes import (
    Sink,
    Source,
    get_low_pairs,
    get_pair,
    get_plane,
    put_halves,
    put_pair,
    put_plane,
)

#: Values that share one maximum.
ROW = 4096
#: The index that says: look in the list of exponents.
ESCAPE = 15

_COUNT = struct.Struct("<I")

Pair = npt.NDArray[np.uint16]


def _row_count(count: int) -> int:
    return -(-count // ROW)


def _row_maxima(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    full = values.size - values.size % ROW
    maxima = np.empty(_row_count(values.size), values.dtype)
    np.max(values[:full].reshape(-1, ROW), axis=1, out=maxima[: full // ROW])
    if full < values.size:
        maxima[-1] = values[full:].max()
    return maxima


def _below_maxima(values: npt.NDArray[Any], maxima: npt.NDArray[Any], *, out: npt.NDArray[Any]) -> None:
    """Compute ``maximum of the row - value``, which is its own inverse; `out` may be `values`."""
    full = values.size - values.size % ROW
    rows = maxima[: full // ROW, np.newaxis]
    np.subtract(rows, values[:full].reshape(-1, ROW), out=out[:full].reshape(-1, ROW))
    if full < values.size:
        np.subtract(maxima[-1], values[full:], out=out[full:])


def _put_numbers(sink: Sink, numbers: npt.NDArray[Any]) -> None:
    if numbers.dtype == U8:
        put_plane(sink, numbers)
    else:
        put_halves(sink, numbers)


def _get_numbers(source: Source, *, out: npt.NDArray[Any]) -> None:
    if out.dtype == U8:
        mode, data = source.section()
        get_plane(mode, data, out=out)
    else:
        get_pair(source, out=out)


def _get_low(source: Source, words: Words) -> None:
    get_low_pairs(source, words.itemsize // 2 - 1, out=words)


def _give_top(words: Words, top: Pair) -> None:
    if words.itemsize == 2:
        np.copyto(words, top)
    else:
        give_pair(words, words.itemsize // 2 - 1, pair=top)


def _number_type(bits: int) -> np.dtype[Any]:
    return U8 if bits <= 8 else U16


def put_index(sink: Sink, words: Words, *, exponent_bits: int) -> None:
    """Write a block with its exponents as 4-bit distances below the maximum of their row.

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
    moments whatever its size; the exponent alone, relative to its neighbourhood, saves 4.
    """
    count = words.size
    for position in range(words.itemsize // 2 - 1):
        put_pair(sink, words, position)
    top = SCRATCH.room("pair", count, U16)
    take_pair(words, words.itemsize // 2 - 1, out=top)
    field = SCRATCH.room("spare", count, U16)
    kept_bits = 15 - exponent_bits
    exponents = SCRATCH.room("exponent", count, _number_type(exponent_bits))
    np.right_shift(top, np.uint16(kept_bits), out=field)
    np.bitwise_and(field, np.uint16((1 << exponent_bits) - 1), out=field)
    np.copyto(exponents, field, casting="unsafe")
    np.right_shift(top, np.uint16(15), out=field)
    np.left_shift(field, np.uint16(kept_bits), out=field)
    np.bitwise_and(top, np.uint16((1 << kept_bits) - 1), out=top)
    np.bitwise_or(top, field, out=top)
    if kept_bits < 8:
        rest = SCRATCH.room("low", count)
        np.copyto(rest, top, casting="unsafe")
        put_plane(sink, rest)
    else:
        put_halves(sink, top)
    _put_exponents(sink, exponents)


def _put_exponents(sink: Sink, exponents: npt.NDArray[Any]) -> None:
    count = exponents.size
    maxima = _row_maxima(exponents)
    half = nibble_nbytes(count)
    index = SCRATCH.room("index", 2 * half)
    narrow = exponents.dtype == U8
    distance = index[:count] if narrow else SCRATCH.room("spare", count, exponents.dtype)
    _below_maxima(exponents, maxima, out=distance)
    far = SCRATCH.room("mask", count, np.dtype(np.bool_))
    np.greater_equal(distance, ESCAPE, out=far)
    where = np.flatnonzero(far)
    escaped = exponents[where]
    distance[where] = ESCAPE
    if not narrow:
        np.copyto(index[:count], distance, casting="unsafe")
    index[count:] = 0
    nibbles = SCRATCH.room("high", half)
    pack_nibbles(index, out=nibbles)
    put_plane(sink, nibbles)
    _put_numbers(sink, escaped)
    _put_numbers(sink, maxima)


def get_index(source: Source, *, exponent_bits: int, out: Words) -> None:
    """Undo `put_index`."""
    count = out.size
    kept_bits = 15 - exponent_bits
    _get_low(source, out)
    top = SCRATCH.room("pair", count, U16)
    if kept_bits < 8:
        rest = SCRATCH.room("low", count)
        _get_numbers(source, out=rest)
        np.copyto(top, rest)
    else:
        get_pair(source, out=top)
    exponents = SCRATCH.room("exponent", count, _number_type(exponent_bits))
    _get_exponents(source, exponents)
    field = SCRATCH.room("spare", count, U16)
    np.right_shift(top, np.uint16(kept_bits), out=field)
    np.left_shift(field, np.uint16(15), out=field)
    np.bitwise_and(top, np.uint16((1 << kept_bits) - 1), out=top)
    np.bitwise_or(top, field, out=top)
    np.copyto(field, exponents)
    np.left_shift(field, np.uint16(kept_bits), out=field)
    np.bitwise_or(top, field, out=top)
    _give_top(out, top)


def _get_exponents(source: Source, exponents: npt.NDArray[Any]) -> None:
    count = exponents.size
    half = nibble_nbytes(count)
    nibbles = SCRATCH.room("high", half)
    _get_numbers(source, out=nibbles)
    index = SCRATCH.room("index", 2 * half)
    unpack_nibbles(nibbles, out=index)
    far = SCRATCH.room("mask", count, np.dtype(np.bool_))
    np.equal(index[:count], ESCAPE, out=far)
    where = np.flatnonzero(far)
    escaped = np.empty(where.size, exponents.dtype)
    _get_numbers(source, out=escaped)
    maxima = np.empty(_row_count(count), exponents.dtype)
    _get_numbers(source, out=maxima)
    np.copyto(exponents, index[:count])
    _below_maxima(exponents, maxima, out=exponents)
    exponents[where] = escaped


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
    for position in range(words.itemsize // 2 - 1):
        put_pair(sink, words, position)
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
    _get_low(source, out)
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
