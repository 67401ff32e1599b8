"""The zarr v3 documents of one checkpoint in the object tier, so that stock zarr reads it by name. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import numpy as np

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.ids import directory_name
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.dtypes import codec_dtype, itemsize_of, numpy_dtype, zarr_dtype
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest

FORMAT = "fastcheck-checkpoint"
FORMAT_VERSION = 1
#: Name of every zarr v3 metadata document; by itself, the key of the root group's.
DOCUMENT = "zarr.json"
#: Where what is FastCheck's own lies, beside the checkpoints: no zarr reader looks there.
PRIVATE = ".fastcheck"

#: An array whose bits lie in the manifest's tree: path, dtype, shape, bits in C order.
InlineArray = tuple[str, str, tuple[int, ...], bytes]


def manifest_path(directory: str) -> str:
    """Return where the manifest of a checkpoint lies, relative to the checkpoint directory."""
    return f"{PRIVATE}/manifests/{directory}.json"


def documents(
    manifest: Manifest, inline: Iterable[InlineArray], *, base: str | None = None
) -> dict[str, bytes]:
    """Return every ``zarr.json`` of a checkpoint.

    Parameters
    ----------
    manifest : Manifest
        Of the checkpoint.
    inline : iterable of (path, dtype, shape, bits)
        The arrays that live in the manifest's tree; they are shown as arrays like the others.
    base : str, optional
        Directory of the checkpoint against which this one is stored. Its chunked arrays then name a codec
        that says so and refuses: stock zarr would take a chunk that lies with the base for fill values.

    Returns
    -------
    dict of str to bytes
        Paths relative to the checkpoint's own directory, and the JSON to write there: one per array, one
        per group above an array, and last ``zarr.json``, the root group with all others inline
        (zarr-python's consolidated metadata; not with a base, so that the group itself can be opened). It has
        to be written last: before it nothing is readable.

    Raises
    ------
    LayoutError
        If two arrays have one path, or one array's path leads through another.
    """
    members = _members(manifest.arrays, inline, base)
    return _in_files(members) | {DOCUMENT: _json(_root(manifest, members, base))}


def documents_of(
    arrays: Iterable[ArraySpec], inline: Iterable[InlineArray], *, base: str | None = None
) -> dict[str, bytes]:
    """Return, of those in :func:`documents`, the ones of some arrays and of the groups above them.

    The root group's, which describes all arrays, is not among them.
    """
    return _in_files(_members(arrays, inline, base))


def _in_files(members: dict[str, dict[str, Any]]) -> dict[str, bytes]:
    return {f"{path}/{DOCUMENT}": _json(document) for path, document in members.items()}


def root_document(manifest: Manifest, inline: Iterable[InlineArray], *, base: str | None = None) -> bytes:
    """Return the root group's ``zarr.json`` alone, as in :func:`documents`."""
    return _json(_root(manifest, _members(manifest.arrays, inline, base), base))


def inline_chunks(inline: Iterable[InlineArray]) -> dict[str, bytes]:
    """Return the chunks of those inline arrays that a fill value cannot give exactly.

    Returns
    -------
    dict of str to bytes
        Chunk keys, and raw bits: these arrays have no compressing codec. An array without elements has no
        chunk; nor has one whose elements are all equal, unless no JSON number is exactly that element.
    """
    found = {}
    for path, dtype, shape, bits in inline:
        stored, stored_shape = zarr_dtype(dtype), stored_shape_of(dtype, shape)
        if bits and _fill_value(stored, bits) is None:
            found["/".join([path, "c", *("0" for _ in stored_shape)])] = bytes(bits)
    return found


def stored_shape_of(dtype: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape under which stock zarr sees an array.

    Elements as wide as no unsigned integer are stored as bytes along the last axis: that keeps the number of
    axes, and with it the chunk keys. ``array.view(dtype)`` undoes it.

    >>> stored_shape_of("<U5", (2, 3))
    (2, 60)
    >>> stored_shape_of("bfloat16", (2, 3))
    (2, 3)
    """
    times = itemsize_of(dtype) // itemsize_of(zarr_dtype(dtype))
    if times == 1:
        return shape
    return (*shape[:-1], shape[-1] * times) if shape else (times,)


def _members(
    specs: Iterable[ArraySpec], inline: Iterable[InlineArray], base: str | None
) -> dict[str, dict[str, Any]]:
    """Return the documents below the root by node path, groups included, sorted."""
    arrays: dict[str, dict[str, Any]] = {}
    for path, document in [
        *((spec.path, _chunked(spec, base)) for spec in specs),
        *((entry[0], _inline(entry)) for entry in inline),
    ]:
        if not path or path in arrays:
            raise LayoutError(f"two arrays have the path {path!r}")
        arrays[path] = document
    groups = {parent for path in arrays for parent in _parents(path)}
    if through := sorted(groups & arrays.keys()):
        raise LayoutError(f"{through[0]!r} is an array, and other arrays lie below it")
    return dict(sorted((arrays | {path: _group({}) for path in groups}).items()))


def _parents(path: str) -> list[str]:
    parts = path.split("/")
    return ["/".join(parts[:n]) for n in range(1, len(parts))]


def _root(manifest: Manifest, members: dict[str, dict[str, Any]], base: str | None) -> dict[str, Any]:
    directory = directory_name(manifest.generation, manifest.tag)
    described = {
        "format": FORMAT,
        "version": FORMAT_VERSION,
        "run": manifest.run,
        "generation": manifest.generation,
        "tag": manifest.tag,
        "token": manifest.token,
        "created_unix": manifest.created_unix,
        "manifest": {
            "file": manifest_path(directory),
            "sha256": digest_of_manifest(manifest.to_bytes()),
        },
    }
    if base is not None:
        return _group({"fastcheck": described | {"base": base}})
    consolidated = {"kind": "inline", "must_understand": False, "metadata": members}
    return _group({"fastcheck": described}) | {"consolidated_metadata": consolidated}


def _group(attributes: dict[str, Any]) -> dict[str, Any]:
    return {"zarr_format": 3, "node_type": "group", "attributes": attributes}


def _chunked(spec: ArraySpec, base: str | None) -> dict[str, Any]:
    """Describe an array whose chunks the codecs encoded."""
    stored = zarr_dtype(spec.dtype)
    zero: Any = False if stored == "bool" else 0
    if stored.startswith("float"):
        zero = 0.0
    elif stored.startswith("complex"):
        zero = [0.0, 0.0]
    codec = {"name": "fastcheck.prefix_index", "configuration": {"dtype": codec_dtype(spec.dtype)}}
    if base is not None:
        codec["name"] = "fastcheck.xor_delta"
        codec["configuration"] = {"dtype": codec_dtype(spec.dtype), "base": base}
    chunk_shape = stored_shape_of(spec.dtype, spec.chunk_shape)
    return _array(spec.dtype, spec.shape, chunk_shape=chunk_shape, fill_value=zero, codecs=[codec])


def _inline(entry: InlineArray) -> dict[str, Any]:
    """Describe an array that lives in the manifest's tree."""
    path, dtype, shape, bits = entry
    if len(bits) != math.prod(shape) * itemsize_of(dtype):
        raise LayoutError(f"{path}: {len(bits)} bytes for {dtype} of shape {shape}")
    stored = zarr_dtype(dtype)
    fill = _fill_value(stored, bits or bytes(itemsize_of(stored)))
    if fill is None:  # There is a chunk, so any valid value will do.
        fill = _fill_value(stored, bytes(itemsize_of(stored)))
    chunk_shape = tuple(max(1, n) for n in stored_shape_of(dtype, shape))
    return _array(dtype, shape, chunk_shape=chunk_shape, fill_value=fill, codecs=[])


def _array(
    dtype: str, shape: tuple[int, ...], *, chunk_shape: tuple[int, ...], fill_value: Any, codecs: list[Any]
) -> dict[str, Any]:
    stored = zarr_dtype(dtype)
    to_bytes: dict[str, Any] = {"name": "bytes"}
    if itemsize_of(stored) > 1:
        to_bytes["configuration"] = {"endian": "little"}
    return {
        "zarr_format": 3,
        "node_type": "array",
        "shape": list(stored_shape_of(dtype, shape)),
        "data_type": stored,
        "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": list(chunk_shape)}},
        "chunk_key_encoding": {"name": "default", "configuration": {"separator": "/"}},
        "fill_value": fill_value,
        "codecs": [to_bytes, *codecs],
        "attributes": {"fastcheck": _true_type(dtype, shape)},
    }


