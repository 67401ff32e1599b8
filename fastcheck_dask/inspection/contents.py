"""What a manifest says of the arrays and the plain values of a checkpoint. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout import values
from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.layout.tree import inline_bits, is_array, shape_of, walk

#: Names under which training loops keep the number of their step.
_STEPS = ("step", "global_step", "iteration", "epoch")


@dataclass(frozen=True)
class ArrayEntry:
    """One array leaf of a state."""

    #: Where it stands in the state.
    path: str
    #: What is stored.
    spec: ArraySpec
    #: Its whole shape, if it is a view that repeats the elements of what is stored.
    shape: tuple[int, ...]
    #: Of an array that lies in the manifest.
    bits: bytes | None = None
    #: The path under which it is stored, if that is another one.
    shared_with: str | None = None

    @property
    def expanded(self) -> bool:
        """Whether it repeats its elements."""
        return self.shape != self.spec.shape

    @property
    def nbytes(self) -> int:
        """Bytes of its elements, repeated ones included."""
        return math.prod(self.shape) * self.spec.itemsize

    def codec(self, stored_nbytes: int, *, is_whole: bool = True) -> str:
        """Say how it is stored, by the bytes that it takes: what was not compressed is not smaller."""
        if self.shared_with is not None:
            return "shared"
        if self.bits is not None or not self.spec.nbytes:
            return "inline"
        if not is_whole:
            return "delta"
        return "raw" if stored_nbytes >= self.spec.nbytes else "prefix_index"


def entries(manifest: Manifest) -> Iterator[ArrayEntry]:
    """Yield the arrays of a checkpoint, in the order of the state.

    Raises
    ------
    CorruptDataError
        If the tree is damaged, or names an array that is not there.
    """
    specs = {spec.path: spec for spec in manifest.arrays}
    for path, node in walk(manifest.tree):
        if not is_array(node):
            continue
        if "bits" in node:
            spec, bits = inline_bits(node, path)
        elif (found := specs.get(node["path"])) is not None:
            spec, bits = found, None
        else:
            raise CorruptDataError(f"tree at {path!r}: there is no array {str(node['path'])[:80]!r}")
        shape = shape_of(node["expand"], path) if "expand" in node else spec.shape
        yield ArrayEntry(path, spec, shape, bits, None if spec.path == path else spec.path)


def plain_values(manifest: Manifest) -> dict[str, Any]:
    """Return all that is no array by its path; empty containers are empty.

    Raises
    ------
    CorruptDataError
        If a value is damaged.
    """
    return {path: _value(node) for path, node in walk(manifest.tree) if not is_array(node)}


def _value(node: Any) -> Any:
    if type(node) is list:
        return []
    if type(node) is dict and not values.is_value(node["t"]):
        return () if node["t"] == "tuple" else [] if node["t"] == "deque" else {}
    return values.decode(node)


def step_of(manifest: Manifest) -> int | None:
    """Return the step that a state says it is of, if it has one under a usual name at its top."""
    tree = manifest.tree
    if type(tree) is not dict or tree.get("t") not in ("dict", "OrderedDict"):
        return None
    pairs = {key: value for key, value in zip(tree["k"], tree["v"], strict=True) if isinstance(key, str)}
    found = (pairs[name] for name in _STEPS if type(pairs.get(name)) is int)
    return next(found, None)
