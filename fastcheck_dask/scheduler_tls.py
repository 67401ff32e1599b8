"""TLS to Dask's scheduler, as ``distributed.comm.tls`` configures it: what does not fit is told by name."""

from __future__ import annotations

import socket
from typing import Final

import dask

from fastcheck_dask.certificates import Tls, TlsNames, answers_tls, check_member
from fastcheck_dask.errors import ConfigError

_SECTION: Final = "distributed.comm.tls"
#: How long a server may take to speak that speaks first. One without TLS does, one with TLS never.
_SPEAK_SECONDS: Final = 0.5
_CONNECT_SECONDS: Final = 2.0


def check_scheduler(address: str, *roles: str) -> None:
    """Check that Dask can reach a scheduler at ``tls://``; other addresses need nothing.

    Parameters
    ----------
    address : str
        Of the scheduler.
    *roles : str
        As what we connect: ``"client"``, ``"worker"``.

    Raises
    ------
    ConfigError
        If a file is not configured, cannot be used, or the CA did not sign the certificate.
    """
    if not address.startswith("tls://"):
        return
    for role in roles:
        names = TlsNames(f"{_SECTION}.ca-file", f"{_SECTION}.{role}.cert", f"{_SECTION}.{role}.key")
        ca, cert, key = (dask.config.get(name, None) for name in names)
        if not ca or not cert:
            raise ConfigError(
                f"the scheduler {address} speaks TLS, and Dask's configuration has no "
                f"{names.cert if ca else names.ca}: give {names.ca}, {names.cert} and {names.key} "
                "(a storage node also takes --tls-ca-file, --tls-cert and --tls-key)"
            )
        # Dask also takes what is in such files in the place of their names.
        if not any("\n" in value for value in (ca, cert, key) if value):
            check_member(Tls(ca, cert, key, names))


def mismatch(address: str) -> str | None:
    """Say so if a scheduler speaks TLS and its address says otherwise, or the reverse; blocks for seconds."""
    scheme, separator, location = address.partition("://")
    if not separator:
        scheme, location = "tcp", address
    host, _, port = location.rpartition(":")
    if scheme not in ("tcp", "tls") or not port.isdigit():
        return None
    found = _speaks(host.strip("[]"), int(port), patient=scheme == "tls")
    if found is None or found == scheme:
        return None
    what = "TLS" if found == "tls" else "no TLS"
    return f"the scheduler at {location} speaks {what}: its address is {found}://{location}, not {scheme}://"


def _speaks(host: str, port: int, *, patient: bool) -> str | None:
    try:
        with socket.create_connection((host, port), _CONNECT_SECONDS) as plain:
            plain.settimeout(_SPEAK_SECONDS)
            try:
                return "tcp" if plain.recv(1) else None
            except TimeoutError:
                if answers_tls(host, port):
                    return "tls"
            if not patient:
                return None
            # Busy, perhaps: that it speaks no TLS has to be heard.
            plain.settimeout(_CONNECT_SECONDS)
            return "tcp" if plain.recv(1) else None
    except OSError:
        return None
