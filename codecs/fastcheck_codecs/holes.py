"""Blocks in which many words are zero: a bit for each word says which are, and the others are coded alone.

Among words that are noise a zero shows in every byte plane: each would be coded for it, and would say again
what one bit says.
"""

from __future__ import annotations

import math

import numpy as np

from fastcheck_codecs import native
from fastcheck_codecs.bitops import SCRATCH, U8, Bytes, Words, balance, padded_mask, positions
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.planes import get_plane, histogram, order0, pick, put_plane
from fastcheck_codecs.sections import Sink, Source

#: Words of fewer bytes have too few planes to gain.
WIDE = 4
#: Below this size the bits cost more than they spare.
_LEAST_COUNT = 1 << 12
#: One zero in so many words, below which no more is looked at.
_RARE = 32
#: The most that may remain of the bits: taking words out costs half the time that coding them does.
_WORTHWHILE = 0.97


def pay(words: Words, *, signed: bool = False) -> bool:
    """Say from a sample whether a block gets smaller by enough with its zeros left out.

    Parameters
    ----------
    words : ndarray of unsigned, shape (n,)
    signed : bool
        Whether they are differences, whose planes are those of balanced digits.
    """
    if words.itemsize < WIDE or words.size < _LEAST_COUNT:
        return False
    sample = pick(words)
    filled = int(np.count_nonzero(sample))
    if not filled or (sample.size - filled) * _RARE < sample.size:
        return False
    if signed:
        balance(sample)
    share = filled / sample.size
    bitmap = -share * math.log2(share) - (1 - share) * math.log2(1 - share)
    without = bitmap + share * _bits(sample[sample != 0])
    return without < _WORTHWHILE * _bits(sample)


def _bits(sample: Words) -> float:
    return order0(histogram(sample), sample.size)


def take_out(sink: Sink, words: Words) -> Words:
    """Write which words are not zero, and return these.

    Returns
    -------
    ndarray of unsigned, shape (m,)
        The scratch buffer ``dense``.

    Raises
    ------
    NoRoomError
        If the bits do not fit.
    """
    bits = np.empty(-(-words.size // 8), U8)
    dense: Words = SCRATCH.room("dense", words.size, words.dtype)
    if native.KERNELS:
        kept = native.KERNELS.gather(words, bits, dense, words.itemsize)
    else:
        mask = padded_mask(words.size)
        np.not_equal(words, 0, out=mask[: words.size])
        bits[:] = np.packbits(mask, bitorder="little")
        where = positions(mask)
        kept = where.size
        np.take(words, where, out=dense[:kept], mode="clip")
    put_plane(sink, bits)
    return dense[:kept]


def get_bits(source: Source, count: int) -> tuple[Bytes, int]:
    """Read which of `count` words `take_out` kept, and how many.

    Raises
    ------
    CodecError
        If they are none, or lie behind the end.
    """
    bits = get_plane(source.section(), room=np.empty(-(-count // 8), U8))
    kept = int(np.bitwise_count(bits).sum())
    if not kept or int(bits[-1]) >> ((count - 1) % 8 + 1):
        raise CodecError(f"damaged block: {kept} words among holes do not fit {count}")
    return bits, kept


def put_back(bits: Bytes, dense: Words, *, out: Words) -> None:
    """Undo `take_out`; `dense` has as many words as there are bits."""
    if native.KERNELS:
        native.KERNELS.scatter(bits, dense, out, out.itemsize)
    else:
        out[:] = 0
        out[positions(np.unpackbits(bits, bitorder="little").view(np.bool_))] = dense
