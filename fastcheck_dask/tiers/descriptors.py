"""What a message says about each chunk whose payload it carries."""

from __future__ import annotations

from typing import NamedTuple

from fastcheck_dask.errors import CorruptDataError

_KEY_LIMIT = 4096
_HEX = frozenset("0123456789abcdef")


class Descriptor(NamedTuple):
    """One chunk: what its raw bits are, and what its encoded payload is."""

    key: str
    #: Codec dtype name.
    dtype: str
    raw_nbytes: int
    #: xxh3-128 of the raw bits, hex.
    digest: str
    #: Of the encoded payload.
    crc32c: int
    #: Bytes of the encoded payload.
    nbytes: int

    def to_wire(self) -> list[object]:
        """Return the plain values, in field order."""
        return list(self)

    @classmethod
    def from_wire(cls, values: object) -> Descriptor:
        """Undo :meth:`to_wire`; `CorruptDataError` for anything that is not a descriptor."""
        if not isinstance(values, list) or len(values) != len(cls._fields):
            raise CorruptDataError(f"a chunk descriptor has {len(cls._fields)} fields, got {values!r:.200}")
        key, dtype, raw_nbytes, digest, crc32c, nbytes = values
        if not (isinstance(key, str) and 0 < len(key) <= _KEY_LIMIT and isinstance(dtype, str)):
            raise CorruptDataError(f"key or dtype of a chunk descriptor is not text: {values!r:.200}")
        if not (isinstance(digest, str) and len(digest) == 32 and _HEX.issuperset(digest)):
            raise CorruptDataError(f"chunk {key}: digest {digest!r:.80} is not 32 hexadecimal digits")
        for name, number, limit in (
            ("raw_nbytes", raw_nbytes, 2**62),
            ("crc32c", crc32c, 2**32),
            ("nbytes", nbytes, 2**62),
        ):
            if type(number) is not int or not 0 <= number < limit:
                raise CorruptDataError(f"chunk {key}: {name} is {number!r:.80}")
        return cls(key, dtype, raw_nbytes, digest, crc32c, nbytes)


def descriptors_from_wire(values: object) -> list[Descriptor]:
    """Read a list of descriptors; `CorruptDataError` if it is not one, or names a chunk twice."""
    if not isinstance(values, list):
        raise CorruptDataError(f"chunks must be a list of descriptors, got {type(values).__name__}")
    found = [Descriptor.from_wire(entry) for entry in values]
    if len({descriptor.key for descriptor in found}) != len(found):
        raise CorruptDataError("a message names a chunk twice")
    return found
