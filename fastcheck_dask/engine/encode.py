"""Turn one task into a payload: the innermost loop of a save, run in the encoder processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import xxhash
from fastcheck_codecs import Checksum, PrefixIndex, XorDelta, checksum, delta_is_smaller, encode_raw_into

from fastcheck_dask.engine.plan import Piece, parity_dtype
from fastcheck_dask.layout.casts import is_cast
from fastcheck_dask.layout.dtypes import codec_dtype
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.nonfinite import has_nonfinite
from fastcheck_dask.layout.parity import HOLE, combine
from fastcheck_dask.tiers.descriptors import Descriptor

Bits = npt.NDArray[np.uint8]
#: Gives the memory that a data chunk belongs into: uint8, as long as the chunk.
Region = Callable[[str], Bits]

#: Chunks up to this size are not worth a sample: they go as deltas when they have a base.
_SAMPLE_FROM = 16 * 1024
#: Bytes that all passes of `look` go over before the next ones; a multiple of every word. Smaller blocks are
#: nearer to the core, and threads that look at once wait for the interpreter then, longer than for memory.
_LOOK_BYTES = 8 * 2**20


@dataclass(frozen=True)
class Payload:
    """What encoding one task gave: how long it is, and the checksums that travel with it."""

    nbytes: int
    #: xxh3_128 of the raw bits, hex.
    digest: str
    #: crc32c of the payload.
    crc32c: int
    #: Whether the bits hold a NaN or an infinity; False for parity, whose bits are no numbers.
    nonfinite: bool = False


def digest(bits: Bits) -> str:
    """Return the digest of raw bits, as manifests carry it."""
    return xxhash.xxh3_128_hexdigest(bits)


@dataclass(frozen=True)
class Look:
    """What all passes over raw bits give."""

    #: xxh3_128, hex.
    digest: str
    #: Of the raw bits, as the header of a payload carries it.
    crc32c: int
    nonfinite: bool


def look(bits: Bits, dtype: str) -> Look:
    """Take the checksums of raw bits, and look for a NaN or an infinity, block by block.

    Notes
    -----
    A chunk of usual size is one block; a larger one does not leave the caches between the passes.
    """
    hasher, crc, nonfinite = xxhash.xxh3_128(), Checksum(), False
    for start in range(0, bits.size, _LOOK_BYTES):
        block = bits[start : start + _LOOK_BYTES]
        hasher.update(block)
        crc.update(block)
        nonfinite = nonfinite or has_nonfinite(block, dtype)
    return Look(hasher.hexdigest(), crc.value, nonfinite)


def check_cast(slot: Bits, *, source: Piece, narrow: Piece, dtype: str) -> str | None:
    """Return the digest of a chunk if it is, bit for bit, the cast of another one of the slot; else None."""
    bits = slot[narrow[0] : sum(narrow)]
    return digest(bits) if is_cast(slot[source[0] : sum(source)], bits, dtype) else None


def encoded_whole(manifest: Manifest, key: str, region: Region) -> tuple[Descriptor, Bits]:
    """Return a chunk of a checkpoint encoded whole; a parity chunk is made of the members of its stripe.

    Its digest is that of the manifest: whoever takes it compares.
    """
    if key in manifest.chunks:
        bits, dtype = region(key), codec_dtype(manifest.chunks[key].dtype)
    else:
        assert manifest.layout is not None
        stripe, shard = manifest.layout.position[key]
        parts = (HOLE if member is None else region(member) for member in stripe.members)
        number = shard - manifest.layout.shards
        bits = combine(parts, np.empty(manifest.nbytes_of(key), np.uint8), exponent=number)
        dtype = parity_dtype(manifest.chunks[member].dtype for member in stripe.members if member is not None)
    payload = PrefixIndex(dtype=dtype).encode(bits)
    return Descriptor(
        key, dtype, bits.size, manifest.digests[key], checksum(payload), payload.nbytes
    ), payload


class TaskEncoder:
    """Encodes tasks; owns the scratch that parity needs, so that nothing is allocated in steady state."""

    def __init__(self) -> None:
        self._scratch = [np.empty(0, np.uint8), np.empty(0, np.uint8)]

    def encode(
        self,
        current: tuple[Bits, tuple[Piece, ...]],
        base: tuple[Bits, tuple[Piece, ...]] | None,
        *,
        dtype: str,
        nbytes: int,
        out: Bits,
        compress: bool = True,
        exponent: int = 0,
    ) -> Payload:
        """Encode one task into `out`.

        Parameters
        ----------
        current, base : tuple of (slot data, pieces)
            The chunk is the XOR of its pieces, each padded with zeros; data chunks have one piece.
        dtype : str
            Name by which the codecs choose how to split the bits.
        nbytes : int
            Raw bytes of the chunk.
        out : ndarray of uint8
            At least ``max_encoded_nbytes(nbytes)`` long; receives the payload.
        compress : bool
            If False the payload is whole and as long as the bits, which takes little more than a copy.
        exponent : int
            Piece number i counts times 2 to the power of ``exponent * i``.
        """
        raw = self._bits(0, *current, nbytes, exponent=exponent)
        is_parity = len(current[1]) > 1
        if not compress:
            length = encode_raw_into(raw, out, dtype=dtype)
        elif base is None:
            length = PrefixIndex(dtype=dtype).encode_into(raw, out)
        else:
            before = self._bits(1, *base, nbytes, exponent=exponent)
            if is_parity or nbytes <= _SAMPLE_FROM or delta_is_smaller(raw, before, dtype=dtype):
                residual = "xor" if is_parity else "auto"
                length = XorDelta(base=before, residual=residual, dtype=dtype).encode_into(raw, out)
            else:
                length = PrefixIndex(dtype=dtype).encode_into(raw, out)
        # Here, since the chunk is in the cache.
        nonfinite = not is_parity and has_nonfinite(raw, dtype)
        return Payload(length, digest(raw), checksum(out[:length]), nonfinite)

    def _bits(self, which: int, slot: Bits, pieces: tuple[Piece, ...], nbytes: int, *, exponent: int) -> Bits:
        if len(pieces) == 1 and pieces[0][1] == nbytes:
            offset, length = pieces[0]
            return slot[offset : offset + length]
        if self._scratch[which].size < nbytes:
            self._scratch[which] = np.empty(nbytes, np.uint8)
        parts = (slot[o : o + n] for o, n in pieces)
        return combine(parts, self._scratch[which][:nbytes], exponent=exponent)
