"""The coders of others, each with one thread."""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import blosc2
import lz4.block
import numcodecs.blosc
import numpy as np
import zstandard
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone
from zipnn import ZipNN
from zipnn import zipnn as zipnn_module

from benchmarks.codec_cases import Feed, Words

_BYTES = (Feed.RAW, Feed.XOR, Feed.DIFFERENCE)
#: How ZipNN's own wrapper asks its core to group the bytes.
_ZIPNN_FLOAT32, _ZIPNN_BFLOAT16 = 220, 10


@dataclass(frozen=True)
class Peer:
    """Somebody else's coder.

    Attributes
    ----------
    name : str
    compress : callable
        From a word array to a payload.
    decompress : callable
        From a payload and `out`, a word array that may be used, to a word array.
    feeds : tuple of Feed
        What it may be fed with.
    destroys : bool
        It works in its input and needs a copy, which is not counted.
    """

    name: str
    compress: Callable[[Words], Any]
    decompress: Callable[[Any, Words], Words]
    feeds: tuple[Feed, ...] = _BYTES
    destroys: bool = False
    slow: bool = False


def _from_bytes(decompress: Callable[[Any], Any]) -> Callable[[Any, Words], Words]:
    return lambda payload, out: np.frombuffer(decompress(payload), out.dtype)


def _blosc2(name: str, itemsize: int, *, filter_: blosc2.Filter) -> Peer:
    options = {
        "codec": blosc2.Codec.ZSTD,
        "clevel": 1,
        "typesize": itemsize,
        "filters": [filter_],
        "nthreads": 1,
    }

    def decompress(payload: Any, out: Words) -> Words:
        blosc2.decompress2(payload, dst=out, nthreads=1)
        return out

    return Peer(name, lambda words: blosc2.compress2(words, **options), decompress)


def _blosc() -> Peer:
    codec = numcodecs.blosc.Blosc(cname="zstd", clevel=1, shuffle=numcodecs.blosc.Blosc.SHUFFLE)

    def decompress(payload: Any, out: Words) -> Words:
        codec.decode(payload, out=out)
        return out

    return Peer("Blosc zstd-1 shuffle", codec.encode, decompress)


def _pcodec(itemsize: int) -> list[Peer]:
    # Its defaults; and spared the search for a mode and an order, which finds nothing here.
    plain = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    configs = {"pcodec-8": ChunkConfig(compression_level=8), "pcodec-8, no search": plain}
    signed = np.dtype(f"i{itemsize}")
    # It has no bfloat16; the bits as an integer keep the order of the values, sign apart.
    number = np.dtype("f4" if itemsize == 4 else "u2")
    return [
        _pcodec_of(name, config, dtype, feeds)
        for name, config in configs.items()
        for dtype, feeds in ((signed, (Feed.XOR, Feed.SIGNED)), (number, (Feed.RAW,)))
    ]


def _pcodec_of(name: str, config: ChunkConfig, dtype: np.dtype[Any], feeds: tuple[Feed, ...]) -> Peer:
    def decompress(payload: Any, out: Words) -> Words:
        standalone.simple_decompress_into(payload, out.view(dtype))
        return out

    return Peer(
        name,
        lambda words: standalone.simple_compress(words.view(dtype), config),
        decompress,
        feeds=feeds,
        slow=True,
    )


def _zipnn(itemsize: int) -> list[Peer]:
    dtype, order = ("float32", _ZIPNN_FLOAT32) if itemsize == 4 else ("bfloat16", _ZIPNN_BFLOAT16)
    codec = ZipNN(bytearray_dtype=dtype, threads=1)

    def compress(words: Words) -> bytes:
        # It reads beyond an array; bytes are what it accepts.
        packed: bytes = codec.compress(memoryview(words).cast("B"))
        return packed

    primed: set[int] = set()

    def compress_in_core(words: Words) -> bytes:
        if words.nbytes not in primed:  # the wrapper leaves a header for this size
            primed.clear()
            primed.add(words.nbytes)
            return compress(words)
        packed: bytes = zipnn_module.zipnn_core.zipnn_core(
            codec._header + codec._ext_header,
            memoryview(words).cast("B"),
            itemsize,
            1,
            order,
            0,
            codec.compression_chunk,
            codec.compression_threshold,
            codec.check_th_after_percent,
            1,
        )
        return packed

    decompress = _from_bytes(codec.decompress)
    return [
        Peer("ZipNN", compress, decompress, destroys=True),
        Peer("ZipNN, C core alone", compress_in_core, decompress, destroys=True),
    ]


def _plain() -> list[Peer]:
    def zstd(level: int) -> Peer:
        packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()

        def compress(words: Words) -> bytes:
            return packer.compress(memoryview(words))

        return Peer(f"zstd-{level}", compress, _from_bytes(unpacker.decompress))

    return [
        zstd(1),
        zstd(3),
        Peer("LZ4", lz4.block.compress, _from_bytes(lz4.block.decompress)),
        Peer(
            "zlib-6",
            lambda words: zlib.compress(memoryview(words), 6),
            _from_bytes(zlib.decompress),
            slow=True,
        ),
    ]


def peers(itemsize: int) -> list[Peer]:
    """Return all peers, for words of 2 (bfloat16) or 4 bytes (float32)."""
    return [
        *_zipnn(itemsize),
        _blosc2("Blosc2 zstd-1 shuffle", itemsize, filter_=blosc2.Filter.SHUFFLE),
        _blosc2("Blosc2 zstd-1 bitshuffle", itemsize, filter_=blosc2.Filter.BITSHUFFLE),
        _blosc(),
        *_pcodec(itemsize),
        *_plain(),
    ]
