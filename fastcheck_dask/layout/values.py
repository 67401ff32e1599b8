"""Plain values and their typed JSON: exact, and restored without running code.

None, truth values, text, finite floats and whole numbers of at most 53 bits stand for themselves; every other
value is a node ``{"t": kind, "v": payload}``.
"""

from __future__ import annotations

import base64
import binascii
import collections
import dataclasses
import datetime
import enum
import functools
import json
import math
import pathlib
import re
import struct
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from fastcheck_dask.errors import (
    CorruptDataError,
    FastCheckError,
    LayoutError,
    UnknownFormatError,
    UnsupportedLeafError,
)
from fastcheck_dask.layout import leaves
from fastcheck_dask.layout.dtypes import numpy_dtype

#: Containers deeper than this are refused: readers follow them by recursion.
MAX_DEPTH = 200
#: The same for tuples and frozensets inside dict keys and sets.
MAX_KEY_DEPTH = 20

Encoder = Callable[[Any, str], Any]
_SURROGATE = re.compile("[\ud800-\udfff]")
_HEX_INT = re.compile(r"-?[0-9a-f]+\Z")


def node(kind: str, payload: Any) -> dict[str, Any]:
    """Return the node of a value."""
    return {"t": kind, "v": payload}


def to_base64(data: bytes | bytearray | memoryview) -> str:
    """Return bytes as text."""
    return base64.b64encode(data).decode("ascii")


def from_base64(text: object) -> bytes:
    """Undo `to_base64`; `ValueError` or `TypeError` if it is not that."""
    if not isinstance(text, str):
        raise TypeError(f"bytes are written as text, not as {type(text).__name__}")
    return base64.b64decode(text, validate=True)


def _as_is(value: Any, _path: str) -> Any:
    return value


def _encode_int(value: int, _path: str) -> Any:
    # Larger ones are exact in Python alone, and it refuses decimals of more than 4300 digits.
    return value if -(2**53) < value < 2**53 else node("int", f"{value:x}")


def _encode_float(value: float, _path: str) -> Any:
    return value if math.isfinite(value) else node("float", struct.pack(">d", value).hex())


def _encode_str(value: str, _path: str) -> Any:
    # JSON would join two lone surrogates into one character.
    if value.isascii() or not _SURROGATE.search(value):
        return value
    return node("str", value.encode("utf-8", "surrogatepass").hex())


def _encode_timezone(zone: datetime.tzinfo | None, path: str) -> Any:
    if zone is None:
        return None
    if type(zone) is not datetime.timezone:
        raise UnsupportedLeafError(
            path,
            f"a time in the zone {zone!r}",
            "the rules of a zone cannot be stored: convert it with .astimezone(datetime.timezone.utc)",
        )
    offset, *name = zone.__getinitargs__()  # type: ignore[attr-defined]
    return [_duration(offset), *(_encode_str(text, path) for text in name)]


def _duration(value: datetime.timedelta) -> list[int]:
    return [value.days, value.seconds, value.microseconds]


def _encode_time(value: datetime.time, path: str) -> Any:
    fields = [value.hour, value.minute, value.second, value.microsecond, value.fold]
    return node("time", [*fields, _encode_timezone(value.tzinfo, path)])


def _encode_datetime(value: datetime.datetime, path: str) -> Any:
    fields = [value.year, value.month, value.day, value.hour, value.minute, value.second]
    return node("datetime", [*fields, value.microsecond, value.fold, _encode_timezone(value.tzinfo, path)])


def _encode_scalar(value: np.generic, path: str) -> Any:
    name = leaves.numpy_name(value.dtype)
    if name is None or numpy_dtype(name).type is not type(value):
        raise refusal(value, path)
    return node("numpy", [name, value.tobytes().hex()])


def _encode_slice(value: slice, path: str) -> Any:
    return node("slice", [encode_hashable(part, path) for part in (value.start, value.stop, value.step)])


def _encode_range(value: range, path: str) -> Any:
    return node("range", [_encode_int(part, path) for part in (value.start, value.stop, value.step)])


_PATHS = {
    kind.__name__: kind
    for kind in (pathlib.PurePosixPath, pathlib.PureWindowsPath, pathlib.PosixPath, pathlib.WindowsPath)
}
_SCALARS = (
    *(np.bool_, np.int8, np.uint8, np.int16, np.uint16, np.int32, np.uint32, np.int64, np.uint64),
    *(np.float16, np.float32, np.float64, np.longdouble, np.complex64, np.complex128, np.clongdouble),
    *(np.datetime64, np.timedelta64),
)

