"""The frame of a payload: a fixed header and one table entry for each block (docs/formats/codecs.md)."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import google_crc32c
import numpy as np

from fastcheck_codecs import dtypes
from fastcheck_codecs.bitops import BLOCK_NBYTES, Bytes, as_bytes
from fastcheck_codecs.errors import CodecError

MAGIC = b"FCKZ"
FORMAT_VERSION = 1

#: magic, version, kind, codec, dtype, prefix bits, fingerprint, raw size, raw crc, base crc, tail
_FIXED = struct.Struct("<4s5B3sQII8s")
_CRC = struct.Struct("<I")
#: length, block kind, residual, 2 zero bytes
_ENTRY = struct.Struct("<IBB2x")
HEADER_NBYTES = _FIXED.size + _CRC.size
ENTRY_NBYTES = _ENTRY.size
ALIGNMENT = 8


class Kind(IntEnum):
    """Whether a payload stands alone or needs its base."""

    FULL = 0
    DELTA = 1


class CodecId(IntEnum):
    """Which codec wrote a payload; for information, readers go by the blocks."""

    XOR_DELTA = 1
    PREFIX_INDEX = 2


class Block(IntEnum):
    """How the words of one block are stored."""

    ELIDED = 0
    RAW = 1
    PLANES = 2
    INDEX = 3
    TABLE = 4
    #: The same without the words that are zero, after bits that say which.
    HOLED_PLANES = 5
    HOLED_INDEX = 6


class Residual(IntEnum):
    """How the words of one block relate to the base."""

    NONE = 0
    XOR = 1
    DIFFERENCE = 2


@dataclass(frozen=True)
class Entry:
    """One row of the block table; `length` counts bytes before padding."""

    length: int
    block: Block
    residual: Residual


@dataclass(frozen=True)
class Header:
    """Everything that stands before the blocks; sizes in bytes, checksums crc32c."""

    kind: Kind
    codec: CodecId
    word_type: dtypes.WordType
    prefix_bits: int
    raw_nbytes: int
    raw_crc: int
    base_crc: int
    tail: bytes
    entries: tuple[Entry, ...]
    base_fingerprint: int = 0


def padded(nbytes: int) -> int:
    """Round up to the alignment of sections."""
    return (nbytes + ALIGNMENT - 1) & -ALIGNMENT


def block_count(raw_nbytes: int, word_nbytes: int) -> int:
    """Count the blocks of a payload; the partial word at the end lies in the header instead."""
    return -(-(raw_nbytes - raw_nbytes % word_nbytes) // BLOCK_NBYTES)


def max_encoded_nbytes(raw_nbytes: int) -> int:
    """Say how large `out` has to be for `encode_into`, whatever the data and the dtype.

    Parameters
    ----------
    raw_nbytes : int
        Bytes to be encoded.

    Returns
    -------
    int
        At most ``raw_nbytes + 0.1 % + 64``.

    Examples
    --------
    >>> max_encoded_nbytes(1)
    56
    """
    return HEADER_NBYTES + ENTRY_NBYTES * block_count(raw_nbytes, 1) + padded(raw_nbytes)


def write_header(out: Bytes, header: Header) -> None:
    """Write header and table to the start of `out`."""
    fixed = _FIXED.pack(
        MAGIC,
        FORMAT_VERSION,
        header.kind,
        header.codec,
        header.word_type.code,
        header.prefix_bits,
        header.base_fingerprint.to_bytes(3, "little"),
        header.raw_nbytes,
        header.raw_crc,
        header.base_crc,
        header.tail,
    )
    table = b"".join(_ENTRY.pack(entry.length, entry.block, entry.residual) for entry in header.entries)
    start = fixed + _CRC.pack(google_crc32c.value(fixed + table)) + table
    out[: len(start)] = np.frombuffer(start, np.uint8)


def read_header(payload: Bytes, nbytes: int | None = None) -> Header:
    """Read and check header and table.

    Parameters
    ----------
    payload : ndarray of uint8, shape (n,)
        The whole payload: its length has to be exactly what the table adds up to.
    nbytes : int, optional
        Its length, if only its beginning is given.

    Returns
    -------
    Header

    Raises
    ------
    CodecError
        If it is no payload, comes from a newer version, is cut short, is too long, or is damaged.
    """
    if payload.size < HEADER_NBYTES:
        raise CodecError(f"a payload has at least {HEADER_NBYTES} bytes, this one has {payload.size}")
    fixed = payload[: _FIXED.size].tobytes()
    magic, version, kind, codec, code, *numbers = _FIXED.unpack(fixed)
    prefix_bits, mark, raw_nbytes, raw_crc, base_crc, tail = numbers
    if magic != MAGIC:
        raise CodecError(f"not a FastCheck payload: it starts with {magic!r}, expected {MAGIC!r}")
    if version != FORMAT_VERSION:
        raise CodecError(f"payload of format version {version}; this reader knows {FORMAT_VERSION}")
    word_type = dtypes.by_code(code)
    if word_type is None:
        raise CodecError(f"damaged header: unknown dtype code {code}")
    end = HEADER_NBYTES + ENTRY_NBYTES * block_count(raw_nbytes, word_type.word_nbytes)
    if end > payload.size:
        raise CodecError(f"payload cut short: header and table need {end} bytes, it has {payload.size}")
    table = payload[HEADER_NBYTES:end].tobytes()
    (want,) = _CRC.unpack(payload[_FIXED.size : HEADER_NBYTES].tobytes())
    got = google_crc32c.value(fixed + table)
    if got != want:
        raise CodecError(f"damaged header: crc32c {got:#010x}, it says {want:#010x}")
    tail_nbytes = raw_nbytes % word_type.word_nbytes
    try:
        header = Header(
            kind=Kind(kind),
            codec=CodecId(codec),
            word_type=word_type,
            prefix_bits=prefix_bits,
            raw_nbytes=raw_nbytes,
            raw_crc=raw_crc,
            base_crc=base_crc,
            tail=tail[:tail_nbytes],
            entries=tuple(Entry(n, Block(b), Residual(r)) for n, b, r in _ENTRY.iter_unpack(table)),
            base_fingerprint=int.from_bytes(mark, "little"),
        )
    except ValueError as error:
        raise CodecError(f"damaged header: {error}") from error
    if header.kind is Kind.FULL and any(entry.residual is not Residual.NONE for entry in header.entries):
        raise CodecError("damaged header: a block of a full payload refers to a base")
    total = end + sum(padded(entry.length) for entry in header.entries)
    whole = payload.size if nbytes is None else nbytes
    if total != whole:
        raise CodecError(f"payload has {whole} bytes, its table adds up to {total}")
    return header


class Summary(NamedTuple):
    """What a payload says of itself."""

    raw_nbytes: int
    is_delta: bool
    #: Whether it is a delta that changes nothing.
    is_identity: bool
    #: crc32c of what it decodes to.
    raw_crc32c: int
    #: crc32c of the base of a delta, 0 for a full payload.
    base_crc32c: int


def summary(payload: Any) -> Summary:
    """Read the header of a payload once.

    Raises
    ------
    CodecError
        If it is not an intact payload, as far as header and length show.
    """
    header = read_header(as_bytes(payload))
    delta = header.kind is Kind.DELTA
    identity = (
        delta
        and header.raw_crc == header.base_crc
        and not any(header.tail)
        and all(entry.block is Block.ELIDED for entry in header.entries)
    )
    return Summary(header.raw_nbytes, delta, identity, header.raw_crc, header.base_crc if delta else 0)


def is_delta(payload: Any) -> bool:
    """Say whether a payload needs its base to be decoded; raises as :func:`summary` does."""
    return summary(payload).is_delta


def is_identity(payload: Any) -> bool:
    """Say whether a payload is a delta that changes nothing; raises as :func:`summary` does."""
    return summary(payload).is_identity


def raw_nbytes(payload: Any) -> int:
    """Give the size of what a payload decodes to, in bytes; raises as :func:`summary` does."""
    return summary(payload).raw_nbytes
