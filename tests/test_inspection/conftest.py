"""Locations with a few checkpoints, in a folder and in S3."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask.layout.manifest import Manifest
from fastcheck_dask.testing.checkpoints import write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> str:
    """Return a location in a folder."""
    return str(tmp_path / "ckpts")


@pytest.fixture(params=["folder", "s3"])
def location(request: pytest.FixtureRequest, folder: str) -> str:
    """Return a location of each kind."""
    return folder if request.param == "folder" else str(request.getfixturevalue("s3_location"))


def small_state(step: int = 1, seed: int = 0) -> dict[str, Any]:
    """Return a state with every kind of array: chunked, inline, empty, and with plain values beside them."""
    rng = np.random.default_rng([seed, step])
    return {
        "step": step,
        "model": {
            "w": rng.normal(size=(40, 100)).astype(np.float32),
            "b": rng.normal(size=3000),
            "ids": np.arange(2000, dtype=np.int64) * step,
            "scale": np.float32([1.5, float(step)]),
            "none": np.empty((0, 3), np.float32),
        },
        "lr": 1e-3,
        "name": "small",
    }


class Checkpoints:
    """Functions for tests: they cannot import a conftest."""

    state = staticmethod(small_state)

    @staticmethod
    def same(left: Any, right: Any) -> bool:
        """Say whether two states of this kind have the same bits."""
        if isinstance(left, dict):
            return left.keys() == right.keys() and all(Checkpoints.same(left[k], right[k]) for k in left)
        if isinstance(left, np.ndarray):
            return (left.dtype, left.shape, left.tobytes()) == (right.dtype, right.shape, right.tobytes())
        return bool(type(left) is type(right) and left == right)

    @staticmethod
    def save(location: str, tag: str = "t1", *, generation: int = 1, **options: Any) -> Manifest:
        """Write the small state of a generation."""
        state = options.pop("state", None)
        if state is None:
            state = small_state(generation)
        return write_checkpoint(location, state, tag, generation=generation, **options)


@pytest.fixture(scope="session")
def checkpoints() -> type[Checkpoints]:
    return Checkpoints


Saves = Callable[..., Manifest]