def _true_type(dtype: str, shape: tuple[int, ...]) -> dict[str, Any]:
    """Name the true dtype, and what a reader must know to get from the stored integers to it."""
    described: dict[str, Any] = {"dtype": dtype}
    if zarr_dtype(dtype) != dtype:
        described["stored_dtype"] = zarr_dtype(dtype)
        described["shape"] = list(shape)
        if dtype.startswith(">"):
            described["byte_order"] = "big"
    return described


def _fill_value(stored: str, bits: bytes) -> Any:
    """Return the JSON fill value that gives exactly `bits`, an element or several; None if there is none."""
    dtype = numpy_dtype(stored).newbyteorder("<")
    element = bits[: dtype.itemsize]
    if bits != element * (len(bits) // dtype.itemsize):
        return None
    scalar = np.frombuffer(element, dtype)[0]
    value: Any
    again: Any  # What a reader makes of the JSON: a NaN, even as "0x...", loses its payload on the way.
    if dtype.kind == "f":
        value = _json_float(float(scalar))
        again = float(value)
    elif dtype.kind == "c":
        value = [_json_float(float(scalar.real)), _json_float(float(scalar.imag))]
        again = complex(float(value[0]), float(value[1]))
    else:
        value = again = bool(scalar) if dtype.kind == "b" else int(scalar)
    return value if np.array(again, dtype).tobytes() == element else None


def _json_float(value: float) -> float | str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value


def _json(document: dict[str, Any]) -> bytes:
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
