"""Settings: read from `dask.config` once, checked, and passed down as values."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, cast

import dask
import yaml
from dask.utils import parse_bytes

from fastcheck_dask import option_values as values
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.ids import check_name, is_url, normalised

OnBusy = Literal["wait", "skip", "raise"]
Compression = Literal["auto", "always", "never"]
AuthScheme = Literal["digest", "sasl"]
Persist = Literal["full", "incremental"]
Stripes = Literal["even", "weighted"]
MeasureLinks = bool | Literal["auto"]

#: A chunk travels in one message to a storage node, and those have at most 256 MiB.
CHUNK_LIMIT_BYTES = 128 * 2**20
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
    "max_references": "max_references",
    "groups": "groups",
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
    "stripes": "stripes",
    "connect_timeout": "connect_seconds",
    "measure_links": "measure_links",
    "bandwidth_limit": "limit_bytes_per_second",
    "dscp": "dscp",
    "floor_bandwidth": "floor_bytes_per_second",
    "grace": "grace_seconds",
    "lease": "lease_seconds",
    "data_tls_ca": "data_tls_ca",
    "data_tls_cert": "data_tls_cert",
    "data_tls_key": "data_tls_key",
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
class Group:
    """Leaves of the state that go to the object tier together: more rarely than the rest, or elsewhere.

    Parameters
    ----------
    name : str
        As reports call it.
    match : str or sequence of str
        Patterns of leaf paths, as `include` of `load` takes them (``"model/embed*"``; ``*`` also crosses
        ``/``). A leaf belongs to the first group that matches.
    persist_every : int, optional
        How old it may get in the object tier, in generations: from this many on it is written again.
    root : str, optional
        Where its arrays lie in the object tier, if not with the rest: a folder, or ``s3://bucket/folder``.
        Several runs may share one.

    Raises
    ------
    ConfigError
        If one of them cannot be used.
    """

    name: str
    match: str | Sequence[str]
    persist_every: int = 1
    root: str | None = None

    def __post_init__(self) -> None:
        patterns = (self.match,) if isinstance(self.match, str) else self.match
        if not _is_text(self.name):
            raise ConfigError(f"a group has a name, got {self.name!r:.80}")
        if not isinstance(patterns, list | tuple) or not patterns or not all(map(_is_text, patterns)):
            raise ConfigError(f"group {self.name}: match is a pattern or several, got {self.match!r:.200}")
        if type(self.persist_every) is not int or self.persist_every < 1:
            raise ConfigError(
                f"group {self.name}: persist_every is a whole number of at least 1, "
                f"got {self.persist_every!r:.80}"
            )
        object.__setattr__(self, "match", tuple(patterns))
        if self.root is not None:
            # It names a folder there.
            check_name(self.name, "the name of a group with a root")
            object.__setattr__(self, "root", self._checked_root(self.root))

    def _checked_root(self, root: object) -> str:
        root = os.fspath(root) if isinstance(root, os.PathLike) else root
        if not _is_text(root) or (is_url(str(root)) and str(root).partition("://")[0] not in ("s3", "file")):
            raise ConfigError(
                f"group {self.name}: root is the path of a folder or s3://bucket/folder, got {root!r:.200}"
            )
        return normalised(str(root))

    @property
    def patterns(self) -> tuple[str, ...]:
        """The patterns, also if there is one."""
        return tuple(self.match)


def _is_text(value: object) -> bool:
    return isinstance(value, str) and bool(value)


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
    #: To how many others one without a base may refer for what did not change; 0 means none.
    max_references: int
    #: What goes there more rarely.
    groups: tuple[Group, ...]
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
    #: None: `placement.bandwidth` says.
    max_shards: int | None
    #: Parity shards of each save: so many storage nodes may be lost.
    parity: int
    #: Whether shards are of equal size, or as large as their nodes are fast.
    stripes: Stripes
    connect_seconds: float
    #: Whether automatic choice measures the links; "auto": if no node is on this machine.
    measure_links: MeasureLinks
    #: Limit of what the agent sends; None: none.
    limit_bytes_per_second: float | None
    #: What packets of the data port are marked with; None: what the system does.
    dscp: int | None
    floor_bytes_per_second: float
    grace_seconds: float
    #: How long the storage nodes keep the run without another sign of life.
    lease_seconds: float
    #: Of the data ports: a CA of their own, and our certificate. None: they are plain.
    data_tls_ca: str | None
    data_tls_cert: str | None
    data_tls_key: str | None
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
        fields["groups"] = _groups(fields["groups"])
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
    get = Reader(overrides, _FIELDS)
    cpus = get("encoder_cpus", "encoder-cpus", values.cpus)
    found = Settings(
        chunk_bytes=get("chunk_bytes", "chunk-size", parse_bytes, within=(256, CHUNK_LIMIT_BYTES)),
        on_busy=cast(OnBusy, get("on_busy", "on-busy", values.one_of("wait", "skip", "raise"))),
        persist_every=get("persist_every", "persist-every", values.whole, within=(0, math.inf)),
        persist=cast(Persist, get("persist", "persist", values.one_of("full", "incremental"))),
        max_deltas=get("max_deltas", "max-deltas", values.whole, within=(0, 1000)),
        full_hours=get("full_hours", "full-hours", values.number, within=(0, math.inf)),
        max_references=get("max_references", "max-references", values.whole, within=(0, 1000)),
        groups=get("groups", "groups", _groups),
        keep_last=get("keep_last", "keep.last", values.kept),
        keep_every=get("keep_every", "keep.every", values.kept),
        keep_hours=get("keep_hours", "keep.hours", values.kept_hours),
        keep_best=get("keep_best", "keep.best", values.kept_best),
        check_documents=get("check_documents", "check-documents", values.yes_or_no),
        local_dir=get("local_dir", "local-dir", lambda v: None if v is None else os.fspath(v)),
        encoders=get("encoders", "encoders", partial(values.encoders, cpus), within=(1, math.inf)),
        encoder_cpus=cpus,
        encoder_nice=get("encoder_nice", "encoder-nice", values.whole, within=(0, 19)),
        compression=cast(
            Compression, get("compression", "compression", values.one_of("auto", "always", "never"))
        ),
        close_seconds=get("close_timeout", "close-timeout", values.seconds, within=(0, math.inf)),
        commit_seconds=get("commit_timeout", "commit-timeout", values.seconds, within=_POSITIVE),
        max_shards=get("max_shards", "peers.max-shards", values.most_shards),
        parity=get("parity", "peers.parity", values.parity),
        stripes=cast(Stripes, get("stripes", "peers.stripes", values.one_of("even", "weighted"))),
        connect_seconds=get("connect_timeout", "peers.connect-timeout", values.seconds, within=_POSITIVE),
        measure_links=cast(MeasureLinks, get("measure_links", "peers.measure-links", values.yes_no_or_auto)),
        limit_bytes_per_second=get("bandwidth_limit", "peers.bandwidth-limit", values.bandwidth),
        dscp=get("dscp", "peers.dscp", values.dscp),
        floor_bytes_per_second=float(
            get("floor_bandwidth", "peers.floor-bandwidth", parse_bytes, within=(1, math.inf))
        ),
        grace_seconds=get("grace", "peers.grace", values.seconds, within=_POSITIVE),
        lease_seconds=get("lease", "peers.lease", values.seconds, within=(1.0, 366 * 86400.0)),
        data_tls_ca=get("data_tls_ca", "data.tls-ca", values.file),
        data_tls_cert=get("data_tls_cert", "data.tls-cert", values.file),
        data_tls_key=get("data_tls_key", "data.tls-key", values.file),
        coordinator_seconds=get(
            "coordinator_timeout", "coordinator.timeout", values.seconds, within=_POSITIVE
        ),
        session_seconds=get("session_timeout", "coordinator.session", values.seconds, within=_POSITIVE),
        coordinator_auth=get("coordinator_auth", "coordinator.auth", values.text),
        coordinator_auth_scheme=cast(
            AuthScheme,
            get("coordinator_auth_scheme", "coordinator.auth-scheme", values.one_of("digest", "sasl")),
        ),
        coordinator_acl=get("coordinator_acl", "coordinator.acl", values.texts),
        coordinator_tls_ca=get("coordinator_tls_ca", "coordinator.tls-ca", values.file),
        coordinator_tls_cert=get("coordinator_tls_cert", "coordinator.tls-cert", values.file),
        coordinator_tls_key=get("coordinator_tls_key", "coordinator.tls-key", values.file),
        scheduler_seconds=get("scheduler_timeout", "scheduler.timeout", values.seconds, within=_POSITIVE),
        metrics_host=get("metrics_host", "metrics.host", values.host),
        metrics_port=get("metrics_port", "metrics.port", values.port),
    )
    if found.groups and found.persist != "incremental":
        raise ConfigError(
            "groups (fastcheck.groups) need persist='incremental': what is older lies elsewhere"
        )
    return found


class Reader:
    """Gives values by the name of their option: the override if there is one, or what is configured.

    Parameters
    ----------
    overrides : dict of str to object
        By option or field; None counts as not given.
    fields : mapping of str to str
        The options that there are, and the field that each of them sets.

    Raises
    ------
    ConfigError
        If there is no such option.
    """

    def __init__(self, overrides: dict[str, Any], fields: Mapping[str, str]) -> None:
        unknown = sorted(overrides.keys() - set(fields) - set(fields.values()))
        if unknown:
            raise ConfigError(
                f"there is no option {unknown[0]!r}; the options are {', '.join(sorted(fields))}"
            )
        self._fields = fields
        self._overrides = {name: value for name, value in overrides.items() if value is not None}

    def __call__(
        self,
        name: str,
        key: str,
        convert: Callable[[Any], Any],
        *,
        within: tuple[float, float] | None = None,
    ) -> Any:
        """Return the value of an option, converted.

        Raises
        ------
        ConfigError
            If it cannot be used.
        """
        value = None
        try:
            for given in (name, self._fields[name]):
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


def _groups(value: Any) -> tuple[Group, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError("a list of groups is wanted, such as [Group('embeddings', 'model/embed*', 10)]")
    groups = tuple(
        one if isinstance(one, Group) else Group(**{key.replace("-", "_"): v for key, v in one.items()})
        for one in value
    )
    if len({group.name for group in groups}) < len(groups):
        raise ValueError("two groups have one name")
    return groups


def parse_shards(value: int | str) -> int | None:
    """Return the number of data shards that was asked for; None for ``"auto"``."""
    if value == "auto":
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ConfigError(f"num_shards must be 'auto' or a whole number of at least 1, got {value!r}")
    return value


load_defaults()
