"""From what kazoo says of a failed connection to what is wrong, and what to do about it."""

from __future__ import annotations

from typing import Final

from fastcheck_dask.certificates import answers_tls, reason_of
from fastcheck_dask.coordination.access import Access

#: How a server that speaks no TLS answers the beginning of a handshake.
_NO_TLS: Final = ("eof occurred", "wrong_version_number", "record_layer", "reset by peer", "broken pipe")


def explain(trouble: str, access: Access, *, speaks_tls: bool = False) -> str:
    """Return why there is no connection. Pure.

    Parameters
    ----------
    trouble : str
        The last that kazoo said; empty if it said nothing.
    access : Access
        How we connect.
    speaks_tls : bool
        Whether a server answers to TLS.
    """
    said = trouble.lower()
    if "auth" in said or "invalid error code" in said:
        return refused(access)
    if access.tls is None:
        if speaks_tls:
            return "the port speaks TLS: give fastcheck.coordinator.tls-ca, or the port for plain clients"
    elif "certificate verify failed" in said:
        return f"the server's certificate is refused, by the CA {access.tls.ca}: {reason_of(trouble)}"
    elif "alert" in said:
        ours = (
            f"our certificate {access.tls.cert}" if access.tls.cert else "us without a certificate (tls-cert)"
        )
        return f"the server refuses {ours}: {reason_of(trouble)}"
    elif any(sign in said for sign in _NO_TLS):
        return f"the port does not speak TLS, is it the server's secureClientPort? ({trouble})"
    return f"is it running, and is the address right? ({trouble or 'no answer'})"


def refused(access: Access) -> str:
    """Return what to say when ZooKeeper does not let us in."""
    if not access.user:
        return "it demands credentials: give fastcheck.coordinator.auth (user:password)"
    who = f"user {access.user!r} ({access.scheme})"
    return f"it refuses {who}: is the password right? (fastcheck.coordinator.auth)"


def speaks_tls(hosts: str) -> bool:
    """Ask the servers whether one of them answers to TLS; blocks for a second each at most."""
    servers = (server.rpartition(":") for server in hosts.split(","))
    return any(answers_tls(host.strip("[]"), int(port)) for host, _, port in servers)
