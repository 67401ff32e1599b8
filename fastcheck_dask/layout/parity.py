"""XOR parity over raw bits; shorter chunks count as padded with zeros."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import LayoutError

Bits = npt.NDArray[np.uint8]


def combine(parts: Iterable[Bits], out: Bits) -> Bits:
    """XOR chunks into `out`.

    Parameters
    ----------
    parts : iterable of ndarray of uint8, shape (n_i,)
        Raw bits, each at most as long as `out`; none may share memory with `out`.
    out : ndarray of uint8, shape (n,)
        Receives the XOR of all parts, each padded with zeros to n.

    Returns
    -------
    ndarray of uint8, shape (n,)
        `out`.

    Notes
    -----
    The same call makes the parity chunk from the members of a stripe, and a lost member from the parity
    chunk and the other members (the result's head is the member). Source: FastCheck, "parity shard".
    Reads the sum of n_i bytes, and reads and writes each head of `out` once a part.
    """
    filled = 0
    for part in parts:
        n = part.size
        if n > out.size:
            raise LayoutError(f"a chunk of {n} bytes does not fit a parity chunk of {out.size} bytes")
        _xor_words(out[: min(n, filled)], part[: min(n, filled)])
        if n > filled:
            out[filled:n] = part[filled:n]
            filled = n
    out[filled:] = 0
    return out


def _xor_words(target: Bits, other: Bits) -> None:
    """XOR `other` into `target`; eight bytes at a time where both have them."""
    whole = target.size // 8 * 8
    words = target[:whole].view(np.uint64)
    np.bitwise_xor(words, other[:whole].view(np.uint64), out=words)
    np.bitwise_xor(target[whole:], other[whole:], out=target[whole:])
