"""Files for TLS: wrong ones are told by name before anything is tried, and replaced ones are taken."""

from __future__ import annotations

import logging
import re
import socket
import ssl
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, NamedTuple

from fastcheck_dask.errors import ConfigError

#: OpenSSL's numbers for a certificate whose time is not yet, or over.
_OUT_OF_TIME: Final = (9, 10)
_REASON: Final = re.compile(r"(?:certificate verify failed:|\b alert) (.*?)\.? \(_ssl", re.IGNORECASE)
#: How long the question may take whether a port speaks TLS.
_PROBE_SECONDS: Final = 1.0

logger = logging.getLogger(__name__)


class TlsNames(NamedTuple):
    """What the settings are called that name the files."""

    ca: str
    cert: str
    key: str

    @classmethod
    def within(cls, section: str) -> TlsNames:
        """Return the names in a section of the settings.

        >>> TlsNames.within("fastcheck.data").key
        'fastcheck.data.tls-key'
        """
        return cls(f"{section}.tls-ca", f"{section}.tls-cert", f"{section}.tls-key")


@dataclass(frozen=True)
class Tls:
    """Files for connections by TLS; `key` may be in the file `cert` if it is None."""

    ca: str
    cert: str | None = None
    key: str | None = None
    #: Of the settings, for errors.
    names: TlsNames = field(default=TlsNames("tls-ca", "tls-cert", "tls-key"), compare=False)


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that trusts `tls.ca` alone and verifies the server's host name.

    Raises
    ------
    ConfigError
        If a file is missing or is not what it should be; the message names it.
    """
    # Not that of the system, which would trust every CA that the system knows.
    return _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT), tls)


def member_contexts(tls: Tls) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """Return contexts of a client and a server that both want a certificate of `tls.ca`, for whatever name.

    Raises
    ------
    ConfigError
        As :func:`client_context`.
    """
    client = client_context(tls)
    client.check_hostname = False
    server = _loaded(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), tls)
    server.verify_mode = ssl.CERT_REQUIRED
    return client, server


def check_files(tls: Tls) -> None:
    """Raise `ConfigError` for files that cannot be used, and for a certificate that is out of time."""
    if tls.cert is None:
        client_context(tls)
        return
    client, server = member_contexts(tls)
    client.verify_mode = ssl.CERT_NONE
    # One of another CA than the server's may be as it should.
    _refusal(tls, client, server)


def check_member(tls: Tls) -> None:
    """Raise `ConfigError` unless the files make a member of the CA: one that others of it let in."""
    if (why := _refusal(tls, *member_contexts(tls))) is not None:
        raise ConfigError(
            f"the certificate {tls.cert} ({tls.names.cert}) is refused by the CA {tls.ca} ({tls.names.ca}): "
            f"{why}; give one that this CA has signed"
        )


def _refusal(tls: Tls, client: ssl.SSLContext, server: ssl.SSLContext) -> str | None:
    """Return why the CA refuses the certificate, if it does; `ConfigError` if it is out of time.

    It shakes hands with itself: in the standard library the only way to what a certificate says.
    """
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = client.wrap_bio(wires[0], wires[1]), server.wrap_bio(wires[1], wires[0], server_side=True)
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                if error.verify_code in _OUT_OF_TIME:
                    raise ConfigError(
                        f"the certificate {tls.cert} ({tls.names.cert}): {error.verify_message}"
                    ) from error
                return error.verify_message
    return None


def _loaded(context: ssl.SSLContext, tls: Tls) -> ssl.SSLContext:
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    _read(tls.ca, tls.names.ca)
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(f"the CA file {tls.ca} ({tls.names.ca}) has no certificate: {error}") from error
    if tls.cert is None:
        return context
    key_file, key_name = (tls.cert, tls.names.cert) if tls.key is None else (tls.key, tls.names.key)
    cert, key = _read(tls.cert, tls.names.cert), _read(key_file, key_name)
    pair = f"certificate {tls.cert} ({tls.names.cert}) and key {key_file} ({key_name})"
    if b"CERTIFICATE-----" not in cert or b"PRIVATE KEY-----" not in key:
        swapped = b"PRIVATE KEY-----" in cert and b"CERTIFICATE-----" in key
        raise ConfigError(
            f"{pair}: " + ("they are swapped" if swapped else "one of them is not in PEM format")
        )

    def refuse_password() -> str:
        raise ConfigError(
            f"the key {key_file} ({key_name}) is encrypted, and nobody is there to type its password: "
            "give one without"
        )

    try:
        context.load_cert_chain(tls.cert, tls.key, password=refuse_password)
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else str(error)
        raise ConfigError(f"{pair}: {reason}") from error
    return context


def _read(name: str, setting: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(f"the file {name} ({setting}) cannot be read: {error.strerror}") from error


class Renewed:
    """Contexts of a member whose files may be replaced at any time.

    What does not fit when it is read anew (a certificate is there and its key not yet) changes nothing, and
    is said in the log.

    Parameters
    ----------
    tls : Tls
        The files, which have to fit now (`ConfigError`).
    """

    def __init__(self, tls: Tls) -> None:
        self._tls = tls
        self._seen = self._signature()
        self._contexts = member_contexts(tls)

    def contexts(self) -> tuple[ssl.SSLContext, ssl.SSLContext]:
        """Return those of a client and a server, with the newest files that fit."""
        seen = self._signature()
        if seen != self._seen:
            try:
                self._contexts = member_contexts(self._tls)
            except ConfigError as error:
                logger.warning("goes on with the TLS files that were there before: %s", error)
            self._seen = seen
        return self._contexts

    def _signature(self) -> list[tuple[int, int, int] | None]:
        files = filter(None, (self._tls.ca, self._tls.cert, self._tls.key))
        return [_state_of(Path(name)) for name in files]


def _state_of(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def reason_of(trouble: str) -> str:
    """Return what the other side has against a certificate, of what OpenSSL says; or all of it."""
    found = _REASON.search(trouble)
    return found[1] if found else trouble


def answers_tls(host: str, port: int) -> bool:
    """Ask a server whether it speaks TLS; blocks for a second at most."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    try:
        with socket.create_connection((host, port), _PROBE_SECONDS) as plain:
            context.wrap_socket(plain).close()
    except ssl.SSLError as error:
        # It wants a certificate of us, and says so in TLS.
        return "ALERT" in (error.reason or "")
    except OSError:
        return False
    return True
