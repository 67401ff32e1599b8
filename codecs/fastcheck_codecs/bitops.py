"""Bit kernels: in place, without a Python loop over elements, on unsigned little-endian words.

numexpr was measured for these kernels (``benchmarks/kernels.py``): on chunks of 8 MiB it nowhere beats
blocked numpy, so plain ufuncs with ``out=`` are used.
"""

from __future__ import annotations

import threading
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs.compat import ensure_contiguous_ndarray

from fastcheck_codecs import native
from fastcheck_codecs.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

U8 = np.dtype("u1")
U16 = np.dtype("<u2")
U64 = np.dtype("<u8")
BOOL = np.dtype(np.bool_)
UNSIGNED: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: np.dtype("<u4"), 8: U64}
SIGNED: dict[int, np.dtype[Any]] = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}

#: What a fingerprint looks at: the first so many bytes of each so many.
_LOOK_NBYTES, _PAGE_NBYTES = 64, 4096
#: Raw bytes in one independent block.
BLOCK_NBYTES = 1 << 21


class Scratch(threading.local):
    """Work space of one thread, 25 MiB, of which what was used stays allocated and kept.

    Every buffer is an array of bytes that is cast to what a kernel needs (see `room`). Who uses which
    is fixed, so that no two live values share one: `words`, `dense` and `spare` hold whole words, `pair`
    their upper or lower 16 bits, `low` and `high` byte planes, `top`, `rest` and `exponent` what the exponent
    index takes apart, `symbols` and `packed` what packing works on, `mask` a truth value for each word.
    """

    def __init__(self) -> None:
        words, halves = ("words", "dense", "spare"), ("pair", "top", "rest", "exponent")
        names = (*words, *halves, "low", "high", "symbols", "packed", "mask")
        # 64 spare bytes: packing rounds its lanes up.
        self._room = {(name, U8): np.zeros(BLOCK_NBYTES + 64, U8) for name in names}
        for (name, _), room in list(self._room.items()):
            self._room.update({(name, dtype): room.view(dtype) for dtype in (*UNSIGNED.values(), BOOL)})

    def room(self, name: str, count: int, dtype: np.dtype[Any] = U8) -> npt.NDArray[Any]:
        """Lend `count` elements of one buffer; the contents are what the last user left."""
        return self._room[name, dtype][:count]


SCRATCH = Scratch()


def as_array(buf: Any) -> npt.NDArray[Any]:
    """See any contiguous buffer as a 1-d array in memory order, without a copy.

    Raises
    ------
    CodecError
        If the memory is not contiguous.
    TypeError
        If it holds Python objects, or is no buffer.
    """
    try:
        array: npt.NDArray[Any] = ensure_contiguous_ndarray(buf)
    except ValueError as error:
        raise CodecError(f"cannot use this buffer: {error}") from error
    return array


def as_bytes(buf: Any) -> Bytes:
    """See any contiguous buffer as its bytes: uint8, 1-d, aliasing `buf`."""
    array = as_array(buf)
    return array.view(U8) if array.nbytes else np.empty(0, U8)


def checksum(buf: Any) -> int:
    """Compute the crc32c of a contiguous buffer of any dtype; an unsigned 32-bit number."""
    return int(google_crc32c.value(as_bytes(buf)))


def fingerprint(data: Bytes) -> int:
    """Compute the crc32c of the first 64 bytes of each full 4 KiB; its lower 24 bits.

    It tells other contents, of which nearly all bits differ, at a sixtieth of what a checksum costs.
    """
    full = data.size - data.size % _PAGE_NBYTES
    pages = data[:full].reshape(-1, _PAGE_NBYTES)
    return checksum(np.ascontiguousarray(pages[:, :_LOOK_NBYTES])) & 0xFFFFFF


class Checksum:
    """A crc32c that grows block by block, while each still lies in the cache."""

    def __init__(self) -> None:
        self.value = 0

    def update(self, data: Bytes) -> None:
        """Take in the next bytes."""
        self.value = int(google_crc32c.extend(self.value, data))


