"""The coders that are compared: ours, and those of others, each with one thread.

A residual is computed within the timed part, theirs as ours, in cache-sized parts into memory that is there
already. Checksums: ours are on, the others have none (Blosc2, pcodec, ZipNN) or theirs at the default.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import blosc2
import lz4.block
import numcodecs.blosc
import numexpr
import numpy as np
import zstandard
from fastcheck_codecs import PrefixIndex, XorDelta, max_encoded_nbytes
from pcodec import ChunkConfig, DeltaSpec, ModeSpec, standalone
from zipnn import ZipNN

from benchmarks.codec_cases import Feed, Kind, Pair, Words, residual, restore

_BYTES = (Feed.RAW, Feed.XOR, Feed.DIFFERENCE)
#: What decides which feed suits a coder best.
_TRIAL_NBYTES = 2 << 20


def one_thread() -> None:
    """Hold every library to one thread."""
    numexpr.set_num_threads(1)
    numcodecs.blosc.set_nthreads(1)
    numcodecs.blosc.use_threads = False
    blosc2.set_nthreads(1)


class Coder(Protocol):
    """Encodes one pair, again and again."""

    name: str
    #: Too slow to be repeated often.
    slow: bool

    def prepare(self) -> None:
        """Do what is not counted before each `encode`."""

    def encode(self) -> Any:
        """Return the payload; it holds until the next call."""

    def decode(self, payload: Any) -> Words:
        """Return the words that were encoded."""


class Ours:
    """One of this project's codecs, as the encoder processes call it."""

    slow = False

    def __init__(self, name: str, pair: Pair, *, codec: XorDelta | PrefixIndex) -> None:
        self.name = name
        self._pair, self._codec = pair, codec
        self._arena = np.zeros(max_encoded_nbytes(pair.current.nbytes), np.uint8)
        self._out = np.zeros_like(pair.current)

    def prepare(self) -> None:
        """Nothing."""

    def encode(self) -> Any:
        """Encode into the arena."""
        return self._arena[: self._codec.encode_into(self._pair.current, self._arena)]

    def decode(self, payload: Any) -> Words:
        """Decode into memory that is there already."""
        self._codec.decode(payload, out=self._out)
        return self._out


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


class Theirs:
    """A peer with one feed."""

    def __init__(self, peer: Peer, feed: Feed, pair: Pair) -> None:
        self.name = f"{peer.name} / {feed.value}"
        self.slow = peer.slow
        self._peer, self._feed, self._pair = peer, feed, pair
        self._room = np.zeros_like(pair.current)
        self._stored = np.zeros_like(pair.current)
        self._out = np.zeros_like(pair.current)

    def prepare(self) -> None:
        """Copy what the peer would destroy."""
        if self._peer.destroys and self._feed is Feed.RAW:
            np.copyto(self._room, self._pair.current)

    def encode(self) -> Any:
        """Compute the residual and compress it."""
        fed = residual(self._feed, self._pair, out=self._room)
        if self._peer.destroys:
            fed = self._room
        return self._peer.compress(fed)

    def decode(self, payload: Any) -> Words:
        """Decompress and undo the residual."""
        stored = self._peer.decompress(payload, self._stored)
        return restore(self._feed, stored, self._pair.base, out=self._out)


class Memcpy:
    """A copy into memory that is there already."""

    name = "memcpy"
    slow = False

    def __init__(self, pair: Pair) -> None:
        self._pair = pair
        self._stored, self._out = np.zeros_like(pair.current), np.zeros_like(pair.current)

    def prepare(self) -> None:
        """Nothing."""

    def encode(self) -> Any:
        """Copy."""
        np.copyto(self._stored, self._pair.current)
        return self._stored

    def decode(self, payload: Any) -> Words:
        """Copy back."""
        np.copyto(self._out, payload)
        return self._out


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


def _blosc(itemsize: int) -> Peer:
    codec = numcodecs.blosc.Blosc(cname="zstd", clevel=1, shuffle=numcodecs.blosc.Blosc.SHUFFLE)

    def decompress(payload: Any, out: Words) -> Words:
        codec.decode(payload, out=out)
        return out

    return Peer("Blosc zstd-1 shuffle", codec.encode, decompress)


