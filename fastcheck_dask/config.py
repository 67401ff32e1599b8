"""Settings: read from `dask.config` once, checked, and passed down as values."""

from __future__ import annotations

import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal, cast

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from fastcheck_dask.errors import ConfigError

OnBusy = Literal["wait", "skip", "raise"]


@dataclass(frozen=True)
class Settings:
    """Everything that a manager and its agent are built from, besides where and with whom."""

    chunk_bytes: int
    on_busy: OnBusy
    #: Each k-th generation goes to the object tier; 0 means none.
    persist_every: int
    local_dir: str | None
    encoders: int
    close_seconds: float
    max_shards: int
    connect_seconds: float
    floor_bytes_per_second: float
    grace_seconds: float
    coordinator_seconds: float
    session_seconds: float
    scheduler_seconds: float

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the trip to the agent."""
        return asdict(self)


def load_defaults() -> None:
    """Make the packaged defaults known to `dask.config`, beneath whatever the user set."""
    text = (Path(__file__).parent / "fastcheck.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(text))


def settings(**overrides: Any) -> Settings:
    """Read the settings; an override that is not None wins over the configuration.

    Raises
    ------
    ConfigError
        If a value cannot be used; the message names the key, what is wanted and what came.
    """
    get = _reader(overrides)
    on_busy = get("on_busy", "on-busy", str)
    if on_busy not in ("wait", "skip", "raise"):
        raise ConfigError(f"on_busy must be 'wait', 'skip' or 'raise', got {on_busy!r}")
    encoders = get("encoders", "encoders", lambda v: max(1, (os.cpu_count() or 2) - 1) if v is None else int(v))
    return Settings(
        chunk_bytes=_at_least(get("chunk_bytes", "chunk-size", parse_bytes), 256, "chunk_bytes (chunk-size)"),
        on_busy=cast(OnBusy, on_busy),
        persist_every=_at_least(get("persist_every", "persist-every", _whole), 0, "persist_every"),
        local_dir=get("local_dir", "local-dir", lambda v: None if v is None else os.fspath(v)),
        encoders=_at_least(encoders, 1, "encoders"),
        close_seconds=get("close_timeout", "close-timeout", parse_timedelta),
        max_shards=_at_least(get("max_shards", "peers.max-shards", _whole), 1, "max_shards"),
        connect_seconds=get("connect_timeout", "peers.connect-timeout", parse_timedelta),
        floor_bytes_per_second=float(get("floor_bandwidth", "peers.floor-bandwidth", parse_bytes)),
        grace_seconds=get("grace", "peers.grace", parse_timedelta),
        coordinator_seconds=get("coordinator_timeout", "coordinator.timeout", parse_timedelta),
        session_seconds=get("session_timeout", "coordinator.session", parse_timedelta),
        scheduler_seconds=get("scheduler_timeout", "scheduler.timeout", parse_timedelta),
    )


def _reader(overrides: dict[str, Any]) -> Any:
    left = {name: value for name, value in overrides.items() if value is not None}

    def get(name: str, key: str, convert: Any) -> Any:
        value = left[name] if name in left else dask.config.get(f"fastcheck.{key}")
        try:
            return convert(value)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(f"{name} (fastcheck.{key}) cannot be {value!r}: {error}") from error

    return get


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("a whole number is wanted")
    return int(value)


def _at_least(value: int, least: int, what: str) -> int:
    if value < least:
        raise ConfigError(f"{what} must be at least {least}, got {value}")
    return value


def parse_shards(value: int | str) -> int | None:
    """Return the number of data shards that was asked for; None for ``"auto"``."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"num_shards must be 'auto' or a whole number of at least 1, got {value!r}")
    return value


load_defaults()
