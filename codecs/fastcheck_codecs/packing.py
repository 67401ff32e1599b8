"""Planes of few different bytes: sparse ones, and those of small values packed two or four to a byte.

What does not fit the pattern stands in a list. Both parts go through the entropy stage. Packing first makes
it faster and the result smaller: zstd finds chance matches among few symbols, and pays for them.
"""

from __future__ import annotations

import struct
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_codecs import native
from fastcheck_codecs.bitops import (
    SCRATCH,
    U8,
    Bytes,
    pack,
    packed_nbytes,
    padded_mask,
    positions,
    unpack,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.sections import Mode, Section, Sink, expand, squeeze

#: count of listed bytes, stored bytes of the other part
_LISTED = struct.Struct("<II")
#: Bits of one value in each packed mode; the highest code is the escape.
WIDTHS = {Mode.QUADS: 2, Mode.NIBBLES: 4}
#: A byte of 0 stands in the list wherever the next one lies further away than this.
_REACH = 256


def put_sparse(sink: Sink, plane: Bytes) -> None:
    """Write the bytes other than zero, and the count of zeros before each."""
    short, values = _list(plane)
    _put_listed(sink, (Mode.SPARSE, 0), short, values)


def _list(plane: Bytes) -> tuple[Bytes, Bytes]:
    if native.KERNELS:
        short, values = SCRATCH.room("symbols", plane.size), SCRATCH.room("packed", plane.size)
        count = native.KERNELS.list_filled(plane, short, values)
        return short[:count], values[:count]
    mask = padded_mask(plane.size)
    np.not_equal(plane, 0, out=mask[: plane.size])
    where = positions(mask)
    values = plane[where]
    gaps = where.copy()
    gaps[1:] -= where[:-1]
    gaps[1:] -= 1
    # Without its bridges a gap is what is left of it modulo 256.
    short = gaps.astype(U8)
    if int(gaps.max()) >= _REACH:
        short, values = _bridged(gaps, short, values)
    return short, values


def _bridged(gaps: npt.NDArray[np.intp], short: Bytes, values: Bytes) -> tuple[Bytes, Bytes]:
    """Put zeros into the list, each `_REACH` bytes after the one before it, until no gap is too wide."""
    wide = np.flatnonzero(gaps >= _REACH)
    before = np.repeat(wide, gaps[wide] // _REACH)
    return np.insert(short, before, np.uint8(_REACH - 1)), np.insert(values, before, np.uint8(0))


def put_packed(sink: Sink, plane: Bytes, mode: Mode, *, lowest: int) -> None:
    """Write a plane whose values mostly lie from `lowest` on (modulo 256): 3 of them, or 15."""
    packed, escaped = _pack(plane, lowest, WIDTHS[mode])
    _put_listed(sink, (mode, lowest), packed, escaped)


def _pack(plane: Bytes, lowest: int, width: int) -> tuple[Bytes, Bytes]:
    count = plane.size
    size = packed_nbytes(count, width)
    packed = SCRATCH.room("packed", size)
    if native.KERNELS:
        room = SCRATCH.room("symbols", count)
        return packed, room[: native.KERNELS.pack(plane, packed, room, lowest, width)]
    escape = (1 << width) - 1
    symbols = SCRATCH.room("symbols", size * 8 // width)
    np.subtract(plane, np.uint8(lowest), out=symbols[:count])
    symbols[count:] = 0
    mask = padded_mask(count)
    np.greater_equal(symbols[:count], escape, out=mask[:count])
    where = positions(mask)
    escaped = plane[where]
    symbols[where] = escape
    pack(symbols, width=width, out=packed)
    return packed, escaped


def _put_listed(sink: Sink, mode: tuple[Mode, int], body: Bytes, listed: Bytes) -> None:
    parts: tuple[Any, Any] = squeeze(body), squeeze(listed)
    data = sink.section(mode[0], _LISTED.size + len(parts[0]) + len(parts[1]), lowest=mode[1])
    _LISTED.pack_into(data.data, 0, listed.size, len(parts[0]))
    middle = _LISTED.size + len(parts[0])
    data[_LISTED.size : middle] = np.frombuffer(parts[0], U8)
    data[middle:] = np.frombuffer(parts[1], U8)


def _get_listed(section: Section, count: int, *, body_nbytes: int | None) -> tuple[Bytes, Bytes]:
    """Return both parts; the first has as many bytes as the second when `body_nbytes` is None."""
    data = section.data
    if data.size < _LISTED.size:
        raise CodecError(f"damaged section: {section.mode.name} cut short")
    listed, stored = _LISTED.unpack_from(data.data)
    body = listed if body_nbytes is None else body_nbytes
    rest = data.size - _LISTED.size - stored
    if listed > count or stored > body or not 0 <= rest <= listed:
        raise CodecError(f"damaged section: lengths of {section.mode.name} do not fit")
    first = SCRATCH.room("packed", body)
    expand(data[_LISTED.size : _LISTED.size + stored], out=first)
    second = np.empty(listed, U8)
    expand(data[_LISTED.size + stored :], out=second)
    return first, second


def get_sparse(section: Section, count: int) -> tuple[npt.NDArray[np.intp], Bytes]:
    """Undo `put_sparse` for a plane of `count` bytes: where they are not zero, and what they are."""
    gaps, values = _get_listed(section, count, body_nbytes=None)
    where = np.cumsum(gaps, dtype=np.intp)
    where += np.arange(where.size)
    if where.size and where[-1] >= count:
        raise CodecError(f"damaged section: sparse plane of {count} bytes with one at {where[-1]}")
    return where, values


def get_packed(section: Section, *, out: Bytes) -> None:
    """Undo `put_packed`."""
    width, count = WIDTHS[section.mode], out.size
    size = packed_nbytes(count, width)
    packed, escaped = _get_listed(section, count, body_nbytes=size)
    if native.KERNELS:
        found = native.KERNELS.unpack(packed, escaped, out, section.lowest, width)
    else:
        found = _unpack(packed, escaped, section.lowest, width=width, out=out)
    if found != escaped.size:
        raise CodecError(f"damaged section: {found} escapes, {escaped.size} bytes in their list")


def _unpack(packed: Bytes, escaped: Bytes, lowest: int, *, width: int, out: Bytes) -> int:
    """Return the count of escapes; they are put in if it is that of their list."""
    count = out.size
    symbols = SCRATCH.room("symbols", packed.size * 8 // width)
    unpack(packed, width=width, out=symbols)
    np.add(symbols[:count], np.uint8(lowest), out=out)
    mask = padded_mask(count)
    np.equal(symbols[:count], (1 << width) - 1, out=mask[:count])
    where = positions(mask)
    if where.size == escaped.size:
        out[where] = escaped
    return int(where.size)
