"""Chunks of derived arrays, which a node does not hold, made of those that it holds."""

from __future__ import annotations

from typing import NamedTuple

import xxhash
from fastcheck_codecs import CodecError, PrefixIndex

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout.casts import CAST_DTYPES, SOURCE_DTYPE, cast
from fastcheck_dask.node.entries import Entry
from fastcheck_dask.tiers.wire import Bits


class Wanted(NamedTuple):
    """A derived chunk that is asked for."""

    #: Key of the chunk that it is the cast of.
    source: str
    dtype: str
    #: xxh3-128 of its raw bits, hex.
    digest: str

    @classmethod
    def from_wire(cls, value: object) -> Wanted:
        """Read what a message says; `CorruptDataError` for anything else."""
        if not isinstance(value, list) or [type(part) for part in value] != [str, str, str]:
            raise CorruptDataError(f"a derived chunk is [source, dtype, digest], got {value!r:.200}")
        if value[1] not in CAST_DTYPES:
            raise CorruptDataError(
                f"a derived chunk is of {' or '.join(sorted(CAST_DTYPES))}, not {value[1]!r:.80}"
            )
        return cls(*value)


def encoded_cast(source: Entry, wanted: Wanted) -> Bits:
    """Return the whole payload of the chunk that is the cast of a stored one.

    Raises
    ------
    CorruptDataError
        If the stored one is no float32 chunk, cannot be decoded, or its cast has another digest.

    Notes
    -----
    Holds up to two and a half times the raw source chunk.
    """
    key, dtype = source.descriptor.key, source.descriptor.dtype
    if dtype != SOURCE_DTYPE:
        raise CorruptDataError(f"chunk {key} is {dtype}, and only the cast of {SOURCE_DTYPE} can be made")
    try:
        bits = cast(PrefixIndex(dtype=dtype, checksum=False).decode(source.payload), wanted.dtype)
    except CodecError as error:
        raise CorruptDataError(f"chunk {key}: {error}") from error
    if (got := xxhash.xxh3_128_hexdigest(bits)) != wanted.digest:
        raise CorruptDataError(
            f"the {wanted.dtype} cast of chunk {key} has digest {got}, not {wanted.digest}"
        )
    return PrefixIndex(dtype=wanted.dtype).encode(bits)
