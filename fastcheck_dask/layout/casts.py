"""Casts of float32 bits to half the width, as mixed-precision training makes its weights of their masters."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]

#: What a derived array is made of.
SOURCE_DTYPE = "float32"
#: What it can be.
CAST_DTYPES = frozenset({"bfloat16", "float16"})

#: Elements that are cast at once: they and the scratch stay in the cache.
_BLOCK = 32 * 1024
_MAGNITUDE = np.uint32(0x7FFF_FFFF)
_INFINITY = np.uint32(0x7F80_0000)


def cast(source: Bits, dtype: str, *, out: Bits | None = None) -> Bits:
    """Round float32 values to the nearest of a narrower dtype, ties to even, beyond its range to infinity.

    Parameters
    ----------
    source : ndarray of uint8, shape (4n,)
        Bits of float32 values, little-endian, C-contiguous.
    dtype : {"bfloat16", "float16"}
        The narrower one.
    out : ndarray of uint8, shape (2n,), optional
        Receives the result; must not share memory with `source`.

    Returns
    -------
    ndarray of uint8, shape (2n,)
        `out` if it was given. What becomes of a NaN is not defined: see :func:`is_cast`.

    Notes
    -----
    Reads 4n bytes, writes 2n.
    """
    if out is None:
        out = np.empty(source.size // 2, np.uint8)
    halves = out.view("<u2")
    for start, block in _blocks(source):
        _round(block, dtype, halves[start : start + block.size])
    return out


def is_cast(source: Bits, narrow: Bits, dtype: str) -> bool:
    """Say whether `narrow` is, bit for bit, what :func:`cast` makes of `source`.

    Parameters
    ----------
    source : ndarray of uint8, shape (4n,)
        As for :func:`cast`.
    narrow : ndarray of uint8, shape (2n,)
        Bits of values of `dtype`, little-endian, C-contiguous.
    dtype : {"bfloat16", "float16"}
        The narrower one.

    Returns
    -------
    bool
        False also if `source` has a NaN: processors and libraries differ in what they make of those, and
        whoever casts again later may have another one.

    Notes
    -----
    Reads 6n bytes, and no further than the first block that differs.
    """
    wanted = narrow.view("<u2")
    made = np.empty(min(_BLOCK, wanted.size), np.uint16)
    for start, block in _blocks(source):
        if np.bitwise_and(block, _MAGNITUDE).max() > _INFINITY:
            return False
        _round(block, dtype, made[: block.size])
        if not np.array_equal(made[: block.size], wanted[start : start + block.size]):
            return False
    return True


def _blocks(source: Bits) -> Iterator[tuple[int, npt.NDArray[np.uint32]]]:
    words = source.view("<u4")
    for start in range(0, words.size, _BLOCK):
        yield start, words[start : start + _BLOCK]


def _round(words: npt.NDArray[np.uint32], dtype: str, out: npt.NDArray[np.uint16]) -> None:
    if dtype == "float16":
        with np.errstate(all="ignore"):
            np.copyto(out.view(np.float16), words.view(np.float32), casting="same_kind")
        return
    assert dtype == "bfloat16"
    # Half of the last bit that stays, less one where that bit is 0: a tie goes to the even neighbour.
    rounded = words >> np.uint32(16)
    rounded &= np.uint32(1)
    rounded += np.uint32(0x7FFF)
    rounded += words
    rounded >>= np.uint32(16)
    np.copyto(out, rounded, casting="unsafe")
