"""Bit kernels: in place, without a Python loop over elements, on unsigned little-endian words.

numexpr was measured for these kernels and is slower than blocked numpy in each of them (it has no
unsigned XOR, and its shifts are not vectorized), so plain ufuncs with ``out=`` are used.
"""

from __future__ import annotations

import threading
from typing import Any

import google_crc32c
import numpy as np
import numpy.typing as npt
from numcodecs.compat import ensure_contiguous_ndarray

from fastcheck_codecs.errors import CodecError

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.unsignedinteger[Any]]

U8 = np.dtype("u1")
U16 = np.dtype("<u2")
U64 = np.dtype("<u8")
UNSIGNED: dict[int, np.dtype[Any]] = {1: U8, 2: U16, 4: np.dtype("<u4"), 8: U64}
SIGNED: dict[int, np.dtype[Any]] = {width: np.dtype(f"<i{width}") for width in (1, 2, 4, 8)}

#: Raw bytes in one independent block.
BLOCK_NBYTES = 1 << 20

_LOW_NIBBLES = np.uint64(0x0F0F0F0F0F0F0F0F)


class Scratch(threading.local):
    """Work space of one thread, about 8 MiB, allocated at first use and kept.

    Every attribute is a uint8 array that is cast to what a kernel needs (see `room`). Who uses which
    is fixed, so that no two live values share one: `words` and `spare` hold whole words, `pair` their
    upper or lower 16 bits, `low` and `high` byte planes, `exponent` and `index` the fields of the
    exponent index, `mask` a truth value for each word.
    """

    def __init__(self) -> None:
        names = ("words", "spare", "pair", "low", "high", "exponent", "index", "mask")
        # 64 spare bytes: nibble packing rounds its lanes up.
        self._room = {name: np.zeros(BLOCK_NBYTES + 64, U8) for name in names}

    def room(self, name: str, count: int, dtype: np.dtype[Any] = U8) -> npt.NDArray[Any]:
        """Lend `count` elements of one buffer; the contents are what the last user left."""
        return self._room[name][: count * dtype.itemsize].view(dtype)


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


def zigzag(words: Words, *, spare: Words) -> None:
    """Fold two's complement in place so that small magnitudes of either sign get small codes.

    Parameters
    ----------
    words, spare : ndarray of unsigned, shape (n,)
        `words` is replaced, `spare` is overwritten; the same dtype, not overlapping.
    """
    signed = SIGNED[words.itemsize]
    np.right_shift(words.view(signed), words.itemsize * 8 - 1, out=spare.view(signed))
    np.add(words, words, out=words)
    np.bitwise_xor(words, spare, out=words)


def unzigzag(words: Words, *, spare: Words) -> None:
    """Undo `zigzag` in place."""
    one = words.dtype.type(1)
    np.bitwise_and(words, one, out=spare)
    signed = spare.view(SIGNED[words.itemsize])
    np.negative(signed, out=signed)
    np.right_shift(words, one, out=words)
    np.bitwise_xor(words, spare, out=words)


def take_pair(words: Words, position: int, *, out: npt.NDArray[np.uint16]) -> None:
    """Copy bits ``[16 * position, 16 * position + 16)`` of each word to `out`."""
    source = words
    if position:
        source = SCRATCH.room("spare", words.size, words.dtype)
        np.right_shift(words, words.dtype.type(16 * position), out=source)
    np.copyto(out, source, casting="unsafe")


def give_pair(words: Words, position: int, *, pair: npt.NDArray[np.uint16]) -> None:
    """Set bits ``[16 * position, 16 * position + 16)`` of words whose bits above those are unset.

    Position 0 overwrites the whole word, so that scratch memory needs no clearing first.
    """
    if position == 0:
        np.copyto(words, pair)
        return
    spare = SCRATCH.room("spare", words.size, words.dtype)
    np.copyto(spare, pair)
    np.left_shift(spare, words.dtype.type(16 * position), out=spare)
    np.bitwise_or(words, spare, out=words)


def split_pair(pair: npt.NDArray[np.uint16], *, low: Bytes, high: Bytes) -> None:
    """Separate the two bytes of each 16-bit value; `pair` is destroyed."""
    np.copyto(low, pair, casting="unsafe")
    np.right_shift(pair, np.uint16(8), out=pair)
    np.copyto(high, pair, casting="unsafe")


def join_pair(low: Bytes, high: Bytes, *, out: npt.NDArray[np.uint16]) -> None:
    """Undo `split_pair`; overwrites the scratch buffer ``spare``."""
    spare = SCRATCH.room("spare", low.size, U16)
    np.copyto(out, high)
    np.left_shift(out, np.uint16(8), out=out)
    np.copyto(spare, low)
    np.bitwise_or(out, spare, out=out)


def nibble_nbytes(count: int) -> int:
    """Give the packed size of `count` 4-bit values: half of them, rounded up to 8 bytes."""
    return -(-count // 16) * 8


def pack_nibbles(values: Bytes, *, out: Bytes) -> None:
    """Pack 4-bit values two to a byte: value i in the low half, value ``out.size + i`` in the high.

    Parameters
    ----------
    values : ndarray of uint8, shape (2 * m,)
        Each at most 15; m is a multiple of 8.
    out : ndarray of uint8, shape (m,)

    Notes
    -----
    The shift runs in 64-bit lanes: numpy has no vector form of it for bytes, and values of at most 15
    cannot leak into their neighbour.
    """
    half = out.size
    np.left_shift(values[half:].view(U64), np.uint64(4), out=out.view(U64))
    np.bitwise_or(out, values[:half], out=out)


def unpack_nibbles(packed: Bytes, *, out: Bytes) -> None:
    """Undo `pack_nibbles`; `out` has twice the size of `packed`."""
    half = packed.size
    np.bitwise_and(packed, np.uint8(15), out=out[:half])
    upper = out[half:].view(U64)
    np.right_shift(packed.view(U64), np.uint64(4), out=upper)
    np.bitwise_and(upper, _LOW_NIBBLES, out=upper)


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
