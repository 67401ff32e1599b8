"""Names: runs, tags, tokens, and the directory name of a generation. Pure."""

from __future__ import annotations

import hashlib
import re
import secrets
from pathlib import Path
from urllib.parse import parse_qsl, urlencode, urlsplit

from fastcheck_dask.errors import ConfigError

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._=+-]{0,127}\Z")
_DIRECTORY = re.compile(r"([0-9]{8,})-([A-Za-z0-9][A-Za-z0-9._=+-]{0,127})\Z")


def check_name(value: object, what: str) -> str:
    """Return `value` if it can name a tag, run, node or rack in every tier; raise `ConfigError` if not."""
    if isinstance(value, str) and _NAME.match(value):
        return value
    raise ConfigError(
        f"{what} must be 1 to 128 of the characters A-Z a-z 0-9 . _ = + - and begin with a letter or digit; "
        f"got {value!r}"
    )


def new_token() -> str:
    """Return a token by which the author of a save recognises its own writes."""
    return secrets.token_hex(16)


def is_url(location: str) -> bool:
    """Say whether `location` is a URL (``s3://...``) and not a folder."""
    return "://" in location


def normalised(location: str) -> str:
    """Return one spelling for one place: absolute path; URL with sorted options, no slash at its end."""
    if not is_url(location):
        return str(Path(location).expanduser().resolve())
    parts = urlsplit(location)
    if parts.scheme == "file":
        return str(Path(parts.path).resolve())
    query = f"?{urlencode(sorted(parse_qsl(parts.query, keep_blank_values=True)))}" if parts.query else ""
    return f"{parts.scheme}://{parts.netloc}{parts.path.rstrip('/')}{query}"


def joined(location: str, name: str) -> str:
    """Return the location of something below a location.

    >>> joined("s3://bucket/run?region=eu", "00000001-t"), joined("/data/run", "00000001-t")
    ('s3://bucket/run/00000001-t?region=eu', '/data/run/00000001-t')
    """
    if not is_url(location):
        return f"{location}/{name}"
    base, mark, query = location.partition("?")
    return f"{base}/{name}{mark}{query}"


def parted(location: str) -> tuple[str, str]:
    """Undo :func:`joined`: return where something lies, and its name.

    >>> parted("s3://bucket/run/00000001-t?region=eu")
    ('s3://bucket/run?region=eu', '00000001-t')
    """
    base, mark, query = location.partition("?") if is_url(location) else (location, "", "")
    folder, _, name = base.rpartition("/")
    return f"{folder}{mark}{query}", name


def run_id_for(location: str) -> str:
    """Return the run id of a checkpoint directory: its last name and a hash of the whole.

    The options of a URL do not count: they say how to get there, not where it is.

    >>> run_id_for("/data/ckpts") == run_id_for("/data/x/../ckpts/")
    True
    """
    whole = normalised(location)
    if is_url(whole):
        whole = whole.partition("?")[0]
    last = re.sub(r"[^A-Za-z0-9._=+-]", "-", whole.rstrip("/").rsplit("/", 1)[-1]).lstrip("._=+-") or "run"
    return f"{last[:64]}-{hashlib.sha256(whole.encode()).hexdigest()[:12]}"


def directory_name(generation: int, tag: str) -> str:
    """Return the name of a generation's directory in the object tier; text order is commit order.

    >>> directory_name(12, "epoch3_step1200")
    '00000012-epoch3_step1200'
    """
    return f"{generation:08d}-{tag}"


def parse_directory_name(name: str) -> tuple[int, str] | None:
    """Undo :func:`directory_name`; None for a name that is not one, or is spelled otherwise."""
    found = _DIRECTORY.match(name)
    if found is None or directory_name(int(found[1]), found[2]) != name:
        return None
    return int(found[1]), found[2]
