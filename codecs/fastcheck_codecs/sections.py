"""Sections of a block: where they are written to and read from, and their entropy stage."""

from __future__ import annotations

import struct
import threading
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import zstandard

from fastcheck_codecs.bitops import Bytes
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import padded

#: mode, lowest value of a packed plane, 2 zero bytes, length
_SECTION = struct.Struct("<BB2xI")

#: Below this size there is nothing to gain.
SMALL = 64


class Mode(IntEnum):
    """How the bytes of one section are stored."""

    ELIDED = 0
    RAW = 1
    #: The bytes other than zero, and how far apart they lie.
    SPARSE = 2
    ENTROPY = 3
    #: Two byte planes that did not compress, left together as 16-bit values.
    PAIR = 4
    #: Four to a byte: three values in a row, and an escape to a list of the others.
    QUADS = 5
    #: Two to a byte: fifteen values in a row, and an escape.
    NIBBLES = 6
    #: A pair whose digits are not balanced where others of the block are.
    PLAIN = 7


_MODES = tuple(Mode)


class Section(NamedTuple):
    """One section as it is stored."""

    mode: Mode
    #: What the code 0 stands for, in packed planes; else 0.
    lowest: int
    data: Bytes


class NoRoomError(Exception):
    """What is being encoded does not get small enough; its block is stored raw."""


class Sink:
    """Writes sections into a caller's memory and stops where raw storage would be smaller.

    Parameters
    ----------
    memory : ndarray of uint8
        Filled from the start; its size is the limit.
    """

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.position = 0

    def reserve(self, nbytes: int) -> Bytes:
        """Claim the next bytes, padded with zeros to the alignment, and return them unset."""
        start, end = self.position, self.position + nbytes
        stop = start + padded(nbytes)
        if stop > self._memory.size:
            raise NoRoomError
        self._memory[end:stop] = 0
        self.position = stop
        return self._memory[start:end]

    def section(self, mode: Mode, nbytes: int, *, lowest: int = 0) -> Bytes:
        """Claim a section and return its unset data."""
        header = self.reserve(_SECTION.size + nbytes)
        _SECTION.pack_into(header.data, 0, mode, lowest, nbytes)
        return header[_SECTION.size :]


class Source:
    """Reads what a `Sink` wrote; every length is checked before it is believed."""

    def __init__(self, memory: Bytes) -> None:
        self._memory = memory
        self.position = 0

    def take(self, nbytes: int) -> Bytes:
        """Return the next bytes and skip their padding; a view."""
        start, stop = self.position, self.position + padded(nbytes)
        if stop > self._memory.size:
            raise CodecError(f"damaged block: {nbytes} bytes wanted at {start} of {self._memory.size}")
        self.position = stop
        return self._memory[start : start + nbytes]

    def section(self) -> Section:
        """Return the next section."""
        mode, lowest, nbytes = _SECTION.unpack_from(self.take(_SECTION.size).data)
        if mode >= len(_MODES):
            raise CodecError(f"damaged block: unknown section mode {mode}")
        return Section(_MODES[mode], lowest, self.take(nbytes))

    def finish(self) -> None:
        """Check that nothing is left over."""
        if self.position != self._memory.size:
            raise CodecError(f"damaged block: {self._memory.size - self.position} bytes are left over")


class _Zstd(threading.local):
    """The contexts of one thread: making one for each call costs as much as coding a small list."""

    def __init__(self) -> None:
        # Planes hold few true repeats, but many chance ones, which are slow to look for and cost more
        # than literals: so the search is made as coarse as it gets. What remains is Huffman coding.
        settings = zstandard.ZstdCompressionParameters.from_level(1, window_log=18, hash_log=6, min_match=7)
        self.compressor = zstandard.ZstdCompressor(compression_params=settings)
        self.decompressor = zstandard.ZstdDecompressor()


_ZSTD = _Zstd()


def squeeze(data: Bytes) -> Any:
    """Compress, or return `data` where that gains nothing: the length alone tells a reader which."""
    if data.size < SMALL:
        return data
    packed = _ZSTD.compressor.compress(data.data)
    return packed if len(packed) < data.size else data


def expand(data: Bytes, *, out: Bytes) -> None:
    """Undo `squeeze` or plain zstd into exactly `out`."""
    if data.size == out.size:
        np.copyto(out, data)
        return
    try:
        # Known beforehand, so that no frame is decompressed that holds anything else.
        size = zstandard.frame_content_size(data.data)
        read = _ZSTD.decompressor.stream_reader(data.data).readinto(out.data) if size == out.size else 0
    except zstandard.ZstdError as error:
        raise CodecError(f"damaged section: {error}") from error
    if read != out.size:
        raise CodecError(f"damaged section: zstd frame of {size} bytes gave {read}, expected {out.size}")