def balance(words: Words) -> None:
    """Turn numbers in place into balanced digits: every byte counts from -128 to 127.

    In two's complement a small negative number fills its upper bytes with 255. In balanced digits the bytes
    above the leading digit are 0 for either sign, and small numbers are bytes close to 0.
    """
    middle = words.dtype.type(int.from_bytes(b"\x80" * words.itemsize, "little"))
    np.add(words, middle, out=words)
    np.bitwise_xor(words, middle, out=words)


def _as_signed(words: Words, signed: bool) -> npt.NDArray[Any]:
    return words.view(SIGNED[words.itemsize]) if signed else words


def take_pair(
    words: Words, position: int, *, out: npt.NDArray[np.uint16], signed: bool = False, plain: int = 0
) -> None:
    """Copy digit `position`, of 16 bits, of each word to `out`.

    Parameters
    ----------
    words : ndarray of unsigned, shape (n,)
    position : int
        0 is the lowest.
    out : ndarray of uint16, shape (n,)
    signed : bool
        Whether digits are balanced: -32768 to 32767, in two's complement. Then a lower digit below zero
        adds one to that above it.
    plain : int
        So many of the lowest digits are not balanced in any case.
    """
    source, carries = words, _carries(position, signed=signed, plain=plain)
    if carries:
        source = SCRATCH.room("spare", words.size, words.dtype)
        np.add(words, words.dtype.type(carries), out=source)
    shift_cast(source, 16 * position, out=out)


def _carries(position: int, *, signed: bool, plain: int) -> int:
    """Give what has to be added so that lower digits below zero add one to this."""
    return int.from_bytes(b"\0\0" * plain + b"\0\x80" * (position - plain), "little") if signed else 0


def take_halves(
    words: Words, position: int, *, low: Bytes, high: Bytes, signed: bool = False, plain: int = 0
) -> None:
    """Copy the lower and the upper 8 bits of what `take_pair` gives; overwrites ``spare`` and ``pair``."""
    if native.KERNELS:
        carries = _carries(position, signed=signed, plain=plain)
        native.KERNELS.halves(words, low, high, carries, 16 * position, 0x80 * signed)
    else:
        pair = SCRATCH.room("pair", words.size, U16)
        take_pair(words, position, out=pair, signed=signed, plain=plain)
        split_pair(pair, low=low, high=high, signed=signed)


def shift_cast(words: Words, count: int, *, out: Words) -> None:
    """Shift right by `count` bits and keep the lowest bits, as many as `out` is wide.

    Notes
    -----
    Shift and cast in one call: numpy then works in parts that stay in the cache.
    """
    if count:
        np.right_shift(words, words.dtype.type(count), out=out, casting="unsafe")
    else:
        np.copyto(out, words, casting="unsafe")


def give_pair(words: Words, position: int, *, pair: npt.NDArray[np.uint16], signed: bool = False) -> None:
    """Add digit `position`, of 16 bits, to words that hold the lower ones: undo `take_pair`.

    Position 0 overwrites the whole word, so that scratch memory needs no clearing first.
    """
    if position == 0:
        np.copyto(_as_signed(words, signed), _as_signed(pair, signed))
        return
    spare = SCRATCH.room("spare", words.size, words.dtype)
    np.copyto(_as_signed(spare, signed), _as_signed(pair, signed))
    np.left_shift(spare, words.dtype.type(16 * position), out=spare)
    np.add(words, spare, out=words)


def split_pair(pair: npt.NDArray[np.uint16], *, low: Bytes, high: Bytes, signed: bool = False) -> None:
    """Separate the two digits of 8 bits of each value; `pair` is destroyed."""
    np.copyto(low, pair, casting="unsafe")
    if signed:
        np.add(pair, np.uint16(0x80), out=pair)
    shift_cast(pair, 8, out=high)


def widen(low: Bytes, *, out: npt.NDArray[np.uint16], signed: bool = False) -> None:
    """Undo `split_pair` where every upper digit is zero."""
    np.copyto(_as_signed(out, signed), _as_signed(low, signed))


