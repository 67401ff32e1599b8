"""Who we are to a coordinator, and who else may see what we write there. Pure: opens no file."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, field
from typing import Final

from fastcheck_dask.certificates import Tls, TlsNames
from fastcheck_dask.config import AuthScheme, Settings, settings
from fastcheck_dask.errors import ConfigError

_PERMISSIONS: Final = "cdrwa"


@dataclass(frozen=True)
class Grant:
    """What another identity may do with our znodes."""

    scheme: str
    identity: str
    #: Out of ``cdrwa``: create, delete, read, write, admin.
    permissions: str

    @classmethod
    def parse(cls, text: str) -> Grant:
        """Read ``scheme:id:permissions``.

        >>> Grant.parse("x509:CN=ops,O=us:r")
        Grant(scheme='x509', identity='CN=ops,O=us', permissions='r')
        """
        scheme, _, rest = text.partition(":")
        identity, _, permissions = rest.rpartition(":")
        if not (scheme and identity and permissions) or set(permissions) - set(_PERMISSIONS):
            raise ConfigError(
                f"coordinator_acl (fastcheck.coordinator.acl): scheme:id:permissions is wanted, permissions "
                f"out of {_PERMISSIONS}, such as 'sasl:ops:r'; got {text!r}"
            )
        if scheme == "world":
            raise ConfigError(
                f"coordinator_acl (fastcheck.coordinator.acl): {text!r} would open everything to everyone; "
                "name identities, or leave coordinator_auth out"
            )
        return cls(scheme, identity, permissions)


@dataclass(frozen=True)
class Access:
    """Credentials, TLS files and grants; nothing of it by default."""

    scheme: AuthScheme = "digest"
    user: str = ""
    password: str = field(default="", repr=False)
    tls: Tls | None = None
    grants: tuple[Grant, ...] = ()

    @classmethod
    def of(cls, found: Settings) -> Access:
        """Return what the settings say.

        Raises
        ------
        ConfigError
            If they contradict each other, or need a package that is not installed.
        """
        user, password = _credentials(found)
        if found.coordinator_acl and not user:
            raise ConfigError(
                "coordinator_acl (fastcheck.coordinator.acl) needs coordinator_auth: without credentials all "
                "znodes are open to everyone"
            )
        return cls(
            found.coordinator_auth_scheme,
            user,
            password,
            tls=_tls(found),
            grants=tuple(map(Grant.parse, found.coordinator_acl)),
        )

    @classmethod
    def configured(cls) -> Access:
        """Return what the configuration of this process says."""
        return cls.of(settings())


def _credentials(found: Settings) -> tuple[str, str]:
    if found.coordinator_auth is None:
        return "", ""
    user, colon, password = found.coordinator_auth.partition(":")
    if not (user and colon and password):
        raise ConfigError(
            "coordinator_auth (fastcheck.coordinator.auth) must be user:password; what it is, is not shown"
        )
    if found.coordinator_auth_scheme == "sasl" and importlib.util.find_spec("puresasl") is None:
        raise ConfigError(
            "coordinator_auth_scheme (fastcheck.coordinator.auth-scheme) 'sasl' needs pure-sasl: "
            "pip install 'fastcheck-dask[sasl]', here and on every machine that uses the coordinator"
        )
    return user, password


def _tls(found: Settings) -> Tls | None:
    names = TlsNames.within("fastcheck.coordinator")
    ca, cert, key = found.coordinator_tls_ca, found.coordinator_tls_cert, found.coordinator_tls_key
    if (cert is None) != (key is None):
        given, missing = (names.cert, names.key) if key is None else (names.key, names.cert)
        raise ConfigError(f"{given} is given and {missing} is not")
    if ca is None and cert is not None:
        raise ConfigError(
            f"{names.cert} is given and {names.ca} is not: without the CA the server cannot be told from an "
            "impostor"
        )
    return None if ca is None else Tls(ca, cert, key, names)
