"""The comm scheme ``fcss://``: `fcs://` over TLS, between members of one CA.

Importing this module registers the scheme with `distributed`. The address tells whether a port speaks TLS, so
that whoever has the wrong settings is told which, and nothing is ever sent without TLS by who has them.
"""

from __future__ import annotations

import asyncio
import logging
import ssl
from typing import Any, Final

from distributed.comm.core import CommClosedError
from distributed.comm.registry import backends
from distributed.comm.tcp import TCPBackend
from tornado.iostream import IOStream, StreamClosedError

from fastcheck_dask.certificates import Renewed, Tls, TlsNames, check_member, reason_of
from fastcheck_dask.config import Settings
from fastcheck_dask.errors import ConfigError
from fastcheck_dask.tiers import wire
from fastcheck_dask.tiers.wire import TLS_SCHEME, FcsComm, FcsConnector, FcsListener, location_of

#: What the settings are called.
NAMES: Final = TlsNames.within("fastcheck.data")
#: Peers that were refused are named once each; of more than so many some twice.
_TOLD_LIMIT: Final = 1024

logger = logging.getLogger(__name__)


class RefusedError(CommClosedError):
    """One side does not let the other in."""


class DataTls:
    """TLS of the data ports: either end shows a certificate of the same CA, and wants one.

    Parameters
    ----------
    ca, cert, key : str
        Files. They may be replaced at any time: the next connection is made with the new ones.

    Raises
    ------
    ConfigError
        If they cannot be used, or are of different CAs.
    """

    def __init__(self, ca: str, cert: str, key: str) -> None:
        self.files = Tls(ca, cert, key, NAMES)
        check_member(self.files)
        self._contexts = Renewed(self.files)

    @classmethod
    def of(cls, settings: Settings) -> DataTls | None:
        """Return what the settings say; None without TLS. `ConfigError` if they are not whole."""
        ca, cert, key = settings.data_tls_ca, settings.data_tls_cert, settings.data_tls_key
        if ca is None and cert is None and key is None:
            return None
        if ca is None or cert is None or key is None:
            missing = [name for name, file in zip(NAMES, (ca, cert, key), strict=True) if file is None]
            raise ConfigError(
                f"TLS of the data ports takes all of {', '.join(NAMES)}; {' and '.join(missing)} "
                f"{'is' if len(missing) == 1 else 'are'} not given"
            )
        return cls(ca, cert, key)

    @property
    def client(self) -> ssl.SSLContext:
        """For connecting."""
        return self._contexts.contexts()[0]

    @property
    def server(self) -> ssl.SSLContext:
        """For listening."""
        return self._contexts.contexts()[1]


class FcssConnector(FcsConnector):
    """Opens connections; one attempt each."""

    prefix = f"{TLS_SCHEME}://"
    encrypted = True

    async def shake_hands(self, comm: FcsComm) -> None:
        """Hear the node first, which has taken our certificate then."""
        comm.handshake_configuration({}, await comm.read())
        await comm.write(comm.handshake_info())

    def _get_connect_args(self, **connection_args: Any) -> dict[str, Any]:
        return {"ssl_options": connection_args["tls"].client}