_ENCODERS: dict[type, Encoder] = {
    type(None): _as_is,
    bool: _as_is,
    int: _encode_int,
    float: _encode_float,
    str: _encode_str,
    complex: lambda value, _: node("complex", struct.pack(">dd", value.real, value.imag).hex()),
    bytes: lambda value, _: node("bytes", to_base64(value)),
    bytearray: lambda value, _: node("bytearray", to_base64(value)),
    type(...): lambda _value, _path: node("ellipsis", None),
    range: _encode_range,
    slice: _encode_slice,
    datetime.datetime: _encode_datetime,
    datetime.date: lambda value, _: node("date", [value.year, value.month, value.day]),
    datetime.time: _encode_time,
    datetime.timedelta: lambda value, _: node("timedelta", _duration(value)),
    uuid.UUID: lambda value, _: node("uuid", value.hex),
    # str(value) would drop NUL characters at the end.
    np.str_: lambda value, path: node("numpy.str", _encode_str(str.__str__(value), path)),
    np.bytes_: lambda value, _: node("numpy.bytes", to_base64(bytes(value))),
    **dict.fromkeys(_SCALARS, _encode_scalar),
    **{
        kind: functools.partial(
            lambda name, value, path: node("path", [name, _encode_str(str(value), path)]), name
        )
        for name, kind in _PATHS.items()
    },
}


def _encode_set(value: set[Any] | frozenset[Any], path: str, depth: int = 0) -> Any:
    kind = "set" if type(value) is set else "frozenset"
    elements = [encode_hashable(element, path, depth + 1) for element in value]
    return node(kind, sorted(elements, key=lambda element: json.dumps(element, sort_keys=True)))


_ENCODERS[set] = _ENCODERS[frozenset] = _encode_set


@functools.lru_cache(maxsize=4)
def encoders(torch: Any) -> Mapping[type, Encoder]:
    """Return the encoder of each plain type, those of torch included if it is loaded."""
    if torch is None:
        return _ENCODERS
    return _ENCODERS | {
        torch.Size: lambda value, _: node("torch.Size", list(value)),
        torch.dtype: lambda value, _: node("torch.dtype", str(value).removeprefix("torch.")),
        torch.device: lambda value, _: node("torch.device", str(value)),
    }


def encode_hashable(value: Any, path: str, depth: int = 0) -> Any:
    """Encode a dict key or an element of a set; tuples of such are such.

    Raises
    ------
    UnsupportedLeafError
        If it could not come back.
    """
    if depth > MAX_KEY_DEPTH:
        raise UnsupportedLeafError(path, f"a key or set nested deeper than {MAX_KEY_DEPTH}", "flatten it")
    if type(value) is tuple:
        return node("tuple", [encode_hashable(element, path, depth + 1) for element in value])
    if type(value) is frozenset:
        return _encode_set(value, path, depth)
    encoder = encoders(leaves.loaded_torch()).get(type(value))
    if encoder is None or type(value).__hash__ is None:
        raise refusal(value, path)
    return encoder(value, path)


def refusal(value: object, path: str) -> UnsupportedLeafError:
    """Return the error for a value of a type that is not stored, with advice."""
    kind = type(value)
    got = f"a {kind.__module__}.{kind.__qualname__}"
    for applies, advice in (
        (isinstance(value, enum.Enum), "save its .value"),
        (isinstance(value, tuple) and hasattr(value, "_fields"), "save tuple(x) or x._asdict()"),
        (dataclasses.is_dataclass(value), "save dataclasses.asdict(x)"),
        (hasattr(value, "state_dict"), "save its state_dict()"),
        (
            isinstance(value, collections.defaultdict),
            "its default factory must be a builtin type; save dict(x)",
        ),
        (isinstance(value, Mapping), "save dict(x)"),
        (isinstance(value, np.random.Generator), "save x.bit_generator.state"),
        (isinstance(value, np.random.RandomState), "save x.get_state()"),
        (isinstance(value, np.generic), "save x.item(), or an array"),
        (callable(value), "functions and classes cannot come back without running code; save a name instead"),
    ):
        if applies:
            return UnsupportedLeafError(path, got, advice)
    return UnsupportedLeafError(
        path, got, "only plain Python values, numpy arrays and torch tensors are stored; convert it first"
    )


# From here on the input comes from storage and may be anything.


def _decode_int(payload: Any) -> int:
    if not _HEX_INT.match(payload):
        raise ValueError("not a hexadecimal number")
    return int(payload, 16)


def _whole(payload: Any) -> int:
    value = decode(payload)
    if type(value) is not int:
        raise TypeError("not a whole number")
    return value


def _wholes(payload: Any) -> list[int]:
    if not isinstance(payload, list):
        raise TypeError("not a list of whole numbers")
    return [_whole(part) for part in payload]


def _text(payload: Any) -> str:
    value = decode(payload)
    if type(value) is not str:
        raise TypeError("not text")
    return value


def _decode_complex(payload: Any) -> complex:
    real, imag = struct.unpack(">dd", bytes.fromhex(payload))
    return complex(real, imag)


def _decode_zone(payload: Any) -> datetime.timezone | None:
    if payload is None:
        return None
    offset, *name = payload
    return datetime.timezone(datetime.timedelta(*_wholes(offset)), *map(_text, name))


def _decode_time(payload: Any) -> datetime.time:
    *fields, fold, zone = payload
    hour, minute, second, microsecond, fold = _wholes([*fields, fold])
    return datetime.time(hour, minute, second, microsecond, _decode_zone(zone), fold=fold)


