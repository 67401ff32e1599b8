"""What a manager is told: checked, and made independent of the working directory."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

from fastcheck_dask.config import Group
from fastcheck_dask.coordination.connect import sqlite_path
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import is_url, normalised
from fastcheck_dask.tiers.checkpoint_folder import CommitMarker
from fastcheck_dask.tiers.s3_location import S3Location


def place_of(checkpoint_dir: object) -> str:
    """Return the one spelling of a checkpoint directory."""
    location = _text(checkpoint_dir, "checkpoint_dir", "the path of a folder or a URL")
    return normalised(location)


def local_folder(local_dir: object) -> str | None:
    """Return the absolute path of the local tier's folder; None for shared memory."""
    if local_dir is None:
        return None
    return str(Path(_text(local_dir, "local_dir", "the path of a folder")).expanduser().absolute())


def check_address(value: object, what: str) -> str:
    """Return a scheduler's address or a coordinator's URL as text."""
    if isinstance(value, str) and value.strip() == value and value:
        return value
    raise ConfigError(f"{what} must be a text like 'tcp://host:8786' or 'zk://host:2181/root', got {value!r}")


def check_fallback(fallback: object, tag: str | None, *, alone: bool) -> bool:
    """Say whether a load skips flagged checkpoints; `ConfigError` where that cannot be."""
    if fallback == "any" or (fallback == "healthy" and tag is None and alone):
        return fallback == "healthy"
    raise ConfigError(
        f"fallback is 'any', or without a tag and with one rank 'healthy'; got {fallback!r}, tag {tag!r}"
    )


def coordinator_url(url: str) -> str:
    """Return the URL so that it names the same file from every working directory."""
    if url.startswith("sqlite:"):
        return f"sqlite:///{str(sqlite_path(url).expanduser().absolute()).lstrip('/')}"
    return url


def own_coordinator(location: str, run: str) -> str:
    """Return the coordinator of a run that was given none: a file beside its checkpoints, or of this user."""
    if not is_url(location):
        return f"sqlite:///{location}/.fastcheck/coordinator.db"
    state = Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local/state")
    return f"sqlite:///{state}/fastcheck/{run}.db"


def refuse_foreign_run(location: str, run: str, markers: Iterable[CommitMarker]) -> None:
    """Raise `ConfigError` if the folder holds checkpoints of another run."""
    for marker in markers:
        if marker.run != run:
            raise ConfigError(
                f"{location} holds checkpoints of run {marker.run}, not of {run}; "
                f"give run_id={marker.run!r}, or another checkpoint_dir"
            )


def check_groups(location: str, groups: Iterable[Group], *, alone: bool) -> None:
    """Raise `ConfigError` if a group has an interval that several ranks cannot keep, or no proper root."""
    for group in groups:
        if not alone and group.persist_every > 1:
            raise ConfigError(
                f"groups: {group.name} has persist_every={group.persist_every}, which cannot be used with "
                "several ranks: one that lost its memory would load another step of it than the others; "
                "leave the interval out, a root may be given"
            )
        if group.root is None:
            continue
        if group.root.startswith("s3:"):
            S3Location.parse(group.root)
        whole, root = (f"{one.partition('?')[0].rstrip('/')}/" for one in (location, group.root))
        if root.startswith(whole):
            raise ConfigError(
                f"groups: the root of {group.name}, {group.root}, lies in the checkpoint directory; "
                "give another place, or no root"
            )


def _text(value: object, what: str, wanted: str) -> str:
    if isinstance(value, str | os.PathLike):
        text = os.fspath(value)
        if isinstance(text, str) and text and "\0" not in text:
            return text
    raise ConfigError(f"{what} must be {wanted}, got {value!r}")
