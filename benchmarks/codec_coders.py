"""What is timed: our codecs, a copy, and each peer with what it is fed.

A residual is computed within the timed part, theirs as ours, in cache-sized parts into memory that is there
already. Checksums: ours are on, the others have none (Blosc2, pcodec, ZipNN) or theirs at the default.
"""

from __future__ import annotations

import ctypes
from typing import Any, Protocol

import blosc2
import numcodecs.blosc
import numexpr
import numpy as np
from fastcheck_codecs import PrefixIndex, XorDelta, max_encoded_nbytes

from benchmarks.codec_cases import Feed, Kind, Pair, Words, residual, restore
from benchmarks.codec_peers import Peer, peers
from fastcheck_dask.engine.encode import TaskEncoder

#: What decides which feed suits a coder best.
_TRIAL_NBYTES = 2 << 20


#: Parameters of glibc's mallopt, and more than any buffer here.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _KEPT_NBYTES = -1, -3, 1 << 30


def keep_memory() -> None:
    """Let malloc reuse what was freed, so that peers that return fresh buffers do not pay for page faults.

    Otherwise it would depend on the order of the coders who pays. Where there is no glibc nothing happens.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):
        for parameter in (_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD):
            library.mallopt(parameter, _KEPT_NBYTES)


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


class Saved:
    """What a save does with a chunk: chooses the codec from a sample, encodes, and digests."""

    name = "as saved"
    slow = False

    def __init__(self, pair: Pair, dtype: str) -> None:
        self._encoder = TaskEncoder()
        self._dtype = dtype
        self._current, self._base = pair.current.view(np.uint8), pair.base.view(np.uint8)
        self._codec = XorDelta(base=pair.base, dtype=dtype)
        self._arena = np.zeros(max_encoded_nbytes(pair.current.nbytes), np.uint8)
        self._out = np.zeros_like(pair.current)

    def prepare(self) -> None:
        """Nothing."""

    def encode(self) -> Any:
        """Encode into the arena."""
        nbytes = self._current.size
        pieces = ((0, nbytes),)
        payload = self._encoder.encode(
            (self._current, pieces),
            (self._base, pieces),
            dtype=self._dtype,
            nbytes=nbytes,
            out=self._arena,
        )
        return self._arena[: payload.nbytes]

    def decode(self, payload: Any) -> Words:
        """Decode into memory that is there already; no digest is compared."""
        self._codec.decode(payload, out=self._out)
        return self._out


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


#: Feeds that a goal names, beside the one that suits the peer best.
_NAMED = {
    ("ZipNN", Kind.WEIGHTS): {Feed.XOR},
    ("ZipNN", Kind.WEIGHTS_BF16): {Feed.XOR},
    ("ZipNN", Kind.SECOND_MOMENT): {Feed.XOR},
    ("ZipNN", Kind.MOMENTUM): {Feed.RAW},
    ("ZipNN, C core alone", Kind.WEIGHTS): {Feed.XOR},
    ("ZipNN, C core alone", Kind.WEIGHTS_BF16): {Feed.XOR},
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
        Saved(pair, dtype),
    ]
    if kind is not Kind.MOMENTUM:
        made.append(Ours("delta, xor", pair, codec=XorDelta(base=pair.base, dtype=dtype, residual="xor")))
    for peer in peers(pair.current.itemsize):
        feeds = _NAMED.get((peer.name, kind), set()) | {_best_feed(peer, pair)}
        made += [Theirs(peer, feed, pair) for feed in sorted(feeds, key=lambda feed: feed.value)]
    return made