def _decode_datetime(payload: Any) -> datetime.datetime:
    *fields, zone = payload
    year, month, day, hour, minute, second, microsecond, fold = _wholes(fields)
    return datetime.datetime(
        year, month, day, hour, minute, second, microsecond, _decode_zone(zone), fold=fold
    )


def _decode_scalar(payload: Any) -> Any:
    name, bits = payload
    dtype = numpy_dtype(name)
    data = bytes.fromhex(bits)
    if dtype.kind not in "biufcmM" or len(data) != dtype.itemsize:
        raise ValueError(f"not a scalar of {name}")
    return np.frombuffer(data, dtype)[0]


def _decode_path(payload: Any) -> pathlib.PurePath:
    name, text = payload
    kind = _PATHS[name]
    try:
        return kind(_text(text))
    except NotImplementedError:
        # A path of the other system can be held here, but not opened.
        return _PATHS["PureWindowsPath" if name == "WindowsPath" else "PurePosixPath"](_text(text))


def _decode_elements(payload: Any) -> frozenset[Any]:
    found = frozenset(decode_hashable(element) for element in payload)
    if len(found) != len(payload):
        raise ValueError("an element stands twice in a set")
    return found


def _decode_range(payload: Any) -> range:
    start, stop, step = _wholes(payload)
    return range(start, stop, step)


def _decode_slice(payload: Any) -> slice:
    start, stop, step = map(decode_hashable, payload)
    return slice(start, stop, step)


def _decode_ellipsis(payload: Any) -> Any:
    if payload is not None:
        raise ValueError("an ellipsis carries nothing")
    return ...


_DECODERS: dict[str, Callable[[Any], Any]] = {
    "int": _decode_int,
    "float": lambda payload: struct.unpack(">d", bytes.fromhex(payload))[0],
    "str": lambda payload: bytes.fromhex(payload).decode("utf-8", "surrogatepass"),
    "complex": _decode_complex,
    "bytes": from_base64,
    "bytearray": lambda payload: bytearray(from_base64(payload)),
    "ellipsis": _decode_ellipsis,
    "range": _decode_range,
    "slice": _decode_slice,
    "datetime": _decode_datetime,
    "date": lambda payload: datetime.date(*_wholes(payload)),
    "time": _decode_time,
    "timedelta": lambda payload: datetime.timedelta(*_wholes(payload)),
    "uuid": lambda payload: uuid.UUID(hex=payload),
    "numpy": _decode_scalar,
    "numpy.str": lambda payload: np.str_(_text(payload)),
    "numpy.bytes": lambda payload: np.bytes_(from_base64(payload)),
    "path": _decode_path,
    "set": lambda payload: set(_decode_elements(payload)),
    "frozenset": _decode_elements,
    "torch.Size": lambda payload: leaves.require_torch().Size(_wholes(payload)),
    "torch.dtype": lambda payload: leaves.torch_dtype(payload),
    "torch.device": lambda payload: leaves.require_torch().device(_text(payload)),
}


def is_value(kind: object) -> bool:
    """Say whether `kind` names the node of a plain value."""
    return isinstance(kind, str) and kind in _DECODERS


def decode(value: Any) -> Any:
    """Return the plain value of one piece of a tree.

    Raises
    ------
    UnknownFormatError
        If the node is of a kind, or has a field, that this version does not know.
    CorruptDataError
        If the payload does not fit the kind.
    ConfigError
        If it needs torch, which cannot be imported.
    """
    kind = type(value)
    if value is None or kind is bool or kind is str or kind is int:
        return value
    if kind is float:
        if not math.isfinite(value):
            raise CorruptDataError("a JSON number is too large")
        return value
    if kind is not dict or not is_value(value.get("t")):
        raise UnknownFormatError(f"unknown node {str(value)[:80]}; a newer FastCheck may have written it")
    if value.keys() != {"t", "v"}:
        raise UnknownFormatError(
            f"a node of kind {value['t']!r} has the fields {sorted(map(str, value))[:8]}"
        )
    try:
        return _DECODERS[value["t"]](value["v"])
    except LayoutError as error:
        raise UnknownFormatError(str(error)) from error
    except FastCheckError:
        raise
    except (
        *(ValueError, TypeError, KeyError, AttributeError, RuntimeError, OverflowError),
        *(struct.error, binascii.Error, MemoryError),
    ) as error:
        raise CorruptDataError(f"a node of kind {value['t']!r} is damaged ({error})") from error


def decode_hashable(value: Any, depth: int = 0) -> Any:
    """Undo `encode_hashable`; errors as `decode`."""
    if isinstance(value, dict) and value.get("t") == "tuple":
        if value.keys() != {"t", "v"} or not isinstance(value["v"], list) or depth > MAX_KEY_DEPTH:
            raise CorruptDataError("a tuple in a key or a set is damaged")
        return tuple(decode_hashable(element, depth + 1) for element in value["v"])
    found = decode(value)
    try:
        hash(found)
    except TypeError as error:
        raise CorruptDataError(f"a key or an element of a set is a {type(found).__name__}") from error
    return found