def _pcodec(itemsize: int) -> Peer:
    # What its search for a mode would find is known here: none. That spares it the time.
    config = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    signed = f"i{itemsize}"

    def decompress(payload: Any, out: Words) -> Words:
        standalone.simple_decompress_into(payload, out.view(signed))
        return out

    return Peer(
        "pcodec-8",
        lambda words: standalone.simple_compress(words.view(signed), config),
        decompress,
        feeds=(Feed.XOR, Feed.SIGNED),
        slow=True,
    )


def _pcodec_float(itemsize: int) -> Peer:
    config = ChunkConfig(compression_level=8, mode_spec=ModeSpec.classic(), delta_spec=DeltaSpec.no_op())
    # It has no bfloat16; its bits as an integer keep the order of the values, sign apart.
    number = np.dtype("f4" if itemsize == 4 else "u2")

    def decompress(payload: Any, out: Words) -> Words:
        standalone.simple_decompress_into(payload, out.view(number))
        return out

    return Peer(
        "pcodec-8",
        lambda words: standalone.simple_compress(words.view(number), config),
        decompress,
        feeds=(Feed.RAW,),
        slow=True,
    )


def _zipnn(itemsize: int) -> Peer:
    codec = ZipNN(bytearray_dtype="float32" if itemsize == 4 else "bfloat16", threads=1)
    return Peer(
        "ZipNN",
        # It reads beyond an array; bytes are what it accepts.
        lambda words: codec.compress(memoryview(words).cast("B")),
        _from_bytes(codec.decompress),
        destroys=True,
    )


def _plain() -> list[Peer]:
    def zstd(level: int) -> Peer:
        packer, unpacker = zstandard.ZstdCompressor(level=level), zstandard.ZstdDecompressor()
        return Peer(f"zstd-{level}", packer.compress, _from_bytes(unpacker.decompress))

    return [
        zstd(1),
        zstd(3),
        Peer("LZ4", lz4.block.compress, _from_bytes(lz4.block.decompress)),
        Peer("zlib-6", lambda words: zlib.compress(words, 6), _from_bytes(zlib.decompress), slow=True),
    ]


def _peers(itemsize: int) -> list[Peer]:
    return [
        _zipnn(itemsize),
        _blosc2("Blosc2 zstd-1 shuffle", itemsize, filter_=blosc2.Filter.SHUFFLE),
        _blosc2("Blosc2 zstd-1 bitshuffle", itemsize, filter_=blosc2.Filter.BITSHUFFLE),
        _blosc(itemsize),
        _pcodec(itemsize),
        _pcodec_float(itemsize),
        *_plain(),
    ]


#: Feeds that a goal names, beside the one that suits the peer best.
_NAMED = {
    ("ZipNN", Kind.WEIGHTS): {Feed.XOR},
    ("ZipNN", Kind.WEIGHTS_BF16): {Feed.XOR},
    ("ZipNN", Kind.SECOND_MOMENT): {Feed.XOR},
    ("ZipNN", Kind.MOMENTUM): {Feed.RAW},
    ("Blosc2 zstd-1 shuffle", Kind.WEIGHTS): {Feed.XOR, Feed.DIFFERENCE},
    ("Blosc2 zstd-1 shuffle", Kind.SECOND_MOMENT): {Feed.XOR},
}


def _best_feed(peer: Peer, pair: Pair) -> Feed:
    count = _TRIAL_NBYTES // pair.current.itemsize
    short = Pair(pair.current[:count].copy(), pair.base[:count].copy())

    def size(feed: Feed) -> int:
        coder = Theirs(peer, feed, short)
        coder.prepare()
        return len(coder.encode())

    return min(peer.feeds, key=size)


def coders(pair: Pair, kind: Kind, dtype: str) -> list[Coder]:
    """Return all coders for a pair: ours, a copy, and each peer with the feeds that matter."""
    made: list[Coder] = [
        Memcpy(pair),
        Ours("delta", pair, codec=XorDelta(base=pair.base, dtype=dtype)),
        Ours("delta, unchecked", pair, codec=XorDelta(base=pair.base, dtype=dtype, checksum=False)),
        Ours("index", pair, codec=PrefixIndex(dtype=dtype)),
    ]
    if kind is not Kind.MOMENTUM:
        made.append(Ours("delta, xor", pair, codec=XorDelta(base=pair.base, dtype=dtype, residual="xor")))
    for peer in _peers(pair.current.itemsize):
        feeds = _NAMED.get((peer.name, kind), set()) | {_best_feed(peer, pair)}
        made += [Theirs(peer, feed, pair) for feed in sorted(feeds, key=lambda feed: feed.value)]
    return made
