"""A state taken apart as a checkpoint keeps it, and put together again, in memory."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt

from fastcheck_dask.layout.chunks import ArraySpec
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import flatten, unflatten

#: The tree as JSON text, the specs, the bits by path.
Parts = tuple[str, tuple[ArraySpec, ...], dict[str, npt.NDArray[np.uint8]]]


def take_apart(state: Any, **options: Any) -> Parts:
    """Return what a checkpoint keeps; `options` are those of `flatten`."""
    flat = flatten(state, **options)
    held = {}
    for spec, source in zip(flat.arrays, flat.sources, strict=True):
        held[spec.path] = np.full(spec.nbytes, 0xA5, np.uint8)
        copy_bits(source, held[spec.path])
    return json.dumps(flat.tree, sort_keys=True, allow_nan=False), flat.arrays, held


def put_together(parts: Parts) -> Any:
    """Return the state of what `take_apart` returned, in memory of its own."""
    text, arrays, held = parts
    return unflatten(json.loads(text), lambda spec: held[spec.path].copy(), arrays=arrays)


def passed(state: Any, **options: Any) -> Any:
    """Return a state as it comes back."""
    return put_together(take_apart(state, **options))
