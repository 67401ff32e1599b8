"""From a URL to a coordinator."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

from fastcheck_dask.coordination.access import Access
from fastcheck_dask.coordination.base import Coordinator
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.zookeeper import ZooKeeperCoordinator
from fastcheck_dask.errors import ConfigError

#: Used when the URL names none.
DEFAULT_ROOT: Final = "/fastcheck"
_WANTED: Final = (
    "sqlite:///absolute/path.db or sqlite:relative/path.db (one machine), or "
    "zk://host:port,host:port/root (ZooKeeper)"
)
_HOST: Final = re.compile(r"(?:[A-Za-z0-9._-]+|\[[0-9A-Fa-f:.]+\])(?::(\d{1,5}))?\Z")
_ROOT: Final = re.compile(r"(?:/[A-Za-z0-9][A-Za-z0-9._=+-]*)+\Z")


def connect(
    url: str,
    *,
    timeout_seconds: float = 10.0,
    session_seconds: float = 10.0,
    access: Access | None = None,
) -> Coordinator:
    """Open a coordinator.

    Parameters
    ----------
    url : str
        ``sqlite:///absolute/path.db`` or ``sqlite:relative/path.db`` for one machine,
        ``zk://host:port,host:port/root`` for a cluster.
    timeout_seconds : float
        How long each call waits for its answer, this one too.
    session_seconds : float
        After how long a process that gives no sign of life is given up.
    access : Access, optional
        Credentials and TLS for ZooKeeper; what is configured unless given.

    Raises
    ------
    ConfigError
        If the URL or a time is wrong, or what is stored there is not ours or newer.
    CoordinationError
        If the coordinator does not answer.
    """
    for name, seconds in (("timeout_seconds", timeout_seconds), ("session_seconds", session_seconds)):
        if not 0 < seconds < float("inf"):
            raise ConfigError(f"{name} must be greater than 0 and finite; got {seconds!r}")
    if url.startswith("sqlite:"):
        return EmbeddedCoordinator(
            sqlite_path(url), timeout_seconds=timeout_seconds, session_seconds=session_seconds
        )
    if url.startswith("zk:"):
        hosts, root = zookeeper_place(url)
        return ZooKeeperCoordinator(
            hosts,
            root,
            timeout_seconds=timeout_seconds,
            session_seconds=session_seconds,
            access=Access.configured() if access is None else access,
        )
    raise ConfigError(f"coordinator must be {_WANTED}; got {shown(url)!r}")


def shown(url: str) -> str:
    """Return a URL without what may be a password.

    >>> shown("zk://me:secret@host/root")
    'zk://...@host/root'
    """
    before, mark, rest = url.rpartition("@")
    return f"{before.partition(':')[0]}://...@{rest}" if mark else url


def sqlite_path(url: str) -> Path:
    """Return the file that a ``sqlite:`` URL names.

    >>> str(sqlite_path("sqlite:///data/coord.db")), str(sqlite_path("sqlite:////data/coord.db"))
    ('/data/coord.db', '/data/coord.db')
    >>> str(sqlite_path("sqlite:coord.db"))
    'coord.db'
    """
    rest = url.removeprefix("sqlite:")
    if rest.startswith("///"):
        rest = "/" + rest.lstrip("/")
    elif rest.startswith("//"):
        raise ConfigError(f"coordinator must be {_WANTED}; got {url!r}, which names a host")
    if not rest.strip("/") or rest.endswith("/") or "\0" in rest:
        raise ConfigError(f"coordinator must be {_WANTED}; got {url!r}, which names no file")
    return Path(rest)


def zookeeper_place(url: str) -> tuple[str, str]:
    """Return the servers and the root that a ``zk:`` URL names.

    >>> zookeeper_place("zk://a:2181,b/team/runs/")
    ('a:2181,b:2181', '/team/runs')
    >>> zookeeper_place("zk://a:2181")
    ('a:2181', '/fastcheck')
    """
    if not url.startswith("zk://"):
        raise ConfigError(f"coordinator must be {_WANTED}; got {shown(url)!r}")
    if "@" in url:
        raise ConfigError(
            f"coordinator must be {_WANTED}; got {shown(url)!r}: URLs are logged, so credentials go into "
            "fastcheck.coordinator.auth"
        )
    servers, slash, path = url.removeprefix("zk://").partition("/")
    root = (slash + path).rstrip("/") or DEFAULT_ROOT
    if not _ROOT.match(root):
        raise ConfigError(
            f"coordinator {url!r}: the root must be like /team/run and made of names; got {root!r}"
        )
    hosts = []
    for server in servers.split(","):
        found = _HOST.match(server)
        if not found or not 0 < int(found[1] or 2181) < 65536:
            raise ConfigError(f"coordinator must be {_WANTED}; got {url!r}, with {server!r} for a server")
        hosts.append(server if found[1] else f"{server}:2181")
    return ",".join(hosts), root
