"""Which codec makes a chunk smaller, from a sample: what a tensor is called decides nothing."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastcheck_codecs import dtypes
from fastcheck_codecs.bitops import U8, U16, UNSIGNED, Bytes, Words, as_bytes, balance
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.planes import histogram, order0
from fastcheck_codecs.prefixes import ABOVE_MEAN

#: The sample: runs of neighbours, as the index goes by neighbours.
_RUNS, _RUN = 16, 128
#: Bits per word that a delta has to win by: it needs its base, and one more pass, to be decoded.
_MARGIN = 0.15


def delta_is_smaller(raw: Any, base: Any, *, dtype: str) -> bool:
    """Estimate whether `XorDelta` against a base gives a smaller payload than `PrefixIndex`.

    Parameters
    ----------
    raw, base : buffer
        Contiguous, of the same size: the bits now, and those of the previous generation.
    dtype : str
        True dtype of the data.

    Returns
    -------
    bool
        By order-0 entropies of the byte planes of at most 2048 words, spread evenly. False for no data.

    Raises
    ------
    CodecError
        If the sizes differ, or memory is not contiguous.
    """
    now, before = as_bytes(raw), as_bytes(base)
    if now.size != before.size:
        raise CodecError(f"the base has {before.size} bytes, the data {now.size}")
    word_type = dtypes.by_name(dtype)
    current = _sample(now, word_type.word_nbytes)
    if not current.size:
        return False
    previous = _sample(before, word_type.word_nbytes)
    xor = current ^ previous
    difference = current - previous
    balance(difference)
    delta = min(_bits(xor), _bits(difference))
    whole = _index_bits(current, word_type.exponent_bits) if word_type.exponent_bits else _bits(current)
    return delta + _MARGIN < whole


def _sample(data: Bytes, width: int) -> Words:
    """Copy runs of words, as long as there are; shape (runs, words of a run)."""
    words = data[: data.size - data.size % width].view(UNSIGNED[width])
    if words.size <= _RUNS * _RUN:
        return words.reshape(1, -1).copy()
    starts = np.linspace(0, words.size - _RUN, _RUNS).astype(np.intp)
    return np.stack([words[start : start + _RUN] for start in starts])


def _bits(sample: Words) -> float:
    """Sum the entropies of the byte planes, in bits per word."""
    return order0(histogram(sample.reshape(-1)), sample.size)


def _index_bits(sample: Words, exponent_bits: int) -> float:
    """Do the same for an exponent relative to its run, and the bits around it."""
    kind = sample.dtype.type
    shift = sample.itemsize * 8 - 1 - exponent_bits
    mask = kind(((1 << exponent_bits) - 1) << shift)
    exponents = ((sample & mask) >> kind(shift)).astype(np.intp)
    filled = np.maximum(np.count_nonzero(exponents, axis=1), 1)
    distances = (exponents.sum(axis=1) // filled + ABOVE_MEAN)[:, np.newaxis] - exponents
    narrow = U8 if exponent_bits <= 8 else U16
    return _bits(sample & ~mask) + _bits(distances.astype(narrow))
