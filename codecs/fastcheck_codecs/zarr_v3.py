"""Native zarr v3 codecs, found through the entry points ``zarr.codecs``; zarr is imported here only.

A chunk may have been stored without its end: FastCheck cuts edge chunks to the part that lies inside the
array. Decoding fills it up with zeros to the full chunk that zarr expects.
"""

from __future__ import annotations

import asyncio
import math
from abc import abstractmethod
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Self

import numpy as np
from zarr.abc.codec import BytesBytesCodec
from zarr.core.array_spec import ArraySpec
from zarr.core.buffer import Buffer
from zarr.core.common import JSON, parse_named_configuration

from fastcheck_codecs import dtypes
from fastcheck_codecs.bitops import U8, as_bytes
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import raw_nbytes
from fastcheck_codecs.prefix_index import PrefixIndex
from fastcheck_codecs.xor_delta import XorDelta


def _chunk_nbytes(spec: ArraySpec) -> int | None:
    """Give the size of a whole chunk in bytes; None where values have no fixed size."""
    dtype = spec.dtype.to_native_dtype()
    if dtype.kind in "OT":
        return None
    return math.prod(spec.shape) * dtype.itemsize


def _word_name(spec: ArraySpec) -> str:
    return dtypes.of_numpy(spec.dtype.to_native_dtype()).name


class _FastCheckCodec(BytesBytesCodec):
    """What both codecs share; subclasses are frozen dataclasses whose fields are the configuration."""

    name: ClassVar[str]
    is_fixed_size = False

    @abstractmethod
    def _codec(self, spec: ArraySpec) -> XorDelta | PrefixIndex:
        """Build the numcodecs codec for a chunk."""

    @classmethod
    def from_dict(cls, data: dict[str, JSON]) -> Self:
        """Build from the metadata of an array; an unknown setting is an error."""
        _, found = parse_named_configuration(data, cls.name, require_configuration=False)
        settings: dict[str, Any] = dict(found or {})
        unknown = settings.keys() - {field.name for field in fields(cls)}
        if unknown:
            raise CodecError(f"{cls.name} has no setting {', '.join(sorted(unknown))}")
        return cls(**settings)

    def to_dict(self) -> dict[str, JSON]:
        """Give name and configuration, as they stand in the metadata; what is unset is left out."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        configuration: dict[str, JSON] = {key: value for key, value in values.items() if value is not None}
        return {"name": self.name, "configuration": configuration}

    def compute_encoded_size(self, input_byte_length: int, chunk_spec: ArraySpec) -> int:
        """Refuse: the size depends on the data."""
        raise NotImplementedError

    def _encode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        raw = as_bytes(chunk_bytes.as_numpy_array())
        whole = _chunk_nbytes(chunk_spec)
        if whole is not None and raw.size != whole:
            # Decoding would fill up or refuse what another codec has changed the size of.
            raise CodecError(
                f"{self.name} got {raw.size} bytes for a chunk of {whole}; it has to be the first codec "
                "after the array is turned into bytes"
            )
        return chunk_spec.prototype.buffer.from_array_like(self._codec(chunk_spec).encode(raw))

    def _decode_sync(self, chunk_bytes: Buffer, chunk_spec: ArraySpec) -> Buffer:
        payload = as_bytes(chunk_bytes.as_numpy_array())
        codec = self._codec(chunk_spec)
        whole = _chunk_nbytes(chunk_spec)
        if whole is None:
            return chunk_spec.prototype.buffer.from_array_like(codec.decode(payload))
        stored = raw_nbytes(payload)
        if stored > whole:
            raise CodecError(f"payload of {stored} raw bytes for a chunk of {whole}")
        out = np.empty(whole, U8)
        codec.decode(payload, out=out[:stored])
        out[stored:] = 0
        return chunk_spec.prototype.buffer.from_array_like(out)

    async def _encode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._encode_sync, chunk_data, chunk_spec)

    async def _decode_single(self, chunk_data: Buffer, chunk_spec: ArraySpec) -> Buffer:
        return await asyncio.to_thread(self._decode_sync, chunk_data, chunk_spec)


@dataclass(frozen=True)
class XorDeltaCodec(_FastCheckCodec):
    """`XorDelta` for zarr: full payloads; a delta in a store is refused, as zarr has no base for it.

    Parameters
    ----------
    dtype : str, optional
        True dtype, where the array holds its bits as unsigned integers. By default that of the array.
    base : str, optional
        Name of the checkpoint against which the array is stored. An array that has one cannot be opened: what
        did not change is not there, and zarr would show fill values in its place.
    """

    name: ClassVar[str] = "fastcheck.xor_delta"
    dtype: str | None = None
    base: str | None = None

    def __post_init__(self) -> None:
        if self.base is not None:
            raise CodecError(
                f"this array is stored as a delta against the checkpoint {self.base}, which zarr cannot look "
                "up: load it with FastCheck, which finds the base by itself, or make the checkpoint whole "
                "with `fastcheck compact LOCATION TAG`"
            )

    def _codec(self, spec: ArraySpec) -> XorDelta:
        return XorDelta(dtype=self.dtype or _word_name(spec))


@dataclass(frozen=True)
class PrefixIndexCodec(_FastCheckCodec):
    """`PrefixIndex` for zarr.

    Parameters
    ----------
    prefix_bits : "auto" or int
        See `PrefixIndex`.
    dtype : str, optional
        True dtype, where the array holds its bits as unsigned integers. By default that of the array.
    """

    name: ClassVar[str] = "fastcheck.prefix_index"
    prefix_bits: str | int = "auto"
    dtype: str | None = None

    def __post_init__(self) -> None:
        PrefixIndex(self.prefix_bits)  # a wrong setting is refused here, not at the first chunk

    def _codec(self, spec: ArraySpec) -> PrefixIndex:
        return PrefixIndex(self.prefix_bits, dtype=self.dtype or _word_name(spec))
