"""The location that a command is about: opened, or refused as wrong usage."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fastcheck_dask.errors import ConfigError

if TYPE_CHECKING:
    from fastcheck_dask.inspection import Checkpoint
    from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, CommitMarker


def opened(url: str) -> tuple[CheckpointFolder, str | None]:
    """Return a location, and the checkpoint's directory if one was named; status 2 if there is none."""
    from fastcheck_dask.inspection.location import open_folder

    try:
        return open_folder(url)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def chosen(url: str, tag: str | None) -> tuple[CheckpointFolder, CommitMarker]:
    """Return a location and the marker of the checkpoint that is meant."""
    from fastcheck_dask.inspection.location import choose

    folder, directory = opened(url)
    return folder, choose(folder, folder.committed(), tag, directory=directory)


def opened_checkpoint(url: str, tag: str | None) -> Checkpoint:
    """Return the checkpoint that is meant."""
    from fastcheck_dask.inspection import Checkpoint

    folder, marker = chosen(url, tag)
    return Checkpoint(folder, folder.load_manifest(marker), marker)


def drawer(module: str) -> Callable[[Path, Any], None]:
    """Return what draws a plot, or say what is missing before anything is measured."""
    import importlib

    try:
        return importlib.import_module(module).draw  # type: ignore[no-any-return]
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error


def draw(how: Callable[[Path, Any], None], file: Path, what: Any) -> None:
    """Draw, or say why the file cannot be written."""
    try:
        how(file, what)
    except OSError as error:
        raise ConfigError(f"the plot cannot be written: {error}") from error
