"""Values of options: checked before a command runs, with what was wanted."""

from __future__ import annotations

import re

import click

from fastcheck_dask.errors import ConfigError

_PERCENT = re.compile(r"(\d+(?:\.\d+)?)\s*%\Z")
_SHARE = re.compile(r"\d*\.\d+\Z")


def checked_name(_ctx: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    """Return a name of a node, rack or tag."""
    from fastcheck_dask.ids import check_name

    if value is None:
        return None
    try:
        return check_name(value, f"--{parameter.name}")
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def checked_coordinator(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return where the coordinator is."""
    from fastcheck_dask.coordination.connect import sqlite_path, zookeeper_place

    if value is None:
        return None
    try:
        if value.startswith("sqlite:"):
            sqlite_path(value)
        else:
            zookeeper_place(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error
    return value


def checked_scheduler(_ctx: click.Context, _parameter: click.Parameter, value: str | None) -> str | None:
    """Return the address of a Dask scheduler."""
    if value is not None and not re.match(r"(tcp|tls|ws|wss|ucx|inproc)://.+|[^/:]+:\d+\Z", value):
        raise click.BadParameter(f"an address like tcp://host:8786 is wanted; got {value!r}")
    return value


def checked_memory(_ctx: click.Context, _parameter: click.Parameter, value: str) -> int:
    """Return a number of bytes."""
    try:
        return parse_memory(value)
    except ConfigError as error:
        raise click.BadParameter(str(error)) from error


def checked_seconds(_ctx: click.Context, _parameter: click.Parameter, value: str) -> float:
    """Return a time in seconds."""
    from dask.utils import parse_timedelta

    try:
        seconds = float(parse_timedelta(value))
    except (ValueError, KeyError, IndexError, TypeError):
        seconds = -1.0
    if not 0 <= seconds < float("inf"):
        raise click.BadParameter(f"a time like '30 s', 0 or more; got {value!r}")
    return seconds


def parse_memory(text: str) -> int:
    """Return a number of bytes.

    Parameters
    ----------
    text : str
        A size (``"2GiB"``), or a share of what this machine or its container may use (``"50%"``, ``"0.5"``).

    Raises
    ------
    ConfigError
        If it is neither, or less than one byte, or a share above 100 %.
    """
    from dask.utils import parse_bytes

    text = text.strip()
    percent = _PERCENT.match(text)
    if percent is not None or _SHARE.match(text):
        from fastcheck_dask.node.machine import memory_limit_bytes

        share = float(percent[1]) / 100 if percent is not None else float(text)
        if not 0 < share <= 1:
            raise ConfigError(f"a share of the memory is more than 0% and at most 100%; got {text!r}")
        return max(1, int(memory_limit_bytes() * share))
    try:
        size = parse_bytes(text)
    except ValueError as error:
        raise ConfigError(f"a size like 2GiB or a share like 50% is wanted; got {text!r}") from error
    if size < 1:
        raise ConfigError(f"at least one byte is wanted; got {text!r}")
    return int(size)