def join_pair(low: Bytes, high: Bytes, *, out: npt.NDArray[np.uint16], signed: bool = False) -> None:
    """Undo `split_pair`; overwrites the scratch buffer ``spare``."""
    spare = SCRATCH.room("spare", low.size, U16)
    np.copyto(out, high)
    np.left_shift(out, np.uint16(8), out=out)
    widen(low, out=spare, signed=signed)
    np.add(out, spare, out=out)


def padded_mask(count: int) -> npt.NDArray[np.bool_]:
    """Lend the scratch buffer ``mask`` for `count` truth values, rounded up to 8, the last ones false."""
    mask = SCRATCH.room("mask", -(-count // 8) * 8, BOOL)
    mask[count:] = False
    return mask


def positions(mask: npt.NDArray[np.bool_]) -> npt.NDArray[np.intp]:
    """Find the true values of a `padded_mask`.

    Notes
    -----
    Where few are true, whole lanes of 8 are skipped first: two to five times as fast as `numpy.flatnonzero`.
    """
    lanes = mask.view(U64)
    hit = np.flatnonzero(lanes != 0)
    if 5 * hit.size > 3 * lanes.size:
        return np.flatnonzero(mask)
    inner = np.flatnonzero(lanes[hit].view(np.bool_))
    found: npt.NDArray[np.intp] = hit[inner >> 3]
    found *= 8
    found += inner & 7
    return found


def packed_nbytes(count: int, width: int) -> int:
    """Give the size of `count` packed values of `width` bits, rounded up to 8 bytes."""
    return -(-count * width // 64) * 8


def pack(values: Bytes, *, width: int, out: Bytes) -> None:
    """Pack values of 2 or 4 bits: byte i holds values i, m + i, ... from the lowest bits up.

    Parameters
    ----------
    values : ndarray of uint8, shape (m * 8 / width,)
        Each below ``2 ** width``.
    width : int
        2 or 4.
    out : ndarray of uint8, shape (m,)
        m is a multiple of 8.

    Notes
    -----
    The shifts run in 64-bit lanes: numpy has no vector form of them for bytes, and the values are too
    small to leak into their neighbours.
    """
    lanes, parts = out.view(U64), values.view(U64).reshape(8 // width, -1)
    spare = SCRATCH.room("spare", out.size).view(U64)
    np.left_shift(parts[1], np.uint64(width), out=lanes)
    np.bitwise_or(lanes, parts[0], out=lanes)
    for place in range(2, 8 // width):
        np.left_shift(parts[place], np.uint64(place * width), out=spare)
        np.bitwise_or(lanes, spare, out=lanes)


def unpack(packed: Bytes, *, width: int, out: Bytes) -> None:
    """Undo `pack`; `out` has ``8 / width`` times the size of `packed`."""
    lanes, parts = packed.view(U64), out.view(U64).reshape(8 // width, -1)
    keep = np.uint64(int.from_bytes(bytes([(1 << width) - 1] * 8), "little"))
    np.bitwise_and(lanes, keep, out=parts[0])
    for place in range(1, 8 // width):
        np.right_shift(lanes, np.uint64(place * width), out=parts[place])
        np.bitwise_and(parts[place], keep, out=parts[place])


def pack_bits(values: npt.NDArray[np.uint16], *, width: int, out: Bytes) -> None:
    """Pack the low `width` bits of each value, bit plane by bit plane.

    Parameters
    ----------
    values : ndarray of uint16, shape (n,)
    width : int
        0 to 16.
    out : ndarray of uint8, shape (width * ceil(n / 8),)
        Plane j holds bit j of every value, the first value in the lowest bit of the first byte.
    """
    stride = -(-values.size // 8)
    for bit in range(width):
        plane = np.bitwise_and(values, np.uint16(1 << bit)).astype(np.bool_)
        out[bit * stride : (bit + 1) * stride] = np.packbits(plane, bitorder="little")


def unpack_bits(packed: Bytes, *, width: int, out: npt.NDArray[np.uint16]) -> None:
    """Undo `pack_bits`; every bit of `out` above `width` becomes zero."""
    stride = -(-out.size // 8)
    out[:] = 0
    for bit in range(width):
        plane = np.unpackbits(packed[bit * stride : (bit + 1) * stride], count=out.size, bitorder="little")
        out |= plane.astype(U16) << np.uint16(bit)
