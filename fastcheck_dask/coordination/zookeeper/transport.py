"""What is put under kazoo: TLS of ours, no secrets in the log, and the reason why there is no connection."""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Any, Final

from kazoo.client import KazooClient
from kazoo.handlers.threading import SequentialThreadingHandler
from kazoo.protocol.serialization import SASL, Auth
from kazoo.security import ACL, Id, Permissions, make_acl, make_digest_acl

from fastcheck_dask.certificates import Tls, check_files, client_context
from fastcheck_dask.coordination.access import Access, Grant
from fastcheck_dask.errors import ConfigError

#: Kazoo's own pauses grow so long that after an outage of 30 s it came back 12 s late.
_CONNECTION_RETRY: Final = {
    "max_tries": -1,
    "delay": 0.05,
    "backoff": 1.5,
    "max_delay": 0.5,
    "max_jitter": 0.3,
}
#: How long a server may be silent while we connect. Kazoo waits for it as long as the session lasts: for a
#: machine that is off, and for a connection that the server forgot (one that starts does, if it comes early).
_PATIENCE_SECONDS: Final = (1.0, 5.0)
_PERMISSIONS: Final = {
    "c": Permissions.CREATE,
    "d": Permissions.DELETE,
    "r": Permissions.READ,
    "w": Permissions.WRITE,
    "a": Permissions.ADMIN,
}
_TROUBLE: Final = ("Connection dropped", "Connection time-out", "Cannot resolve", "AUTH_FAILED", "Unhandled")


class Journal(logging.Logger):
    """Kazoo's log, which goes on to ours, and keeps what kazoo says nowhere else: why it has no connection.

    One for each session, so it is in no registry. Lets no secret pass.
    """

    def __init__(self) -> None:
        super().__init__(f"{__name__}.kazoo")
        self._ours = self.parent = logging.getLogger(__name__)
        #: The last trouble, empty since the last connection.
        self.trouble = ""

    def isEnabledFor(self, level: int) -> bool:  # noqa: N802
        """Say whether a record of that level is looked at."""
        # Below DEBUG kazoo shows the passwords of sessions.
        return level >= logging.WARNING or (level >= logging.DEBUG and self._ours.isEnabledFor(level))

    def handle(self, record: logging.LogRecord) -> None:
        """Note a record, and log it if that was asked for and it holds no secret."""
        if str(record.msg).startswith(_TROUBLE):
            cause = record.exc_info[1] if record.exc_info else None
            trouble = record.getMessage() + (f": {cause!r}" if cause else "")
            # It tries twice a second for as long as an outage lasts.
            if trouble == self.trouble and record.levelno <= logging.WARNING:
                record.levelno, record.levelname = logging.DEBUG, "DEBUG"
            self.trouble = trouble
        secret = isinstance(record.args, tuple) and any(isinstance(a, Auth | SASL) for a in record.args)
        if not secret and self._ours.isEnabledFor(record.levelno):
            super().handle(record)


class _Handler(SequentialThreadingHandler):  # type: ignore[misc]
    """Kazoo's threads, with connections of ours, and less patience with servers that say nothing."""

    def __init__(self, tls: Tls | None, patience_seconds: float) -> None:
        super().__init__()
        self._tls = tls
        self._patience = patience_seconds

    def create_connection(
        self, address: tuple[str, int], hostname: str | None = None, timeout: float | None = None, **_: Any
    ) -> socket.socket:
        """Connect to one server; every error is an `OSError`, which kazoo takes for a reason to try again."""
        plain = socket.create_connection(address, self._at_most(timeout))
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if self._tls is None:
            return plain
        try:
            # Read anew each time: certificates are replaced while we run.
            return client_context(self._tls).wrap_socket(plain, server_hostname=hostname)
        except ConfigError as error:
            plain.close()
            raise OSError(0, str(error)) from error
        except BaseException:
            plain.close()
            raise

    def select(
        self,
        reading: Sequence[Any],
        writing: Sequence[Any],
        failing: Sequence[Any],
        timeout: float | None = None,
    ) -> tuple[list[Any], list[Any], list[Any]]:
        """Wait for sockets; for one alone, which is where an answer is due, only as long as our patience."""
        # Between answers kazoo waits for two: for the server's and for its own, which wakes it.
        due = len(reading) + len(writing) == 1
        ready: tuple[list[Any], list[Any], list[Any]] = super().select(
            reading, writing, failing, self._at_most(timeout) if due else timeout
        )
        return ready

    def _at_most(self, timeout: float | None) -> float:
        return self._patience if timeout is None else min(timeout, self._patience)


def make_client(hosts: str, access: Access, *, session_seconds: float, journal: Journal) -> KazooClient:
    """Return a client of kazoo that is not connected yet.

    Raises
    ------
    ConfigError
        If a file for TLS cannot be used.
    """
    if access.tls is not None:
        check_files(access.tls)
    options: dict[str, Any] = {}
    if access.user and access.scheme == "sasl":
        options["sasl_options"] = {
            "mechanism": "DIGEST-MD5",
            "username": access.user,
            "password": access.password,
        }
    elif access.user:
        options["auth_data"] = {("digest", f"{access.user}:{access.password}")}
    return KazooClient(
        hosts=hosts,
        timeout=session_seconds,
        connection_retry=dict(_CONNECTION_RETRY),
        handler=_Handler(access.tls, patience_seconds(session_seconds, hosts.count(",") + 1)),
        default_acl=acl_of(access),
        logger=journal,
        **options,
    )


def patience_seconds(session_seconds: float, servers: int) -> float:
    """Return how long a server may be silent while we connect: all are asked twice before a session ends."""
    least, most = _PATIENCE_SECONDS
    return min(most, max(least, session_seconds / (2 * max(servers, 2))), session_seconds / servers)


def acl_of(access: Access) -> list[ACL] | None:
    """Return who may do what with our znodes; None when everybody may do everything."""
    if not access.user:
        return None
    if access.scheme == "sasl":
        ours = make_acl("sasl", access.user, all=True)
    else:
        ours = make_digest_acl(access.user, access.password, all=True)
    return [ours, *map(_granted, access.grants)]


def _granted(grant: Grant) -> ACL:
    permissions = sum(_PERMISSIONS[letter] for letter in set(grant.permissions))
    return ACL(permissions, Id(grant.scheme, grant.identity))


def open_to_all(acl: list[ACL]) -> bool:
    """Say whether somebody without credentials may do anything with a znode."""
    return any(one.id.scheme == "world" for one in acl)
