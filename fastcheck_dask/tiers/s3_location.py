"""Where a folder in an S3-compatible store lies: ``s3://bucket/folder?endpoint=http://host:9000``. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from urllib.parse import parse_qsl, urlencode, urlsplit

from fastcheck_dask.errors import ConfigError

#: Options that a location may name, and what they are to the client library. Credentials are none of them:
#: locations are logged, and travel to the storage nodes.
OPTIONS: Final = {
    "endpoint": "endpoint",
    "region": "region",
    "virtual_hosted": "virtual_hosted_style_request",
    "skip_signature": "skip_signature",
}
#: How long requests are tried again through 429, 5xx, resets and time-outs; for this client of ours alone.
RETRY: Final = "retry_seconds"
_RETRY_SECONDS: Final = (1.0, 86400.0)
_SECRETS: Final = ("key", "secret", "token", "password", "credential")
_WANTED: Final = "s3://BUCKET/FOLDER, and after it ?endpoint=http://HOST:PORT&region=REGION where needed"


@dataclass(frozen=True)
class S3Location:
    """A folder in a bucket."""

    bucket: str
    #: Names joined by slashes; empty for the whole bucket.
    prefix: str
    #: By the names of `OPTIONS`, and `RETRY`; sorted.
    options: tuple[tuple[str, str], ...] = ()

    @classmethod
    def parse(cls, location: str) -> S3Location:
        """Read a location.

        Raises
        ------
        ConfigError
            If it is none, names an option that there is not, or carries credentials.

        Examples
        --------
        >>> S3Location.parse("s3://b/run-7/?region=eu-1&endpoint=http://h:9000").text
        's3://b/run-7?endpoint=http%3A%2F%2Fh%3A9000&region=eu-1'
        """
        parts = urlsplit(location)
        if parts.scheme != "s3" or parts.fragment:
            raise ConfigError(f"checkpoint directory {location!r}: wanted {_WANTED}")
        if "@" in parts.netloc:
            raise ConfigError(f"the checkpoint directory {cls._shown(location)} {_no_credentials()}")
        prefix = parts.path.strip("/")
        if not parts.netloc or any(part in ("", ".", "..") for part in prefix.split("/") if prefix):
            raise ConfigError(f"checkpoint directory {location!r}: wanted {_WANTED}")
        options = parse_qsl(parts.query, keep_blank_values=True)
        for name, value in options:
            cls._check_option(name, value, location)
        return cls(parts.netloc, prefix, tuple(sorted(options)))

    @staticmethod
    def _check_option(name: str, value: str, location: str) -> None:
        shown = S3Location._shown(location)
        if name not in OPTIONS and name != RETRY:
            if any(secret in name.lower() for secret in _SECRETS):
                raise ConfigError(f"the checkpoint directory {shown} {_no_credentials()}")
            raise ConfigError(
                f"checkpoint directory {shown}: there is no option {name!r}; there are "
                f"{', '.join((*OPTIONS, RETRY))}"
            )
        if name == "endpoint" and urlsplit(value).scheme not in ("http", "https"):
            raise ConfigError(f"checkpoint directory {shown}: endpoint must be http(s)://..., got {value!r}")
        if name == RETRY and _seconds(value) is None:
            least, most = _RETRY_SECONDS
            raise ConfigError(
                f"checkpoint directory {shown}: {RETRY} must be {least:g} to {most:g} seconds, got {value!r}"
            )

    @staticmethod
    def _shown(location: str) -> str:
        """Return what may be shown of a location that may carry secrets."""
        parts = urlsplit(location)
        return f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{parts.path}"

    @property
    def client_options(self) -> dict[str, str]:
        """The options as the client library calls them."""
        return {OPTIONS[name]: value for name, value in self.options if name in OPTIONS}

    @property
    def retry_seconds(self) -> float | None:
        """For how long a request is tried again; None if the location says nothing of it."""
        return next((_seconds(value) for name, value in self.options if name == RETRY), None)

    @property
    def text(self) -> str:
        """The one spelling of the location."""
        query = f"?{urlencode(self.options)}" if self.options else ""
        return f"{self.name}{query}"

    @property
    def name(self) -> str:
        """The location without its options: the same place, whichever way leads there."""
        return f"s3://{self.bucket}/{self.prefix}".rstrip("/")

    def joined(self, *names: str) -> S3Location:
        """Return a folder below."""
        return S3Location(self.bucket, "/".join(filter(None, (self.prefix, *names))), self.options)


def _seconds(value: str) -> float | None:
    """Read the value of `RETRY`; None if it is none."""
    try:
        seconds = float(value)
    except ValueError:
        return None
    least, most = _RETRY_SECONDS
    return seconds if least <= seconds <= most else None


def _no_credentials() -> str:
    return (
        "carries credentials; leave them out and set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, for the "
        "trainer and for the storage nodes"
    )
