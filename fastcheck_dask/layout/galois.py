"""Bytes as elements of the field GF(2^8): what the second parity is computed in.

Addition is XOR, so multiplying by a constant is linear over it: deltas add up in a sum of products as they do
in a plain sum. The field is that of RAID 6: polynomial x^8 + x^4 + x^3 + x^2 + 1, powers of the generator 2.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np
import numpy.typing as npt

Bits = npt.NDArray[np.uint8]

_POLYNOMIAL: Final = 0x11D
#: Powers of the generator that differ.
ORDER: Final = 255
#: Bytes that are multiplied at a time: they, their indices and the products stay in the cache.
_BLOCK: Final = 32 * 1024
#: And those that are doubled: more of them, since each pass is short.
_DOUBLED: Final = 128 * 1024


def _powers() -> list[int]:
    found = [1]
    while len(found) < ORDER:
        doubled = found[-1] << 1
        found.append(doubled ^ _POLYNOMIAL if doubled > 255 else doubled)
    return found


_POWERS: Final = _powers()
_LOGARITHMS: Final = {power: exponent for exponent, power in enumerate(_POWERS)}


def power(exponent: int) -> int:
    """Return a power of the generator; the exponent may be negative.

    >>> power(0), power(1), power(8), power(255)
    (1, 2, 29, 1)
    """
    return _POWERS[exponent % ORDER]


def product(left: int, right: int) -> int:
    """Return the product of two elements.

    >>> product(power(3), power(-3)), product(0, 7)
    (1, 0)
    """
    return power(_LOGARITHMS[left] + _LOGARITHMS[right]) if left and right else 0


def inverse(element: int) -> int:
    """Return what gives 1 with an element; there is none of 0.

    >>> product(inverse(29), 29)
    1
    """
    return power(-_LOGARITHMS[element])


def add_product(target: Bits, bits: Bits, factor: int) -> None:
    """Add to `target` the product of `bits` and one factor, byte by byte.

    Parameters
    ----------
    target : ndarray of uint8, shape (n,)
        Receives the sum; C-contiguous.
    bits : ndarray of uint8, shape (m,), m <= n
        C-contiguous; shares no memory with `target`. Bytes that are not there are zeros.
    factor : int
        From 0 to 255.

    Notes
    -----
    A table gives the products of two bytes at once. Reads m bytes, and reads and writes as many of `target`;
    allocates a small fixed number of bytes.
    """
    single, double = _tables(factor)
    even = bits.size // 2 * 2
    index = np.empty(min(_BLOCK, even) // 2, np.intp)
    products = np.empty(index.size, np.uint16)
    for start in range(0, even, _BLOCK):
        end = min(start + _BLOCK, even)
        count = (end - start) // 2
        np.copyto(index[:count], bits[start:end].view(np.uint16))
        # Every index is in the table: nothing has to be checked, nor buffered because of that.
        np.take(double, index[:count], out=products[:count], mode="wrap")
        goal = target[start:end].view(np.uint16)
        np.bitwise_xor(goal, products[:count], out=goal)
    if even < bits.size:
        target[even] ^= single[bits[even]]


def double(bits: Bits) -> None:
    """Multiply bytes by the generator, in place.

    Parameters
    ----------
    bits : ndarray of uint8, shape (n,)
        C-contiguous.

    Notes
    -----
    Several times faster than :func:`add_product`. Reads and writes n bytes; allocates a fixed number at most.
    """
    overflows = np.empty(min(_DOUBLED, bits.size), np.bool_)
    for start in range(0, bits.size, _DOUBLED):
        block = bits[start : start + _DOUBLED]
        over = overflows[: block.size]
        np.less(block.view(np.int8), 0, out=over)
        rest = over.view(np.uint8)
        np.multiply(rest, np.uint8(_POLYNOMIAL & 255), out=rest)
        np.add(block, block, out=block)
        np.bitwise_xor(block, rest, out=block)


@lru_cache(maxsize=32)
def _tables(factor: int) -> tuple[Bits, npt.NDArray[np.uint16]]:
    """Return the products of one factor with each byte, and with each pair of bytes."""
    single = np.array([product(factor, byte) for byte in range(256)], np.uint8)
    pairs = np.arange(2**16, dtype=np.uint16).view(np.uint8)
    return single, single[pairs].view(np.uint16)
