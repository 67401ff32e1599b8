"""Real ZooKeeper servers for tests: one, or three that elect a leader; each can be killed or paused."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from fastcheck_dask.coordination.zookeeper.distribution import ZooKeeperMissingError
from fastcheck_dask.coordination.zookeeper.ensemble import ZooKeeperEnsemble
from fastcheck_dask.coordination.zookeeper.server import ServerOptions, ZooKeeperServer

__all__ = [
    "ENFORCE_DIGEST",
    "Certificates",
    "ServerOptions",
    "ZooKeeperEnsemble",
    "ZooKeeperMissingError",
    "ZooKeeperServer",
    "sasl_options",
    "tls_options",
]

#: For servers that end sessions without credentials.
ENFORCE_DIGEST: Final = {"enforce.auth.enabled": "true", "enforce.auth.schemes": "digest"}
_NEW_KEY: Final = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")


class Certificates:
    """A CA, and certificates that it signs, made with the program ``openssl`` and good for a day.

    Parameters
    ----------
    folder : Path
        Where the files go; created if missing.
    """

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.ca, self._ca_key = folder / "ca.pem", folder / "ca.key"
        self._run(
            *("req", "-x509", *_NEW_KEY, "-keyout", self._ca_key, "-out", self.ca),
            *("-days", "1", "-subj", f"/CN=CA {folder.name}"),
        )

    def issue(self, name: str, *, days: int = 1, host: str = "IP:127.0.0.1") -> tuple[Path, Path]:
        """Return the files of a certificate and its key; 0 `days` make one that is over."""
        cert, key, request, extensions = (
            self._folder / f"{name}.{end}" for end in ("pem", "key", "csr", "ext")
        )
        extensions.write_text(f"subjectAltName={host}\n")
        self._run("req", "-new", *_NEW_KEY, "-keyout", key, "-out", request, "-subj", f"/CN={name}")
        self._run(
            *("x509", "-req", "-in", request, "-out", cert, "-CA", self.ca, "-CAkey", self._ca_key),
            *("-CAcreateserial", "-days", str(days), "-extfile", extensions),
        )
        return cert, key

    def _run(self, *arguments: str | Path) -> None:
        done = subprocess.run(["openssl", *arguments], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(f"openssl {arguments[0]} failed: {done.stderr}")


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
