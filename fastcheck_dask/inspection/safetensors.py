"""The safetensors format: a JSON header, then the tensors. Pure but for the file that is read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError
from fastcheck_dask.layout.chunks import MAX_DIMENSIONS
from fastcheck_dask.layout.dtypes import itemsize_of
from fastcheck_dask.layout.manifest import parse_json

#: Bytes of a header; the limit of the format's own library.
HEADER_LIMIT_BYTES = 100_000_000
METADATA = "__metadata__"
_LENGTH = struct.Struct("<Q")
_ALIGNMENT = 8

_CODES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "uint16": "U16",
    "int16": "I16",
    "uint32": "U32",
    "int32": "I32",
    "uint64": "U64",
    "int64": "I64",
    "float16": "F16",
    "bfloat16": "BF16",
    "float32": "F32",
    "float64": "F64",
    "complex64": "C64",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e8m0fnu": "F8_E8M0",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True)
class Tensor:
    """One tensor of a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * itemsize_of(self.dtype)


@dataclass(frozen=True)
class Contents:
    """What a header says."""

    #: In the order of the file, each with its first byte in the file.
    tensors: tuple[tuple[Tensor, int], ...]
    metadata: Mapping[str, str]


def header(tensors: Iterable[Tensor], metadata: Mapping[str, str]) -> bytes:
    """Return everything that stands before the bytes of the tensors, which follow without gaps, in order.

    Raises
    ------
    LayoutError
        If a dtype is none that the format has, a name stands twice, or the header gets too large.
    """
    document: dict[str, Any] = {METADATA: dict(metadata)} if metadata else {}
    end = 0
    for tensor in tensors:
        if tensor.dtype not in _CODES:
            raise LayoutError(
                f"{tensor.name}: safetensors has no dtype for {tensor.dtype}; export to a .pt file, or "
                "choose other tensors with --include"
            )
        if tensor.name in document:
            raise LayoutError(f"two tensors would be named {tensor.name!r}")
        span = [end, end + tensor.nbytes]
        document[tensor.name] = {
            "dtype": _CODES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": span,
        }
        end = span[1]
    data = json.dumps(document, separators=(",", ":"), ensure_ascii=False).encode()
    data += b" " * (-len(data) % _ALIGNMENT)
    if len(data) > HEADER_LIMIT_BYTES:
        raise LayoutError(f"a header of {len(data):,} bytes; safetensors has at most {HEADER_LIMIT_BYTES:,}")
    return _LENGTH.pack(len(data)) + data


def read_header(file: BinaryIO, size: int, *, where: str) -> Contents:
    """Read and check the header of a file; nothing is believed before it fits the size of the file.

    Parameters
    ----------
    file : binary file
        At its start.
    size : int
        Bytes of the file.
    where : str
        For the messages of errors.

    Raises
    ------
    UnknownFormatError
        If it is no safetensors file, or has a dtype that is not known.
    CorruptDataError
        If a name stands twice, or the tensors do not fill the file without gaps.
    """
    start = file.read(_LENGTH.size)
    length = _LENGTH.unpack(start)[0] if len(start) == _LENGTH.size else -1
    if not 2 <= length <= min(HEADER_LIMIT_BYTES, size - _LENGTH.size):
        raise UnknownFormatError(
            f"{where}: no safetensors file: a header of {length:,} bytes in a file of {size:,} "
            f"(at most {HEADER_LIMIT_BYTES:,} are read)"
        )
    document = parse_json(file.read(length), where)
    if not isinstance(document, dict):
        raise UnknownFormatError(f"{where}: no safetensors file: its header is no JSON object")
    metadata = document.pop(METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(text, str) for text in metadata.values()):
        raise CorruptDataError(f"{where}: {METADATA} is not text by names")
    base = _LENGTH.size + length
    spans = [_tensor(name, entry, where) for name, entry in document.items()]
    end = 0
    tensors = []
    for first, last, tensor in sorted(spans, key=lambda span: span[:2]):
        if first != end or last - first != tensor.nbytes:
            raise CorruptDataError(
                f"{where}: {tensor.name} has bytes {first:,} to {last:,}, "
                f"wanted {tensor.nbytes:,} from {end:,}"
            )
        tensors.append((tensor, base + first))
        end = last
    if base + end != size:
        raise CorruptDataError(f"{where}: {size:,} bytes, its header adds up to {base + end:,}")
    return Contents(tuple(tensors), metadata)


def _tensor(name: str, entry: Any, where: str) -> tuple[int, int, Tensor]:
    try:
        shape, (first, last) = entry["shape"], entry["data_offsets"]
        whole = all(type(n) is int and 0 <= n < 2**62 for n in (*shape, first, last))
        if entry.keys() != {"dtype", "shape", "data_offsets"} or not whole or len(shape) > MAX_DIMENSIONS:
            raise ValueError("a field is not what it should be")
        code = entry["dtype"]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CorruptDataError(f"{where}: the entry of {name[:80]!r} is damaged ({error})") from error
    if not isinstance(code, str) or code not in _DTYPES:
        raise UnknownFormatError(
            f"{where}: {name[:80]!r} has the dtype {str(code)[:40]!r}, which is not known"
        )
    return first, last, Tensor(name, _DTYPES[code], tuple(shape))
