"""Values of options as people write them: each parser takes one or raises what says what is wanted."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from dask.utils import parse_bytes, parse_timedelta

#: Bytes a second: what a limit has to leave so that no node takes a transfer for one that stands.
LOWEST_LIMIT_BYTES = 12.5e6
_BITS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}


def one_of(*wanted: str) -> Callable[[Any], str]:
    """Return what takes one of some texts.

    >>> one_of("wait", "skip")("skip")
    'skip'
    """
    *others, last = (repr(text) for text in wanted)

    def parse(value: Any) -> str:
        if value not in wanted:
            raise ValueError(f"{', '.join(others)} or {last} is wanted")
        return str(value)

    return parse


def yes_or_no(value: Any) -> bool:
    """Return a truth value."""
    if isinstance(value, bool):
        return value
    raise ValueError("true or false is wanted")


def number(value: Any) -> float:
    """Return a number that is finite."""
    if isinstance(value, bool) or not math.isfinite(found := float(value)):
        raise ValueError("a number is wanted")
    return found


def kept(value: Any) -> int | None:
    """Return how many checkpoints are kept; None or -1 keep all."""
    return None if value is None else int(positive(whole(value)))


def kept_hours(value: Any) -> float | None:
    """Return for how long checkpoints are kept; None or -1 keep all."""
    return None if value is None else positive(number(value))


def positive(value: float) -> float:
    """Return what is more than 0, or -1."""
    if value != -1 and value <= 0:
        # 0 is refused: whether it means all or none, somebody would lose what he wanted to keep.
        raise ValueError("more than 0 is wanted, or -1 or None to keep everything")
    return value


def kept_best(value: Any) -> tuple[str, str, int] | None:
    """Return metric, direction and number of the checkpoints that are kept for their metric."""
    if value is None:
        return None
    wanted = ValueError("(metric, 'min' or 'max', how many) is wanted, such as ('loss', 'min', 3)")
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise wanted
    metric, mode, count = value
    if not isinstance(metric, str) or not metric or mode not in ("min", "max") or whole(count) < 1:
        raise wanted
    return metric, str(mode), int(count)


def text(value: Any) -> str | None:
    """Return a text, or None."""
    if value is not None and not isinstance(value, str):
        raise ValueError("a text is wanted")
    return value


def texts(value: Any) -> tuple[str, ...]:
    """Return texts; one may stand alone."""
    given = [value] if isinstance(value, str) else value or ()
    if not isinstance(given, list | tuple) or not all(isinstance(one, str) for one in given):
        raise ValueError("a list of texts is wanted")
    return tuple(given)


def host(value: Any) -> str:
    """Return the name or the address of an interface."""
    if not isinstance(value, str) or not value:
        raise ValueError("the name or the address of an interface is wanted")
    return value


def port(value: Any) -> int | None:
    """Return a port, or None."""
    if value is not None and not 0 <= whole(value) <= 65535:
        raise ValueError("a port from 0 (any) to 65535 is wanted, or null for none")
    return None if value is None else whole(value)


def file(value: Any) -> str | None:
    """Return the absolute path of a file, or None."""
    # Absolute: the agent may have another working directory.
    return None if value is None else str(Path(value).expanduser().absolute())


def encoders(cpus: tuple[int, ...] | None, value: Any) -> int:
    """Return a number of processes; by default what the CPUs allow."""
    if value is not None:
        return whole(value)
    return len(cpus) if cpus else max(1, (os.cpu_count() or 2) - 1)


def cpus(value: Any) -> tuple[int, ...] | None:
    """Return CPU numbers from a list of them, or from a text like "0-3,8"."""
    if value is None:
        return None
    found: set[int] = set()
    for part in value.split(",") if isinstance(value, str) else [value] if isinstance(value, int) else value:
        first, dash, last = str(part).strip().partition("-")
        found.update(range(int(first), int(last if dash else first) + 1))
    count = os.cpu_count() or 1
    if not found or isinstance(value, bool) or not 0 <= min(found) <= max(found) < count:
        raise ValueError(f"numbers of CPUs are wanted, such as '0-3,8'; this machine has 0 to {count - 1}")
    return tuple(sorted(found))


def bytes_a_second(value: Any) -> float:
    """Return bytes a second, from a number or a text like "64 MiB" or "64 MiB/s"."""
    if value is None or isinstance(value, bool):
        raise ValueError("bytes a second are wanted, such as '64 MiB'")
    return float(parse_bytes(value.strip().removesuffix("/s") if isinstance(value, str) else value))


def bandwidth(value: Any) -> float | None:
    """Return bytes a second, from a size ("125 MB") or from bits ("1 Gbit")."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise ValueError("a bandwidth is wanted, such as '1 Gbit' or '125 MB'")
    bits = _BITS.fullmatch(value.strip()) if isinstance(value, str) else None
    rate = bytes_a_second(value) if bits is None else float(bits[1]) * _DECIMAL[bits[2].lower()] / 8
    if not LOWEST_LIMIT_BYTES <= rate < math.inf:
        # Nodes end transfers of less than 1 MB/s, and some messages are on their way at once.
        raise ValueError(f"at least {LOWEST_LIMIT_BYTES:,.0f} bytes (100 Mbit) a second are wanted")
    return rate


def yes_no_or_auto(value: Any) -> bool | str:
    """Return a truth value or ``"auto"``."""
    if value != "auto" and not isinstance(value, bool):
        raise ValueError("true, false or 'auto' is wanted")
    return cast(bool | str, value)


def most_shards(value: Any) -> int | None:
    """Return a number of at least 1, or None."""
    if value is None:
        return None
    if (found := whole(value)) < 1:
        raise ValueError("at least 1 is wanted, or null")
    return found


def parity(value: Any) -> int:
    """Return the number of parity shards."""
    # Yes and no are one and none.
    if value not in (0, 1, 2):
        raise ValueError("the number of parity shards is wanted: 0, 1 or 2")
    return int(value)


def dscp(value: Any) -> int | None:
    """Return a DSCP, or None."""
    if value is None:
        return None
    if not 0 <= (found := whole(value)) < 64:
        raise ValueError("a DSCP is 0 to 63")
    return found


def seconds(value: Any) -> float:
    """Return seconds, from a number or a text like "5 s"."""
    if value is None or isinstance(value, bool):
        raise ValueError("a time is wanted, such as '5 s'")
    return float(parse_timedelta(value))


def whole(value: Any) -> int:
    """Return a whole number."""
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("a whole number is wanted")
    return int(value)
