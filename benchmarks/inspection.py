"""How long do listing, inspecting and verifying take, against one plain read of the same files?

Two checkpoints, in memory-backed files: as many small tensors as a ResNet-152 with momentum has, and 5,000
tensors as of a GPT with both Adam moments. Reading every byte of the files stands beside.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.machine import console, describe, spread, table
from fastcheck_dask.inspection import Checkpoint
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.checkpoints import write_checkpoint

ROUNDS = 5


def _tensors(count: int, elements: int, parts: tuple[str, ...]) -> dict[str, Any]:
    """Return tensors whose sizes are spread as in networks: many small ones, few large ones."""
    rng = np.random.default_rng(0)
    sizes = np.maximum(64, (elements * np.linspace(0.1, 2.0, count) ** 3).astype(int))
    return {
        part: {
            f"layers.{n}.weight": rng.normal(0, 0.02, size).astype(np.float32) for n, size in enumerate(sizes)
        }
        for part in parts
    }


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    "ResNet-152: weights, momenta": lambda: _tensors(932, 12_000, ("model", "momentum_buffer")),
    "GPT: 5,000 tensors": lambda: _tensors(1667, 4_000, ("model", "exp_avg", "exp_avg_sq")),
}


def _median_of(action: Callable[[], object]) -> list[float]:
    seconds = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return seconds


def measure(name: str, folder: Path) -> list[str]:
    """Return one row of the table."""
    write_checkpoint(str(folder), CASES[name](), "t", generation=1, chunk_bytes=8 * 2**20)
    opened, _ = open_folder(str(folder))
    (marker,) = opened.committed()

    def read_all() -> None:
        for path in folder.rglob("*"):
            if path.is_file():
                path.read_bytes()

    def inspect() -> None:
        checkpoint = Checkpoint(opened, opened.load_manifest(marker))
        assert sum(array.stored_nbytes for array in checkpoint.values()) > 0

    plain, listed, inspected, verified = map(
        _median_of, (read_all, lambda: overview(opened), inspect, lambda: verify(opened, marker))
    )
    ratio = sorted(verified)[ROUNDS // 2] / sorted(plain)[ROUNDS // 2]
    checkpoint = Checkpoint(opened, opened.load_manifest(marker))
    return [
        f"{name}, {checkpoint.nbytes / 1e6:.0f} MB, {len(checkpoint)} tensors",
        *(spread(seconds, "ms", 1e3) for seconds in (plain, listed, inspected, verified)),
        f"{ratio:.1f}",
    ]


def main() -> None:
    """Print the table."""
    console.print(describe())
    with tempfile.TemporaryDirectory(dir="/dev/shm") as name:
        rows = [measure(case, Path(name) / str(number)) for number, case in enumerate(CASES)]
    table(
        "Inspection (ls, inspect, verify; verify against reading the files)",
        ["checkpoint", "read files", "ls", "inspect", "verify", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