class FcssListener(FcsListener):
    """Accepts connections of members, and drops whoever has no certificate of the CA."""

    prefix = f"{TLS_SCHEME}://"
    encrypted = True

    def _get_server_args(self, **connection_args: Any) -> dict[str, Any]:
        self._tls: DataTls = connection_args["tls"]
        #: Whom we refused, and why.
        self._told: set[tuple[str, str]] = set()
        # Not TLS for tornado: each connection gets the context of the newest files.
        return {}

    async def _prepare_stream(self, stream: IOStream, address: str) -> IOStream | None:
        try:
            async with asyncio.timeout(wire.HANDSHAKE_SECONDS):
                return await stream.start_tls(True, self._tls.server)
        except (OSError, TimeoutError) as error:
            self._tell(address, error)
            return None

    def _tell(self, address: str, error: OSError) -> None:
        """Say once of each peer why it is refused; whoever only looks whether the port is open, never."""
        if isinstance(error, TimeoutError):
            why = "no TLS handshake in time"
        elif isinstance(error, ssl.SSLError) and not isinstance(error, ssl.SSLEOFError):
            why = _why_refused(error)
        else:
            logger.debug("%s ended the handshake: %s", address, error)
            return
        host = location_of(address).rpartition(":")[0]
        if len(self._told) >= _TOLD_LIMIT:
            self._told.clear()
        known = (host, why) in self._told
        self._told.add((host, why))
        level = logging.DEBUG if known else logging.WARNING
        logger.log(level, "refused a connection from %s: %s; said once", address, why)

    async def shake_hands(self, comm: FcsComm) -> None:
        """Speak first: who hears it knows that its certificate was taken, and who does not, why not."""
        await comm.write(comm.handshake_info())
        comm.handshake_configuration({}, await comm.read())


class FcssBackend(TCPBackend):
    """What `distributed` looks up for ``fcss://``."""

    _connector_class = FcssConnector
    _listener_class = FcssListener


backends[TLS_SCHEME] = FcssBackend()


async def open_comm(address: str, seconds: float, tls: DataTls | None = None) -> FcsComm:
    """Connect and shake hands, over TLS or not as the address says, in one attempt of at most `seconds`.

    Raises
    ------
    RefusedError
        At once if only one of both sides is for TLS, or if one refuses the certificate of the other.
    OSError
        At once if the connection is refused.
    TimeoutError
        If it took longer.
    FastCheckError
        If the peer speaks something else.
    """
    location_of(address)
    encrypted = address.startswith(f"{TLS_SCHEME}://")
    if encrypted != (tls is not None):
        raise RefusedError(_which_settings(encrypted=encrypted))
    if tls is None:
        return await wire.open_comm(address, seconds)
    try:
        return await wire.open_comm(address, seconds, FcssConnector(), tls=tls)
    except (CommClosedError, ssl.SSLError) as error:
        refused = _ssl_error_in(error)
        if refused is None:
            raise
        raise RefusedError(_why_not_let_in(refused, tls.files)) from None


def _which_settings(*, encrypted: bool) -> str:
    if encrypted:
        return f"its data port speaks TLS: give {NAMES.ca}, {NAMES.cert} and {NAMES.key} here, too"
    return (
        f"its data port speaks no TLS, and {NAMES.ca} is given here: start the node with the same settings "
        "(--data-tls-ca, --data-tls-cert, --data-tls-key)"
    )


def _ssl_error_in(error: BaseException) -> ssl.SSLError | None:
    """Return what `distributed` and tornado have put their own errors around."""
    found: BaseException | None = error
    while found is not None and not isinstance(found, ssl.SSLError):
        real = found.real_error if isinstance(found, StreamClosedError) else None
        found = real or found.__cause__ or found.__context__
    return found


def _why_not_let_in(error: ssl.SSLError, files: Tls) -> str:
    """Say what is wrong with one of the two certificates. Pure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is refused by the CA {files.ca} ({NAMES.ca}): {error.verify_message}"
    if "alert" in str(error).lower():
        return f"it refuses our certificate {files.cert} ({NAMES.cert}): {reason_of(str(error))}"
    return f"its data port does not speak TLS as it should: {reason_of(str(error))}"


def _why_refused(error: ssl.SSLError) -> str:
    """Say what is wrong with a client. Pure."""
    if isinstance(error, ssl.SSLCertVerificationError):
        return f"its certificate is not one of {NAMES.ca}: {error.verify_message}"
    if error.reason == "PEER_DID_NOT_RETURN_A_CERTIFICATE":
        return f"it shows no certificate ({NAMES.cert})"
    if "alert" in str(error).lower():
        return f"it refuses ours: {reason_of(str(error))}"
    return f"it does not speak TLS as it should: {reason_of(str(error))}"
