"""The document beside a snapshot: how the trainer tells the agent what lies in a slot. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fastcheck_dask.engine.plan import Content
from fastcheck_dask.engine.save import Base, Snapshot
from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout.chunks import ArraySpec, place
from fastcheck_dask.layout.manifest import Manifest, parse_json
from fastcheck_dask.layout.notes import metrics_from_json, metrics_to_json


def describe(
    *,
    token: str,
    tag: str,
    created_unix: float,
    tree: Any,
    arrays: tuple[ArraySpec, ...],
    metrics: Mapping[str, float] | None = None,
) -> bytes:
    """Return the document of a snapshot."""
    document = {
        "token": token,
        "tag": tag,
        "created_unix": created_unix,
        "tree": tree,
        "arrays": [[a.path, a.dtype, a.shape, a.chunk_shape] for a in arrays],
        "metrics": metrics_to_json(metrics or {}),
    }
    return json.dumps(document, separators=(",", ":"), allow_nan=False).encode()


def parse(slot: Path, document: bytes) -> Snapshot:
    """Undo :func:`describe`; the arrays lie in the slot in their order, as `place` puts them."""
    found = parse_json(document, str(slot))
    try:
        arrays = tuple(ArraySpec(p, d, tuple(s), tuple(c)) for p, d, s, c in found["arrays"])
        return Snapshot(
            slot=slot,
            token=found["token"],
            tag=found["tag"],
            created_unix=found["created_unix"],
            tree=found["tree"],
            content=Content(arrays, place(arrays), None),
            raw_bytes=sum(a.nbytes for a in arrays),
            metrics=metrics_from_json(found.get("metrics", {})),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise CorruptDataError(f"{slot}: the document of the snapshot is damaged: {error}") from error


def as_base(slot: Path, manifest: Manifest) -> Base:
    """Return the committed checkpoint that lies in a slot as a delta base."""
    return Base(slot, manifest, Content(manifest.arrays, place(manifest.arrays), manifest.layout))
