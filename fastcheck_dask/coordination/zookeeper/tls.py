"""TLS to ZooKeeper: our CA only, host names verified, and wrong files told before anything is tried."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import Final

from fastcheck_dask.coordination.access import Tls
from fastcheck_dask.errors import ConfigError

#: OpenSSL's numbers for a certificate whose time is not yet, or over.
_OUT_OF_TIME: Final = (9, 10)


def client_context(tls: Tls) -> ssl.SSLContext:
    """Return a context that trusts `tls.ca` alone and verifies the server's host name.

    Raises
    ------
    ConfigError
        If a file is missing or is not what it should be; the message names it.
    """
    # Unlike kazoo's: it would trust every CA of the system, too.
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    _load(context, tls)
    return context


def check_files(tls: Tls) -> None:
    """Raise `ConfigError` for files that cannot be used, and for a client certificate that is out of time."""
    context = client_context(tls)
    if tls.cert is None:
        return
    # The only way to a certificate's dates in the standard library: shake hands with ourselves.
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    examiner = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    _load(examiner, tls)
    examiner.verify_mode = ssl.CERT_REQUIRED
    wires = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = (
        context.wrap_bio(wires[0], wires[1]),
        examiner.wrap_bio(wires[1], wires[0], server_side=True),
    )
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
            except ssl.SSLCertVerificationError as error:
                if error.verify_code in _OUT_OF_TIME:
                    raise ConfigError(
                        f"the certificate {tls.cert} (fastcheck.coordinator.tls-cert): {error.verify_message}"
                    ) from error
                # Of another CA than the server's, which may be as it should.
                return
            except ssl.SSLError:
                return


def _load(context: ssl.SSLContext, tls: Tls) -> None:
    _, cert, key = (None if name is None else _read(name, what) for name, what in _files(tls))
    try:
        context.load_verify_locations(tls.ca)
    except (ssl.SSLError, OSError) as error:
        raise ConfigError(
            f"the CA file {tls.ca} (fastcheck.coordinator.tls-ca) has no certificate: {error}"
        ) from error
    if tls.cert is None or cert is None or key is None:
        return
    pair = f"certificate {tls.cert} (fastcheck.coordinator.tls-cert) and key {tls.key} (tls-key)"
    if b"CERTIFICATE-----" not in cert or b"PRIVATE KEY-----" not in key:
        swapped = b"PRIVATE KEY-----" in cert and b"CERTIFICATE-----" in key
        raise ConfigError(
            f"{pair}: " + ("they are swapped" if swapped else "one of them is not in PEM format")
        )
    try:
        context.load_cert_chain(tls.cert, tls.key, password=_refuse_password)
    except ssl.SSLError as error:
        reason = "they do not belong together" if error.reason == "KEY_VALUES_MISMATCH" else str(error)
        raise ConfigError(f"{pair}: {reason}") from error


def _files(tls: Tls) -> tuple[tuple[str | None, str], ...]:
    return (tls.ca, "tls-ca"), (tls.cert, "tls-cert"), (tls.key, "tls-key")


def _read(name: str, what: str) -> bytes:
    try:
        return Path(name).read_bytes()
    except OSError as error:
        raise ConfigError(
            f"the file {name} (fastcheck.coordinator.{what}) cannot be read: {error.strerror}"
        ) from error


def _refuse_password() -> str:
    raise ConfigError(
        "the key (fastcheck.coordinator.tls-key) is encrypted, and nobody is there to type its "
        "password: give one without"
    )
