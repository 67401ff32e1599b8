"""Settings: read from `dask.config` once, checked, and passed down as values."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import dask
import yaml
from dask.utils import parse_bytes, parse_timedelta

from fastcheck_dask.errors import ConfigError

OnBusy = Literal["wait", "skip", "raise"]
Compression = Literal["auto", "always", "never"]
AuthScheme = Literal["digest", "sasl"]
Persist = Literal["full", "incremental"]

#: A chunk travels in one message to a storage node, and those have at most 256 MiB.
CHUNK_LIMIT_BYTES = 128 * 2**20
#: Bytes a second: what a limit has to leave so that no node takes a transfer for one that stands.
LOWEST_LIMIT_BYTES = 12.5e6
_BITS = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([kmgt]?)bit(?:/s)?", re.IGNORECASE)
_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12}
#: Seconds: what is shorter than the tick of a clock would always be over.
_POSITIVE = (1e-3, math.inf)
#: The options, and the fields of `Settings` that they set.
_FIELDS = {
    "chunk_bytes": "chunk_bytes",
    "on_busy": "on_busy",
    "persist_every": "persist_every",
    "persist": "persist",
    "max_deltas": "max_deltas",
    "full_hours": "full_hours",
    "keep_last": "keep_last",
    "keep_every": "keep_every",
    "keep_hours": "keep_hours",
    "keep_best": "keep_best",
    "check_documents": "check_documents",
    "local_dir": "local_dir",
    "encoders": "encoders",
    "encoder_cpus": "encoder_cpus",
    "encoder_nice": "encoder_nice",
    "compression": "compression",
    "close_timeout": "close_seconds",
    "commit_timeout": "commit_seconds",
    "max_shards": "max_shards",
    "parity": "parity",
    "connect_timeout": "connect_seconds",
    "measure_links": "measure_links",
    "bandwidth_limit": "limit_bytes_per_second",
    "dscp": "dscp",
    "floor_bandwidth": "floor_bytes_per_second",
    "grace": "grace_seconds",
    "lease": "lease_seconds",
    "coordinator_timeout": "coordinator_seconds",
    "session_timeout": "session_seconds",
    "coordinator_auth": "coordinator_auth",
    "coordinator_auth_scheme": "coordinator_auth_scheme",
    "coordinator_acl": "coordinator_acl",
    "coordinator_tls_ca": "coordinator_tls_ca",
    "coordinator_tls_cert": "coordinator_tls_cert",
    "coordinator_tls_key": "coordinator_tls_key",
    "scheduler_timeout": "scheduler_seconds",
    "metrics_host": "metrics_host",
    "metrics_port": "metrics_port",
}
#: Options whose values no message shows.
_SECRET = frozenset({"coordinator_auth"})


@dataclass(frozen=True)
class Settings:
    """Everything that a manager and its agent are built from, besides where and with whom."""

    chunk_bytes: int
    on_busy: OnBusy
    #: Each k-th generation goes to the object tier; 0 means none.
    persist_every: int
    persist: Persist
    #: Deltas that follow a whole checkpoint in the object tier, at most; and its age.
    max_deltas: int
    full_hours: float
    #: What stays in the object tier. None: no such rule; -1: everything.
    keep_last: int | None
    keep_every: int | None
    keep_hours: float | None
    #: Metric, "min" or "max", and how many.
    keep_best: tuple[str, str, int] | None
    #: Whether a load from the object tier also compares what other readers need.
    check_documents: bool
    local_dir: str | None
    encoders: int
    #: CPUs that the encoder processes may use; None: those of the trainer.
    encoder_cpus: tuple[int, ...] | None
    encoder_nice: int
    compression: Compression
    close_seconds: float
    #: How long a rank that has prepared waits for the others.
    commit_seconds: float
    max_shards: int
    #: Parity shards of each save: so many storage nodes may be lost.
    parity: int
    connect_seconds: float
    #: Whether automatic choice measures the links before the first save.
    measure_links: bool
    #: Limit of what the agent sends; None: none.
    limit_bytes_per_second: float | None
    #: What packets of the data port are marked with; None: what the system does.
    dscp: int | None
    floor_bytes_per_second: float
    grace_seconds: float
    #: How long the storage nodes keep the run without another sign of life.
    lease_seconds: float
    coordinator_seconds: float
    session_seconds: float
    #: ``user:password``.
    coordinator_auth: str | None = field(repr=False)
    coordinator_auth_scheme: AuthScheme
    #: Who else may do what with our znodes, ``scheme:id:cdrwa``.
    coordinator_acl: tuple[str, ...]
    coordinator_tls_ca: str | None
    coordinator_tls_cert: str | None
    coordinator_tls_key: str | None
    scheduler_seconds: float
    metrics_host: str
    #: None: the metrics are not served.
    metrics_port: int | None

    def to_dict(self) -> dict[str, Any]:
        """Return plain values for the trip to the agent, secrets among them: not for the log."""
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Settings:
        """Undo :meth:`to_dict`, also after a trip that made lists of tuples."""
        fields: dict[str, Any] = {n: tuple(v) if isinstance(v, list) else v for n, v in values.items()}
        return cls(**fields)


def load_defaults() -> None:
    """Make the packaged defaults known to `dask.config`, beneath whatever the user set."""
    text = (Path(__file__).parent / "fastcheck.yaml").read_text(encoding="utf-8")
    dask.config.update_defaults(yaml.safe_load(text))


def settings(**overrides: Any) -> Settings:
    """Read the settings; an override that is not None wins over the configuration.

    Overrides go by the names of the options (``grace``) or of the fields of `Settings` (``grace_seconds``).

    Raises
    ------
    ConfigError
        If an option is unknown, or a value cannot be used; the message names the option and its key, what is
        wanted and what came.
    """
    get = _Reader(overrides)
    cpus = get("encoder_cpus", "encoder-cpus", _cpus)
    return Settings(
        chunk_bytes=get("chunk_bytes", "chunk-size", parse_bytes, within=(256, CHUNK_LIMIT_BYTES)),
        on_busy=cast(OnBusy, get("on_busy", "on-busy", _on_busy)),
        persist_every=get("persist_every", "persist-every", _whole, within=(0, math.inf)),
        persist=cast(Persist, get("persist", "persist", _persist)),
        max_deltas=get("max_deltas", "max-deltas", _whole, within=(0, 1000)),
        full_hours=get("full_hours", "full-hours", _number, within=(0, math.inf)),
        keep_last=get("keep_last", "keep.last", _kept),
        keep_every=get("keep_every", "keep.every", _kept),
        keep_hours=get("keep_hours", "keep.hours", _kept_hours),
        keep_best=get("keep_best", "keep.best", _kept_best),
        check_documents=get("check_documents", "check-documents", _yes_or_no),
        local_dir=get("local_dir", "local-dir", lambda v: None if v is None else os.fspath(v)),
        encoders=get("encoders", "encoders", partial(_encoders, cpus), within=(1, math.inf)),
        encoder_cpus=cpus,
        encoder_nice=get("encoder_nice", "encoder-nice", _whole, within=(0, 19)),
        compression=cast(Compression, get("compression", "compression", _compression)),
        close_seconds=get("close_timeout", "close-timeout", _seconds, within=(0, math.inf)),
        commit_seconds=get("commit_timeout", "commit-timeout", _seconds, within=_POSITIVE),
        max_shards=get("max_shards", "peers.max-shards", _whole, within=(1, math.inf)),
        parity=get("parity", "peers.parity", _parity),
        connect_seconds=get("connect_timeout", "peers.connect-timeout", _seconds, within=_POSITIVE),
        measure_links=get("measure_links", "peers.measure-links", _yes_or_no),
        limit_bytes_per_second=get("bandwidth_limit", "peers.bandwidth-limit", _bandwidth),
        dscp=get("dscp", "peers.dscp", _dscp),
        floor_bytes_per_second=float(
            get("floor_bandwidth", "peers.floor-bandwidth", parse_bytes, within=(1, math.inf))
        ),
        grace_seconds=get("grace", "peers.grace", _seconds, within=_POSITIVE),
        lease_seconds=get("lease", "peers.lease", _seconds, within=(1.0, 366 * 86400.0)),
        coordinator_seconds=get("coordinator_timeout", "coordinator.timeout", _seconds, within=_POSITIVE),
        session_seconds=get("session_timeout", "coordinator.session", _seconds, within=_POSITIVE),
        coordinator_auth=get("coordinator_auth", "coordinator.auth", _text),
        coordinator_auth_scheme=cast(
            AuthScheme, get("coordinator_auth_scheme", "coordinator.auth-scheme", _auth_scheme)
        ),
        coordinator_acl=get("coordinator_acl", "coordinator.acl", _texts),
        coordinator_tls_ca=get("coordinator_tls_ca", "coordinator.tls-ca", _file),
        coordinator_tls_cert=get("coordinator_tls_cert", "coordinator.tls-cert", _file),
        coordinator_tls_key=get("coordinator_tls_key", "coordinator.tls-key", _file),
        scheduler_seconds=get("scheduler_timeout", "scheduler.timeout", _seconds, within=_POSITIVE),
        metrics_host=get("metrics_host", "metrics.host", _host),
        metrics_port=get("metrics_port", "metrics.port", _port),
    )


class _Reader:
    """Gives values by the name of their option: the override if there is one, or what is configured."""

    def __init__(self, overrides: dict[str, Any]) -> None:
        unknown = sorted(overrides.keys() - set(_FIELDS) - set(_FIELDS.values()))
        if unknown:
            raise ConfigError(
                f"there is no option {unknown[0]!r}; the options are {', '.join(sorted(_FIELDS))}"
            )
        self._overrides = {name: value for name, value in overrides.items() if value is not None}

    def __call__(
        self,
        name: str,
        key: str,
        convert: Callable[[Any], Any],
        *,
        within: tuple[float, float] | None = None,
    ) -> Any:
        value = None
        try:
            for given in (name, _FIELDS[name]):
                if given in self._overrides:
                    value = self._overrides[given]
                    break
            else:
                value = dask.config.get(f"fastcheck.{key}")
            found = convert(value)
        except (ValueError, TypeError, LookupError, AttributeError, ArithmeticError) as error:
            if name in _SECRET:
                # Not chained: the error, too, may show it.
                raise ConfigError(
                    f"{name} (fastcheck.{key}) cannot be what it is (not shown): a text is wanted"
                ) from None
            raise ConfigError(f"{name} (fastcheck.{key}) cannot be {value!r}: {error}") from error
        if within is not None and not within[0] <= found <= within[1]:
            most = "" if within[1] == math.inf else f" and at most {within[1]:,}"
            raise ConfigError(f"{name} (fastcheck.{key}) must be at least {within[0]:,}{most}, got {value!r}")
        return found


def _on_busy(value: Any) -> str:
    if value not in ("wait", "skip", "raise"):
        raise ValueError("'wait', 'skip' or 'raise' is wanted")
    return str(value)


def _compression(value: Any) -> str:
    if value not in ("auto", "always", "never"):
        raise ValueError("'auto', 'always' or 'never' is wanted")
    return str(value)


def _persist(value: Any) -> str:
    if value not in ("full", "incremental"):
        raise ValueError("'full' or 'incremental' is wanted")
    return str(value)


def _number(value: Any) -> float:
    if isinstance(value, bool) or not math.isfinite(number := float(value)):
        raise ValueError("a number is wanted")
    return number


def _kept(value: Any) -> int | None:
    return None if value is None else int(_positive(_whole(value)))


def _kept_hours(value: Any) -> float | None:
    return None if value is None else _positive(_number(value))


def _positive(value: float) -> float:
    if value != -1 and value <= 0:
        # 0 is refused: whether it means all or none, somebody would lose what he wanted to keep.
        raise ValueError("more than 0 is wanted, or -1 or None to keep everything")
    return value


def _kept_best(value: Any) -> tuple[str, str, int] | None:
    if value is None:
        return None
    wanted = ValueError("(metric, 'min' or 'max', how many) is wanted, such as ('loss', 'min', 3)")
    if not isinstance(value, list | tuple) or len(value) != 3:
        raise wanted
    metric, mode, count = value
    if not isinstance(metric, str) or not metric or mode not in ("min", "max") or _whole(count) < 1:
        raise wanted
    return metric, str(mode), int(count)


def _auth_scheme(value: Any) -> str:
    if value not in ("digest", "sasl"):
        raise ValueError("'digest' or 'sasl' is wanted")
    return str(value)


def _text(value: Any) -> str | None:
    if value is not None and not isinstance(value, str):
        raise ValueError("a text is wanted")
    return value


def _texts(value: Any) -> tuple[str, ...]:
    given = [value] if isinstance(value, str) else value or ()
    if not isinstance(given, list | tuple) or not all(isinstance(text, str) for text in given):
        raise ValueError("a list of texts is wanted")
    return tuple(given)


def _host(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError("the name or the address of an interface is wanted")
    return value


def _port(value: Any) -> int | None:
    if value is not None and not 0 <= _whole(value) <= 65535:
        raise ValueError("a port from 0 (any) to 65535 is wanted, or null for none")
    return None if value is None else _whole(value)


def _file(value: Any) -> str | None:
    # Absolute: the agent may have another working directory.
    return None if value is None else str(Path(value).expanduser().absolute())


def _encoders(cpus: tuple[int, ...] | None, value: Any) -> int:
    if value is not None:
        return _whole(value)
    return len(cpus) if cpus else max(1, (os.cpu_count() or 2) - 1)


def _cpus(value: Any) -> tuple[int, ...] | None:
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


def _bandwidth(value: Any) -> float | None:
    """Return bytes a second, from a size ("125 MB") or from bits ("1 Gbit")."""
    if value is None:
        return None
    if isinstance(value, bool):
        raise ValueError("a bandwidth is wanted, such as '1 Gbit' or '125 MB'")
    bits = _BITS.fullmatch(value.strip()) if isinstance(value, str) else None
    if bits is not None:
        rate = float(bits[1]) * _DECIMAL[bits[2].lower()] / 8
    else:
        rate = float(parse_bytes(value.strip().removesuffix("/s") if isinstance(value, str) else value))
    if not LOWEST_LIMIT_BYTES <= rate < math.inf:
        # Nodes end transfers of less than 1 MB/s, and some messages are on their way at once.
        raise ValueError(f"at least {LOWEST_LIMIT_BYTES:,.0f} bytes (100 Mbit) a second are wanted")
    return rate


def _yes_or_no(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false is wanted")
    return value


def _parity(value: Any) -> int:
    # Yes and no are one and none.
    if value not in (0, 1, 2):
        raise ValueError("the number of parity shards is wanted: 0, 1 or 2")
    return int(value)


def _dscp(value: Any) -> int | None:
    if value is None:
        return None
    if not 0 <= (found := _whole(value)) < 64:
        raise ValueError("a DSCP is 0 to 63")
    return found


def _seconds(value: Any) -> float:
    if value is None or isinstance(value, bool):
        raise ValueError("a time is wanted, such as '5 s'")
    return float(parse_timedelta(value))


def _whole(value: Any) -> int:
    if isinstance(value, bool) or int(value) != value:
        raise ValueError("a whole number is wanted")
    return int(value)


def parse_shards(value: int | str) -> int | None:
    """Return the number of data shards that was asked for; None for ``"auto"``."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"num_shards must be 'auto' or a whole number of at least 1, got {value!r}")
    return value


load_defaults()
