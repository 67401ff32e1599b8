"""Prefix blocks of floats: exponents relative to their neighbours, or a table of prefixes.

Both take the top 16 bits of each word apart and leave the rest, which is nearly noise, as it is.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_codecs import native
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
    traits_of,
)
from fastcheck_codecs.sections import SMALL, Mode, Sink, Source

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
    if native.KERNELS and exponents.dtype == U8:
        found = np.empty(-(-exponents.size // ROW), U8)
        native.KERNELS.references(exponents, found, _ROW_STEP, ABOVE_MEAN)
        return found
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
    if exponent_bits == 8:
        exponents = _put_fields(sink, words)
    else:
        exponents = _put_wide_fields(sink, words, exponent_bits)
    reference = references(exponents)
    _below(exponents, reference, out=exponents)
    if exponents.dtype == U8:
        put_plane(sink, exponents.view(U8))
        put_plane(sink, reference.view(U8), UNKNOWN)
    else:
        put_halves(sink, exponents)
        put_halves(sink, reference, (UNKNOWN, UNKNOWN))


def _put_fields(sink: Sink, words: Words) -> Numbers:
    """Write all of float32 or bfloat16 but the exponents, which it returns; noise at once to its place."""
    count, wide = words.size, words.itemsize == 4
    traits = _survey(words, 8)
    noise = [count >= SMALL and is_noise(plane, 4) for plane in traits[:-1]]
    if wide and all(noise[:2]):
        low = sink.section(Mode.PAIR, 2 * count).view(U16)
    else:
        low = SCRATCH.room("pair", count if wide else 0, U16)
    at_once = all(noise)
    rest = sink.section(Mode.RAW, count) if at_once else SCRATCH.room("rest", count)
    exponents = SCRATCH.room("exponent", count)
    split_float(words, low=low, rest=rest, exponents=exponents)
    if wide and not all(noise[:2]):
        put_halves(sink, low, traits, width=4)
    if not at_once:
        put_plane(sink, rest, traits[-2], width=4)
    return exponents


def _put_wide_fields(sink: Sink, words: Words, exponent_bits: int) -> Numbers:
    """Do the same for exponents of other than 8 bits."""
    count, position = words.size, words.itemsize // 2 - 1
    traits = _survey(words, exponent_bits)
    put_pairs(sink, words, position, traits=traits)
    top = SCRATCH.room("pair", count, U16)
    take_pair(words, position, out=top)
    exponents = SCRATCH.room("exponent", count, _number_type(exponent_bits))
    shift_cast(top, 15 - exponent_bits, out=exponents)
    np.bitwise_and(exponents, exponents.dtype.type((1 << exponent_bits) - 1), out=exponents)
    if exponent_bits < 8:
        np.bitwise_and(top, _rest_mask(exponent_bits), out=top)
        put_halves(sink, top, width=words.itemsize)
    else:
        rest = SCRATCH.room("low", count)
        _narrow(top, exponent_bits, out=rest)
        put_plane(sink, rest, traits[2 * position], width=4)
    return exponents


def _survey(words: Words, exponent_bits: int) -> list[Traits]:
    """Look at a sample of the pairs below the top 16 bits, and of the rest that is made from these."""
    sample = pick(words)
    tops = sample.view(U16)[words.itemsize // 2 - 1 :: words.itemsize // 2]
    if exponent_bits >= 8:
        rest = np.empty(sample.size, U8)
        _narrow(np.ascontiguousarray(tops), exponent_bits, out=rest)
        tops[:] = rest
    return traits_of(histogram(sample), sample.size)


def split_float(words: Words, *, low: Pair, rest: Bytes, exponents: Bytes) -> None:
    """Take float32 or bfloat16 apart.

    Parameters
    ----------
    words : ndarray of uint32 or uint16, shape (n,)
        Aligned.
    low : ndarray of uint16, shape (n,) or (0,)
        Receives the lower 16 bits of 32.
    rest : ndarray of uint8, shape (n,)
        Receives the upper 7 bits of the mantissa, above the sign.
    exponents : ndarray of uint8, shape (n,)
    """
    if native.KERNELS and low.flags.aligned:
        native.KERNELS.split(words, low, rest, exponents)
        return
    if low.size:
        np.copyto(low, words, casting="unsafe")
    top = SCRATCH.room("top", words.size, U16)
    take_pair(words, words.itemsize // 2 - 1, out=top)
    shift_cast(top, 7, out=exponents)
    _narrow(top, 8, out=rest)


def join_float(low: Pair, rest: Bytes, distances: Bytes, *, reference: Bytes, out: Words) -> None:
    """Undo `split_float`, and the subtraction of exponents from the reference of their row."""
    if native.KERNELS and low.flags.aligned:
        native.KERNELS.join(low, rest, distances, reference, out)
        return
    exponents = SCRATCH.room("exponent", out.size)
    _below(distances, reference, out=exponents)
    top, spare = SCRATCH.room("top", out.size, U16), SCRATCH.room("spare", out.size, U16)
    _widen(rest, out=top)
    np.copyto(spare, exponents)
    np.left_shift(spare, np.uint16(7), out=spare)
    np.bitwise_or(top, spare, out=top)
    if low.size:
        np.copyto(out, low)
    _give_top(out, top)


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
    if exponent_bits == 8:
        _get_fields(source, out=out)
        return
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


def _get_fields(source: Source, *, out: Words) -> None:
    """Read float32 or bfloat16."""
    count = out.size
    low = SCRATCH.room("pair", count if out.itemsize == 4 else 0, U16)
    if low.size:
        pair = get_pair(source, source.section(), room=low)
        if pair is None:
            low[:] = 0
        else:
            low = pair
    rest = get_plane(source.section(), room=SCRATCH.room("rest", count))
    distances = get_plane(source.section(), room=SCRATCH.room("exponent", count))
    reference = get_plane(source.section(), room=np.empty(-(-count // ROW), U8))
    join_float(low, rest, distances, reference=reference, out=out)


def _get_rest(source: Source, count: int, exponent_bits: int) -> Pair:
    """Read sign and mantissa bits back to their places in the top 16; the others are zero."""
    top = SCRATCH.room("pair", count, U16)
    if exponent_bits < 8:
        pair = get_pair(source, source.section(), room=top)
        np.copyto(top, np.uint16(0) if pair is None else pair)
    else:
        _widen(get_plane(source.section(), room=SCRATCH.room("low", count)), out=top)
    return top


def _widen(rest: Bytes, *, out: Pair) -> None:
    """Undo `_narrow`; overwrites the scratch buffer ``spare``."""
    sign = SCRATCH.room("spare", rest.size, U16)
    np.copyto(out, rest)
    np.left_shift(out, np.uint16(15), out=sign)
    np.right_shift(out, np.uint16(1), out=out)
    np.bitwise_or(out, sign, out=out)


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
