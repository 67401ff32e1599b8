"""What would fewer objects save for checkpoints of many small tensors, in a folder and in S3?

A chunk and a document for each tensor, as they are written, beside the objects that there were with zarr's
sharding codec, and the least that any grouping needs: one object with the same encoded bytes. Checkpoints are
those of `benchmarks.inspection`; saves and loads are those of a manager without storage nodes.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.inspection import CASES
from benchmarks.machine import console, describe, spread, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.inspection import Checkpoint
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.testing.s3 import S3Server
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

ROUNDS = 3


def _seconds(action: Callable[[], object]) -> float:
    started = time.perf_counter()
    action()
    return time.perf_counter() - started


def measure(name: str, state: dict[str, Any], location: str, shm: Path) -> list[list[str]]:
    """Return the rows of one checkpoint in one kind of store: as it is, and grouped."""
    saves, loads, fast, listed, inspected = [], [], [], [], []
    options: dict[str, Any] = {"local_dir": shm, "encoders": 1, "keep_last": 1}
    for number in range(ROUNDS):
        with FastCheckManager(location, **options) as manager:
            saves.append(_seconds(lambda n=number: manager.save_async(state, f"t{n}").wait("object")))  # type: ignore[misc]
        for taken, check in ((loads, True), (fast, False)):
            # An empty local tier, so that all comes from the object tier.
            elsewhere = options | {"local_dir": shm / f"load{number}{check}", "check_documents": check}
            with FastCheckManager(location, **elsewhere) as manager:
                taken.append(_seconds(manager.load))
                assert manager.last_load is not None
                assert manager.last_load.source == "object"
        folder, _ = open_folder(location)
        listed.append(_seconds(lambda f=folder: overview(f)))  # type: ignore[misc]
        inspected.append(_seconds(lambda f=folder: _inspect(f)))  # type: ignore[misc]
    folder, _ = open_folder(location)
    manifest = folder.load_manifest(folder.committed()[-1])
    objects = len(folder.store.list(folder.committed()[-1].directory))
    chunks_of = Counter(chunk.path for chunk in manifest.chunks.values())
    by_sharding = objects - sum(count - 1 for count in chunks_of.values())
    encoded = sum(s.nbytes for s in folder.store.listing("") if "/c/" in s.path)
    writes, reads = _grouped(location, encoded)
    as_is = [spread(values, "s") for values in (saves, loads, fast, listed, inspected)]
    return [
        [name, f"{objects:,}", f"{by_sharding:,}", *as_is],
        [
            f"{name}, the same bytes in one object",
            "2",
            "",
            spread(writes, "s"),
            "",
            spread(reads, "s"),
            "",
            "",
        ],
    ]


def _inspect(folder: CheckpointFolder) -> None:
    marker = folder.committed()[-1]
    checkpoint = Checkpoint(folder, folder.load_manifest(marker), marker)
    assert sum(array.stored_nbytes for array in checkpoint.values()) > 0


def _grouped(location: str, nbytes: int) -> tuple[list[float], list[float]]:
    store = open_store(location)
    data = os.urandom(nbytes)
    writes, reads = [], []
    for number in range(ROUNDS):
        path = f"grouped/{number}"
        writes.append(_seconds(lambda p=path: (store.write(p, data), store.sync("grouped"))))  # type: ignore[misc]
        reads.append(_seconds(lambda p=path: store.read(p)))  # type: ignore[misc]
    store.delete_tree("grouped")
    return writes, reads


def main() -> None:
    """Print the table."""
    console.print(describe())
    rows = []
    with tempfile.TemporaryDirectory() as name, S3Server(Path(name) / "s3") as server:
        os.environ.update(server.environment)
        for number, (case, made) in enumerate(CASES.items()):
            state = made()
            folder = Path(name)
            for kind, location in (("folder", str(folder / f"c{number}")), ("S3", server.url(f"c{number}"))):
                rows += measure(f"{case}; {kind}", state, location, folder / f"shm{kind}{number}")
                # It takes minutes.
                console.print(*rows[-2:], sep="\n")
    table(
        "Many small tensors",
        ["checkpoint", "objects", "with sharding", "save", "load", "load, unchecked", "ls", "inspect"],
        rows,
    )
    console.print(describe())


if __name__ == "__main__":
    main()
