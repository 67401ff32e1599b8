"""Real ZooKeeper servers for tests: one, or three that elect a leader; each can be killed or paused."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fastcheck_dask.coordination.zookeeper.distribution import ZooKeeperMissingError
from fastcheck_dask.coordination.zookeeper.ensemble import ZooKeeperEnsemble
from fastcheck_dask.coordination.zookeeper.server import ServerOptions, ZooKeeperServer
from fastcheck_dask.testing.certificates import Certificates

__all__ = [
    "ENFORCE_DIGEST",
    "ServerOptions",
    "ZooKeeperEnsemble",
    "ZooKeeperMissingError",
    "ZooKeeperServer",
    "sasl_options",
    "tls_options",
]

#: For servers that end sessions without credentials.
ENFORCE_DIGEST: Final = {"enforce.auth.enabled": "true", "enforce.auth.schemes": "digest"}


def tls_options(
    authority: Certificates,
    server: tuple[Path, Path],
    *,
    port: int,
    settings: Mapping[str, object] | None = None,
) -> ServerOptions:
    """Return the options of a server that also listens for TLS, to clients with a certificate of the CA.

    The plain port stays open: it tells when the server is ready.
    """
    cert, key = server
    both = cert.with_suffix(".both.pem")
    both.write_bytes(cert.read_bytes() + key.read_bytes())
    return ServerOptions(
        settings={
            "secureClientPort": port,
            "secureClientPortAddress": "127.0.0.1",
            "serverCnxnFactory": "org.apache.zookeeper.server.NettyServerCnxnFactory",
            "ssl.keyStore.location": both,
            "ssl.keyStore.type": "PEM",
            "ssl.trustStore.location": authority.ca,
            "ssl.trustStore.type": "PEM",
            **(settings or {}),
        }
    )


def sasl_options(folder: Path, users: Mapping[str, str]) -> ServerOptions:
    """Return the options of a server that knows users by SASL DIGEST-MD5, names with their passwords."""
    folder.mkdir(parents=True, exist_ok=True)
    known = "".join(f' user_{name}="{password}"' for name, password in users.items())
    module = "org.apache.zookeeper.server.auth.DigestLoginModule required"
    (folder / "jaas.conf").write_text(f"Server {{ {module}{known}; }};\n")
    return ServerOptions(
        settings={"authProvider.sasl": "org.apache.zookeeper.server.auth.SASLAuthenticationProvider"},
        jvm=(f"-Djava.security.auth.login.config={folder / 'jaas.conf'}",),
    )
