"""Checkpoints for commands, and what commands print."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner, Result

from fastcheck_dask import cli
from fastcheck_dask.testing.checkpoints import write_checkpoint


def state(step: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    weights = rng.normal(size=3000).astype(np.float32)
    return {"step": step, "model": {"w": weights * step, "frozen": weights + 1}, "name": "x"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Return a location with three checkpoints, whose text order is not theirs."""
    location = tmp_path / "ckpts"
    for generation, step in enumerate((500, 2500, 10000), 1):
        write_checkpoint(str(location), state(step), f"step_{step}", generation=generation)
    return location


@pytest.fixture
def run() -> Callable[..., Result]:
    """Return a function that runs a command."""

    def ran(*arguments: object, status: int = 0) -> Result:
        result = CliRunner().invoke(cli.main, [str(a) for a in arguments], catch_exceptions=False)
        assert result.exit_code == status, result.output
        return result

    return ran


@pytest.fixture
def answer(run: Callable[..., Result]) -> Callable[..., Any]:
    """Return a function that runs a command with ``--json``."""

    def told(*arguments: object, status: int = 0) -> Any:
        return json.loads(run(*arguments, "--json", status=status).stdout)

    return told
