"""Slots to save into, and folders for checkpoints."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.local import LocalTier, Slot


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "root"


@pytest.fixture
def tier(root: Path) -> Iterator[LocalTier]:
    with LocalTier("run", root) as tier:
        yield tier


def _save(target: Slot, value: int, *, nbytes: int = 2**20, generation: int | None = 1) -> None:
    target.reserve(nbytes)
    target.begin(f"token{value}", f"tag{value}")
    target.data[:nbytes] = value
    target.complete(b"draft", nbytes)
    target.seal(b"manifest %d" % value)
    if generation is not None:
        target.commit(generation)


@pytest.fixture
def save_slot() -> Callable[..., None]:
    """Return a function that saves bytes which are all of one value."""
    return _save


@contextlib.contextmanager
def _running(code: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    command = [sys.executable, "-c", code, *map(str, arguments)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


@pytest.fixture
def running() -> Callable[..., contextlib.AbstractContextManager[subprocess.Popen[str]]]:
    """Return what runs a program beside the test, and kills it in the end."""
    return _running


@pytest.fixture
def folder(tmp_path: Path) -> CheckpointFolder:
    return CheckpointFolder(FolderStore(str(tmp_path / "ckpts"), sleep=lambda seconds: None))
