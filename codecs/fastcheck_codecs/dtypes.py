"""What the codecs know about a dtype: the width of its words and where the exponent lies."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class WordType:
    """How the bits of one dtype are cut into words.

    Attributes
    ----------
    name : str
        Name of the dtype, as numpy or torch spell it.
    code : int
        Its number in the payload header; append-only.
    word_nbytes : int
        1, 2, 4 or 8. A complex number is two words.
    exponent_bits : int
        Width of the exponent below the sign bit; 0 where the byte path is used.
    """

    name: str
    code: int
    word_nbytes: int
    exponent_bits: int = 0


#: Anything that is not in the table: a run of bytes without structure.
OPAQUE = WordType("opaque", 0, 1)

_KNOWN = (
    OPAQUE,
    WordType("uint8", 1, 1),
    WordType("int8", 2, 1),
    WordType("bool", 3, 1),
    WordType("uint16", 4, 2),
    WordType("int16", 5, 2),
    WordType("uint32", 6, 4),
    WordType("int32", 7, 4),
    WordType("uint64", 8, 8),
    WordType("int64", 9, 8),
    WordType("float16", 10, 2, 5),
    WordType("bfloat16", 11, 2, 8),
    WordType("float32", 12, 4, 8),
    WordType("float64", 13, 8, 11),
    WordType("complex64", 14, 4, 8),
    WordType("complex128", 15, 8, 11),
    WordType("float8_e4m3fn", 16, 1),
    WordType("float8_e5m2", 17, 1),
    WordType("float8_e4m3fnuz", 18, 1),
    WordType("float8_e5m2fnuz", 19, 1),
    WordType("float8_e8m0fnu", 20, 1),
    WordType("complex32", 21, 2, 5),
)
_BY_NAME = {known.name: known for known in _KNOWN}
_BY_CODE = {known.code: known for known in _KNOWN}
_BY_WIDTH = {1: "uint8", 2: "uint16", 4: "uint32", 8: "uint64"}


def by_code(code: int) -> WordType | None:
    """Look up the number in a header; None when this version does not know it."""
    return _BY_CODE.get(code)


def by_name(name: str) -> WordType:
    """Look up a dtype by name; an unknown one is opaque bytes, which is always lossless."""
    return _BY_NAME.get(name.removeprefix("torch."), OPAQUE)


def of_numpy(dtype: np.dtype[np.generic]) -> WordType:
    """Choose the words for a numpy dtype.

    Parameters
    ----------
    dtype : numpy.dtype
        Any dtype. A foreign byte order, a date or a duration is an unsigned integer of its width;
        records, strings and the like are opaque bytes.

    Returns
    -------
    WordType
    """
    if dtype.isnative and dtype.name in _BY_NAME:
        return _BY_NAME[dtype.name]
    if dtype.kind in "iufmM" and dtype.itemsize in _BY_WIDTH:
        return _BY_NAME[_BY_WIDTH[dtype.itemsize]]
    return OPAQUE
