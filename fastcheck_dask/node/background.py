"""How often and how fast a storage node, and the master that it may be, works in the background."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from fastcheck_dask import option_values as values
from fastcheck_dask.config import Reader

#: The options, and the fields of `Background` that they set.
FIELDS = {
    "scrub_every": "scrub_seconds",
    "scrub_rate": "scrub_bytes_per_second",
    "drill_every": "drill_seconds",
    "drill_rate": "drill_bytes_per_second",
    "repair_every": "repair_seconds",
    "repair_rate": "repair_bytes_per_second",
    "sweep_every": "sweep_seconds",
}
#: What is slower than this takes days for a node's memory: more likely a unit was forgotten.
_LOWEST_BYTES_PER_SECOND = 100_000
#: Seconds. Who looks more often than this is busy with nothing else.
_SHORTEST_SECONDS = 0.01


@dataclass(frozen=True)
class Background:
    """Times in seconds, rates in bytes a second."""

    #: From one pass over all that is stored to the next; infinite: none.
    scrub_seconds: float
    scrub_bytes_per_second: float
    #: From one restore drill of a run to the next; infinite: none.
    drill_seconds: float
    drill_bytes_per_second: float
    #: How often the master looks for what has to be repaired.
    repair_seconds: float
    #: What a repair brings to a node, encoded; None: no limit. A node that drains is not held back.
    repair_bytes_per_second: float | None
    #: How often the master looks for leases that have ended.
    sweep_seconds: float


def background(**overrides: Any) -> Background:
    """Read the settings of the background work; an override that is not None wins over the configuration.

    Overrides go by the names of the options (``scrub_every``) or of the fields (``scrub_seconds``).

    Raises
    ------
    ConfigError
        If an option is unknown, or a value cannot be used; the message names the option and its key, what is
        wanted and what came.
    """
    get = Reader(overrides, FIELDS)
    often, fast = (_SHORTEST_SECONDS, math.inf), (_LOWEST_BYTES_PER_SECOND, math.inf)
    return Background(
        scrub_seconds=get("scrub_every", "storage.scrub-every", _seconds_or_never, within=often),
        scrub_bytes_per_second=get("scrub_rate", "storage.scrub-rate", _rate, within=fast),
        drill_seconds=get("drill_every", "storage.drill-every", _seconds_or_never, within=often),
        drill_bytes_per_second=get("drill_rate", "storage.drill-rate", _rate, within=fast),
        repair_seconds=get("repair_every", "storage.repair-every", _seconds, within=often),
        repair_bytes_per_second=get("repair_rate", "storage.repair-rate", _rate_or_none),
        sweep_seconds=get("sweep_every", "storage.sweep-every", _seconds, within=often),
    )


def _seconds(value: Any) -> float:
    seconds = values.seconds(value)
    if not math.isfinite(seconds):
        raise ValueError("a time is wanted, such as '10 minutes'")
    return seconds


def _seconds_or_never(value: Any) -> float:
    return math.inf if value is None or value == "never" else _seconds(value)


def _rate(value: Any) -> float:
    rate = values.bytes_a_second(value)
    if not math.isfinite(rate):
        raise ValueError("bytes a second are wanted, such as '64 MiB'")
    return rate


def _rate_or_none(value: Any) -> float | None:
    if value is None or value == "none":
        return None
    if (rate := _rate(value)) < _LOWEST_BYTES_PER_SECOND:
        raise ValueError(f"at least {_LOWEST_BYTES_PER_SECOND:,} bytes a second are wanted, or none")
    return rate
