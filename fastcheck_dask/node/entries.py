"""Stored chunks: what is checked when one arrives, and how deltas are merged into it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import xxhash
from fastcheck_codecs import CodecError, PrefixIndex, Summary, XorDelta, checksum, summary

from fastcheck_dask.errors import CorruptDataError, ShardCorruptError
from fastcheck_dask.node.untracked import untrack
from fastcheck_dask.tiers.descriptors import Descriptor
from fastcheck_dask.tiers.wire import Bits


@dataclass(frozen=True, slots=True, eq=False)
class Entry:
    """One stored payload; never changed after it was made, so that readers need no lock."""

    descriptor: Descriptor
    #: Encoded chunk, uint8, shape (nbytes,), read-only.
    payload: Bits
    summary: Summary

    def __post_init__(self) -> None:
        untrack(self, self.descriptor, self.summary)

    @property
    def is_delta(self) -> bool:
        """Whether it needs the chunk before it."""
        return self.summary.is_delta

    def stands_on(self, base: Entry) -> bool:
        """Say whether a delta was made against the bits of `base`.

        A base of another size is cut or padded first, so that its own checksum says nothing: whether it
        fits is seen when they are merged.
        """
        if base.descriptor.raw_nbytes != self.descriptor.raw_nbytes:
            return True
        return self.summary.base_crc32c == base.summary.raw_crc32c


#: What makes up one chunk of a generation: a whole payload, then the deltas that wait to be merged, in order.
Chain = tuple[Entry, ...]


class Step(NamedTuple):
    """How a chunk of an older generation comes back from the same chunk of the next one."""

    #: Of what comes back; its `crc32c` and `nbytes` are of no payload that is held.
    descriptor: Descriptor
    #: The delta to undo; None if the bits are the same.
    delta: Entry | None


def accept(descriptor: Descriptor, payload: Bits, where: str) -> Entry:
    """Make an entry of what arrived; the payload is kept, not copied.

    Raises
    ------
    ShardCorruptError
        If the payload is not what the descriptor says.
    """
    key = descriptor.key
    if payload.size != descriptor.nbytes:
        raise ShardCorruptError(key, where, f"{descriptor.nbytes} bytes", f"{payload.size} bytes")
    got = checksum(payload)
    if got != descriptor.crc32c:
        raise ShardCorruptError(key, where, f"{descriptor.crc32c:#010x}", f"{got:#010x}")
    try:
        found = summary(payload)
    except CodecError as error:
        raise ShardCorruptError(key, where, "an encoded chunk", str(error)) from error
    if found.raw_nbytes != descriptor.raw_nbytes:
        raise ShardCorruptError(
            key, where, f"{descriptor.raw_nbytes} raw bytes", f"{found.raw_nbytes} raw bytes"
        )
    payload.flags.writeable = False
    return Entry(descriptor, payload, found)


def accept_whole(descriptor: Descriptor, payload: Bits, where: str) -> Entry:
    """Make an entry of a whole payload whose bits are verified, too; `CorruptDataError` if they are wrong."""
    entry = accept(descriptor, payload, where)
    if entry.is_delta:
        raise CorruptDataError(f"chunk {descriptor.key} from {where}: a delta, where a whole chunk is needed")
    try:
        _check_digest(descriptor, PrefixIndex(dtype=descriptor.dtype).decode(payload))
    except CodecError as error:
        raise CorruptDataError(f"chunk {descriptor.key} from {where}: {error}") from error
    return entry


def is_intact(entry: Entry) -> bool:
    """Say whether the payload still has the checksum it came with."""
    return checksum(entry.payload) == entry.descriptor.crc32c


def extend(chain: Chain | None, entry: Entry) -> Chain | None:
    """Put an entry on top of the chunk's present chain; None when it is a delta and its base is gone."""
    if not entry.is_delta:
        return (entry,)
    if chain is None:
        return None
    new, last = entry.descriptor, chain[-1].descriptor
    if entry.summary.is_identity and (new.raw_nbytes, new.digest, new.dtype) == (
        last.raw_nbytes,
        last.digest,
        last.dtype,
    ):
        return chain
    return (*chain, entry)


def merge(chain: Chain) -> Entry:
    """Merge the deltas of a chain into its whole payload.

    Returns
    -------
    Entry
        Whole, with the descriptor of the newest delta, in memory of its own.

    Raises
    ------
    CorruptDataError
        If the result does not have the digest that the author gave.
    CodecError
        If a payload is damaged or a delta belongs to another base.

    Notes
    -----
    Holds up to three times the raw chunk. Decodes each payload once and encodes once.
    """
    return rewind(chain, ())


def rewind(chain: Chain, steps: Sequence[Step]) -> Entry:
    """Merge the deltas of a chain, then go steps back; as :func:`merge` does.

    Parameters
    ----------
    chain : Chain
        Of the chunk in a generation.
    steps : sequence of Step
        From that generation to an older one, the first one first.
    """
    bits = _bits(chain)
    for step in steps:
        if step.delta is not None:
            bits = XorDelta(checksum=False).undo(step.delta.payload, bits)
        # The base was padded to the size of what the delta led to.
        bits = bits[: step.descriptor.raw_nbytes]
    descriptor = steps[-1].descriptor if steps else chain[-1].descriptor
    _check_digest(descriptor, bits)
    return _stored(PrefixIndex(dtype=descriptor.dtype).encode(bits), descriptor)


def reverse_delta(newer: Chain, older: Chain) -> Entry | None:
    """Return a delta whose undoing leads from the newer bits of a chunk to the older ones.

    Returns
    -------
    Entry or None
        None if it would not be smaller than the older payload. The descriptor is that of the newer bits.

    Raises
    ------
    CodecError, CorruptDataError
        If a payload is damaged.
    """
    after, before = _bits(newer), _bits(older)
    descriptor = newer[-1].descriptor
    _check_digest(descriptor, after)
    _check_digest(older[-1].descriptor, before)
    base = _resized(before, after.size)
    payload = XorDelta(base=base, dtype=descriptor.dtype).encode(after)
    if payload.size >= sum(entry.payload.nbytes for entry in older):
        return None
    return _stored(payload, descriptor)


def _bits(chain: Chain) -> Bits:
    whole, *deltas = chain
    # Every delta checks its base, and the digest checks the result: the codecs need not do so as well.
    bits: Bits = PrefixIndex(dtype=whole.descriptor.dtype, checksum=False).decode(whole.payload)
    for delta in deltas:
        base = _resized(bits, delta.descriptor.raw_nbytes)
        bits = XorDelta(base=base, checksum=False).decode(delta.payload)
    return bits


def _stored(payload: Bits, descriptor: Descriptor) -> Entry:
    payload.flags.writeable = False
    descriptor = descriptor._replace(crc32c=checksum(payload), nbytes=payload.size)
    return Entry(descriptor, payload, summary(payload))


def _resized(bits: Bits, nbytes: int) -> Bits:
    """Return `bits` cut, or padded with zeros: a parity chunk is as long as its longest member."""
    if bits.size >= nbytes:
        return bits[:nbytes]
    padded = np.zeros(nbytes, np.uint8)
    padded[: bits.size] = bits
    return padded


def _check_digest(descriptor: Descriptor, bits: Bits) -> None:
    got = xxhash.xxh3_128_hexdigest(bits.data)
    if got != descriptor.digest or bits.size != descriptor.raw_nbytes:
        raise CorruptDataError(
            f"chunk {descriptor.key}: {bits.size} raw bytes with digest {got}, its author gave "
            f"{descriptor.raw_nbytes} and {descriptor.digest}"
        )
