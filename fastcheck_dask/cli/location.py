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


rank_option = click.option(
    "--rank", type=click.IntRange(min=0), help="Whose part, where several ranks save into the location."
)


def chosen(
    url: str, tag: str | None, *, rank: int | None = None
) -> tuple[CheckpointFolder, list[CommitMarker], CommitMarker]:
    """Return a location, all markers in it, and the marker of the checkpoint that is meant."""
    from fastcheck_dask.inspection.location import open_part

    try:
        return open_part(url, tag, rank=rank)
    except ConfigError as error:
        raise click.UsageError(str(error)) from error


def opened_checkpoint(url: str, tag: str | None, *, rank: int | None = None) -> Checkpoint:
    """Return the checkpoint that is meant."""
    from fastcheck_dask.inspection import Checkpoint

    folder, _, marker = chosen(url, tag, rank=rank)
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
