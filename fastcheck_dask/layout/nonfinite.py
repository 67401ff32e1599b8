"""Whether bits hold a NaN or an infinity: a look at the exponents only. Pure."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

#: By name: the words to look at, and the bits that are all set in what is not finite, and in nothing else.
_MARKS: dict[str, tuple[type[np.unsignedinteger], int]] = {
    "float16": (np.uint16, 0x7C00),
    "complex32": (np.uint16, 0x7C00),
    "bfloat16": (np.uint16, 0x7F80),
    "float32": (np.uint32, 0x7F80_0000),
    "complex64": (np.uint32, 0x7F80_0000),
    "float64": (np.uint64, 0x7FF0_0000_0000_0000),
    "complex128": (np.uint64, 0x7FF0_0000_0000_0000),
    "float8_e4m3fn": (np.uint8, 0x7F),
    "float8_e5m2": (np.uint8, 0x7C),
}
#: Words that are looked at together: they and their exponents stay in the cache.
_TILE = 1 << 16


def is_float(dtype: str) -> bool:
    """Say whether a dtype is one of those that are looked at."""
    return dtype in _MARKS


def has_nonfinite(bits: npt.NDArray[np.uint8], dtype: str) -> bool:
    """Say whether an array has a NaN or an infinity.

    Parameters
    ----------
    bits : ndarray of uint8, shape (n,)
        Its raw bits, C-contiguous, little-endian.
    dtype : str
        Its true dtype; of one that has no such values, or is not known, the answer is False.

    Notes
    -----
    Reads n bytes once, and writes its scratch, which stays in the cache.

    Examples
    --------
    >>> has_nonfinite(np.float32([1, np.nan]).view(np.uint8), "float32")
    True
    """
    found = _MARKS.get(dtype)
    if found is None:
        return False
    kind, mark = found
    mask = kind(mark)
    words = bits[: bits.size - bits.size % mask.itemsize].view(kind)
    scratch = np.empty(min(_TILE, words.size), kind)
    for start in range(0, words.size, _TILE):
        tile = words[start : start + _TILE]
        if np.bitwise_and(tile, mask, out=scratch[: tile.size]).max() == mask:
            return True
    return False
