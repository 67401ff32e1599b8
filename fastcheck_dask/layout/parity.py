"""Parity over raw bits; shorter chunks count as padded with zeros.

The first parity of a stripe is the XOR of its members, the second one the XOR of each member times 2 to the
power of its shard's number, in GF(2^8). With both any two chunks of a stripe can be computed from the others.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.galois import add_product, double, inverse, power

Bits = npt.NDArray[np.uint8]

#: A member that is not there.
HOLE: Bits = np.empty(0, np.uint8)


def combine(parts: Iterable[Bits], out: Bits, *, exponent: int = 0) -> Bits:
    """XOR chunks into `out`.

    Parameters
    ----------
    parts : iterable of ndarray of uint8, shape (n_i,)
        Raw bits, each at most as long as `out`; none may share memory with `out`. For the second parity all
        of them are there at once.
    out : ndarray of uint8, shape (n,)
        Receives the XOR of all parts, each padded with zeros to n.
    exponent : {0, 1}
        Part number i counts times 2 to the power of ``exponent * i``: 0 makes the first parity of members,
        1 the second one, if there is a part for each shard (`HOLE` where it has none).

    Returns
    -------
    ndarray of uint8, shape (n,)
        `out`.

    Notes
    -----
    The same call makes the parity chunk from the members of a stripe, and a lost member from the first parity
    chunk and the other members (the result's head is the member). Source: FastCheck, "parity shard".
    Reads the sum of n_i bytes, and reads and writes each head of `out` once a part. For the second parity the
    last part comes first, and what is there is doubled before each (Horner).
    """
    filled = 0
    for part in reversed(list(parts)) if exponent else parts:
        n = part.size
        if n > out.size:
            raise LayoutError(f"a chunk of {n} bytes does not fit a parity chunk of {out.size} bytes")
        if exponent:
            double(out[:filled])
        _xor_words(out[: min(n, filled)], part[: min(n, filled)])
        if n > filled:
            out[filled:n] = part[filled:n]
            filled = n
    out[filled:] = 0
    return out


def rebuild(
    lost: Collection[int], members: Mapping[int, Bits], parity: Mapping[int, Bits]
) -> dict[int, Bits]:
    """Compute members of a stripe from the others.

    Parameters
    ----------
    lost : collection of int
        Shards of the members that are lost: no more than there are parity chunks, which are at most two.
    members : mapping of int to ndarray of uint8
        All other members by their shard.
    parity : mapping of int to ndarray of uint8, shape (n,)
        Parity chunks by number, 0 and 1. What is not needed is not read: the first one is preferred.

    Returns
    -------
    dict of int to ndarray of uint8, shape (n,)
        The lost members by their shard; what follows a member's own bytes are zeros.

    Notes
    -----
    Two lost members x and y have a known sum, and a known sum of their products with 2**x and 2**y.
    """
    assert 1 <= len(lost) <= len(parity), "more members are lost than there are parity chunks"
    first, *rest = sorted(lost)
    if not rest and 0 in parity:
        return {first: _without(members, parity, 0)}
    weighted = _without(members, parity, 1)
    if not rest:
        return {first: _times(weighted, inverse(power(first)))}
    (second,) = rest
    total = _without(members, parity, 0)
    add_product(weighted, total, power(first))
    found = _times(weighted, inverse(power(first) ^ power(second)))
    np.bitwise_xor(total, found, out=total)
    return {first: total, second: found}


def _without(members: Mapping[int, Bits], parity: Mapping[int, Bits], number: int) -> Bits:
    """Return what a parity chunk says of the members that are not given."""
    parts = [members.get(shard, HOLE) for shard in range(max(members, default=-1) + 1)]
    out = combine(parts, np.empty_like(parity[number]), exponent=number)
    _xor_words(out, parity[number])
    return out


def _times(bits: Bits, factor: int) -> Bits:
    out = np.zeros_like(bits)
    add_product(out, bits, factor)
    return out


def _xor_words(target: Bits, other: Bits) -> None:
    """XOR `other` into `target`; eight bytes at a time where both have them."""
    whole = target.size // 8 * 8
    words = target[:whole].view(np.uint64)
    np.bitwise_xor(words, other[:whole].view(np.uint64), out=words)
    np.bitwise_xor(target[whole:], other[whole:], out=target[whole:])
