"""Payloads of bits as they are: written from where the bits lie, and read to where they belong."""

from __future__ import annotations

from typing import Any

import numpy as np

from fastcheck_codecs import dtypes
from fastcheck_codecs.bitops import BLOCK_NBYTES, U8, Bytes, as_bytes, checksum
from fastcheck_codecs.header import (
    ENTRY_NBYTES,
    HEADER_NBYTES,
    Block,
    CodecId,
    Entry,
    Header,
    Kind,
    Residual,
    block_count,
    padded,
    read_header,
    write_header,
)


def raw_parts(raw: Any, *, dtype: str, crc: int | None = None) -> tuple[Bytes, Bytes, Bytes]:
    """Make a full payload without copying the bits.

    Parameters
    ----------
    raw : buffer
        Contiguous, of any dtype.
    dtype : str
        True dtype of the data, for the header.
    crc : int, optional
        The crc32c of the bits, if the caller knows it.

    Returns
    -------
    tuple of three ndarrays of uint8
        One after the other they are the payload; the second one is a view of `raw`.

    Notes
    -----
    Reads the bits once, for their checksum, unless that is given.
    """
    bits = as_bytes(raw)
    width = dtypes.by_name(dtype).word_nbytes
    body = bits.size - bits.size % width
    header = Header(
        kind=Kind.FULL,
        codec=CodecId.PREFIX_INDEX,
        word_type=dtypes.by_name(dtype),
        prefix_bits=0,
        raw_nbytes=bits.size,
        raw_crc=checksum(bits) if crc is None else crc,
        base_crc=0,
        tail=bits[body:].tobytes(),
        entries=_entries(body),
    )
    head = np.empty(_head_nbytes(bits.size, width), U8)
    write_header(head, header)
    return head, bits[:body], np.zeros(padded(body) - body, U8)


class RawRoom:
    """Room for a payload that is perhaps stored as it is: then its bits come to lie where they belong.

    Parameters
    ----------
    target : ndarray of uint8, shape (n,)
        Where the bits belong; writable and contiguous.
    dtype : str
        True dtype of the data.

    Attributes
    ----------
    parts : tuple of three ndarrays of uint8
        To be filled one after the other with a payload that has exactly their length. The second one is a
        view of `target`.
    """

    def __init__(self, target: Bytes, dtype: str) -> None:
        width = dtypes.by_name(dtype).word_nbytes
        self._target, self._width = target, width
        self._body = target.size - target.size % width
        head = np.empty(_head_nbytes(target.size, width), U8)
        self.parts = head, target[: self._body], np.empty(padded(self._body) - self._body, U8)

    @property
    def nbytes(self) -> int:
        """How long the payload has to be, in bytes."""
        return sum(part.size for part in self.parts)

    def settle(self) -> bool:
        """Say whether `target` holds the bits now; otherwise they have to be decoded from `payload`.

        Raises
        ------
        CodecError
            If the header is damaged. The bits themselves are not looked at.
        """
        header = read_header(self.parts[0], self.nbytes)
        if header.word_type.word_nbytes != self._width or header.raw_nbytes != self._target.size:
            return False
        if header.kind is not Kind.FULL or header.entries != _entries(self._body):
            return False
        self._target[self._body :] = np.frombuffer(header.tail, U8)
        return True

    def payload(self) -> Bytes:
        """Return what was filled in, in memory of its own."""
        return np.concatenate(self.parts)


def _head_nbytes(raw_nbytes: int, width: int) -> int:
    return HEADER_NBYTES + ENTRY_NBYTES * block_count(raw_nbytes, width)


def _entries(body: int) -> tuple[Entry, ...]:
    starts = range(0, body, BLOCK_NBYTES)
    return tuple(Entry(min(BLOCK_NBYTES, body - start), Block.RAW, Residual.NONE) for start in starts)
