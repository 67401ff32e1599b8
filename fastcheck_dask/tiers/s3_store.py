"""A store of the object tier in S3, or in anything that speaks like it."""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any, Final, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    GenericError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)
from obstore.store import S3Store as Client

from fastcheck_dask.errors import ConfigError, ShardUnavailableError, TierError, TierFullError
from fastcheck_dask.tiers.byte_window import ByteWindow
from fastcheck_dask.tiers.s3_location import S3Location
from fastcheck_dask.tiers.store import (
    Parts,
    Payload,
    Stored,
    check_store_name,
    flat_view,
    scatter,
    write_at_once,
)

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")

#: Bytes that all requests of this process have under way: more of them would only time each other out.
WINDOW: Final = ByteWindow(64 * 2**20)
#: No request reads more: an object that is larger is read piece by piece.
READ_BYTES: Final = 16 * 2**20
#: A request may take so long, and so much more for its bytes.
_GRACE_SECONDS: Final = 20.0
_FLOOR_BYTES_PER_SECOND: Final = 1e6
_CONNECT_SECONDS: Final = 5
#: Objects up to each of these sizes share a client, whose time limit is that of the size.
_SIZE_CLASSES: Final = (256 * 2**10, READ_BYTES, 256 * 2**20)
#: 429, 5xx, resets and time-outs are tried again, with pauses that grow and jitter, for so long.
RETRY_SECONDS: Final = 120.0
#: The time decides, not their number.
_RETRIES: Final = 100_000
_FULL: Final = ("StorageFull", "InsufficientStorage", "QuotaExceeded", "EntityTooLarge", "507 ")
_MESSAGE_CHARACTERS: Final = 300


class S3Store:
    """An `ObjectStore` in a bucket.

    Credentials come from the standard variables (``AWS_ACCESS_KEY_ID``, ``AWS_SECRET_ACCESS_KEY``,
    ``AWS_SESSION_TOKEN``), a web identity, or the instance's or container's metadata service.

    Parameters
    ----------
    location : str
        ``s3://bucket/folder?endpoint=http://host:9000``; see `S3Location`.
    retry_seconds : float
        For how long a request is tried again, unless the location says so itself.

    Raises
    ------
    ConfigError
        If the location is none.

    Notes
    -----
    Nothing is asked of the store before the first call. A write is one request, whole or not at all, and
    durable when it is answered. A conditional write whose answer is lost is read back: what is there then is
    this call's own, or another's.
    """

    def __init__(self, location: str, *, retry_seconds: float = RETRY_SECONDS) -> None:
        self._place = S3Location.parse(location)
        self.location = self._place.text
        self._retry_seconds = self._place.retry_seconds or retry_seconds
        self._clients: dict[int, Client] = {}
        self._lock = threading.Lock()

    def write(self, path: str, data: Payload | Parts) -> None:
        """See `ObjectStore`."""
        self._put(path, b"".join(data) if isinstance(data, tuple) else data, mode="overwrite")

    def write_all(self, files: Iterable[tuple[str, Payload | Parts]]) -> None:
        """See `ObjectStore`."""
        write_at_once(self.write, files)

    def create(self, path: str, data: Payload) -> bool:
        """See `ObjectStore`."""
        try:
            self._put(path, data, mode="create")
        except FileExistsError:
            # An answer may have been lost, and the request repeated: then it is this call's own object.
            return self.read(path) == bytes(flat_view(data))
        return True

    def read(self, path: str) -> bytes:
        """See `ObjectStore`."""
        check_store_name(path, self.location)
        first, size, tag = self._read_part(path, 0, READ_BYTES, None)
        if len(first) == size:
            return first
        starts = range(len(first), size, READ_BYTES)
        rest = (self._read_part(path, at, min(size, at + READ_BYTES), tag)[0] for at in starts)
        return b"".join([first, *rest])

    def read_into(self, path: str, parts: Parts) -> bytes | None:
        """See `ObjectStore`."""
        data = self.read(path)
        return None if scatter(data, parts) else data

    def _read_part(self, path: str, start: int, end: int, tag: str | None) -> tuple[bytes, int, str | None]:
        """Return some bytes of an object, its size, and what tells this object from a later one."""
        client = self._client(READ_BYTES)
        options: Any = {"range": (start, end)} | ({"if_match": tag} if tag else {})

        def attempt() -> tuple[bytes, int, str | None]:
            try:
                found = obstore.get(client, path, options=options)
            except GenericError as error:
                # An empty object has no range at all.
                if "416 " in str(error) and obstore.head(client, path)["size"] == 0:
                    return b"", 0, None
                raise
            return found.bytes().to_bytes(), found.meta["size"], found.meta["e_tag"]

        with WINDOW.room(READ_BYTES):
            return self._answered(path, attempt)

    def size(self, path: str) -> int:
        """See `ObjectStore`."""
        check_store_name(path, self.location)
        return int(self._answered(path, lambda: obstore.head(self._client(0), path)["size"]))

    def exists(self, path: str) -> bool:
        """See `ObjectStore`."""
        try:
            self.size(path)
        except ShardUnavailableError:
            return False
        return True

    def list(self, prefix: str) -> tuple[str, ...]:
        """See `ObjectStore`."""
        return tuple(found.path for found in self.listing(prefix))

    def listing(self, prefix: str) -> tuple[Stored, ...]:
        """See `ObjectStore`."""
        if prefix:
            check_store_name(prefix, self.location)

        def attempt() -> tuple[Stored, ...]:
            pages = obstore.list(self._client(0), prefix or None)
            found = (meta for page in pages for meta in page)
            return tuple(sorted(Stored(m["path"], m["size"], m["last_modified"].timestamp()) for m in found))

        return self._answered(prefix, attempt)

    def temporaries(self) -> tuple[Stored, ...]:
        """See `ObjectStore`: a write is one request, so there are none."""
        return ()

    def remove_temporaries(self, *, older_than_seconds: float = 86400.0) -> int:  # noqa: ARG002
        """See `ObjectStore`: there are none."""
        return 0

    def delete(self, path: str) -> None:
        """See `ObjectStore`."""
        check_store_name(path, self.location)
        try:
            self._answered(path, lambda: obstore.delete(self._client(0), path))
        except ShardUnavailableError:
            logger.debug("%s was not in %s", path, self.location)

    def delete_tree(self, prefix: str) -> None:
        """See `ObjectStore`."""
        names = self.list(prefix)
        if names:
            self._answered(prefix, lambda: obstore.delete(self._client(0), list(names)))

    def sync(self, prefix: str) -> None:
        """See `ObjectStore`: what was answered is durable."""

    def _put(self, path: str, data: Payload, *, mode: Any) -> None:
        check_store_name(path, self.location)
        view = flat_view(data)
        client = self._client(view.nbytes)

        def attempt() -> None:
            obstore.put(client, path, view, mode=mode, use_multipart=False)

        with WINDOW.room(view.nbytes):
            self._answered(path, attempt, wanted_bytes=view.nbytes)

    def _client(self, nbytes: int) -> Client:
        """Return the client whose time limit fits requests of so many bytes."""
        fitting = next((size for size in _SIZE_CLASSES if nbytes <= size), nbytes)
        with self._lock:
            if fitting not in self._clients:
                self._clients[fitting] = self._new_client(_GRACE_SECONDS + fitting / _FLOOR_BYTES_PER_SECOND)
            return self._clients[fitting]

    def _new_client(self, seconds: float) -> Client:
        options: Any = self._place.client_options
        if not any(name in os.environ for name in ("AWS_REGION", "AWS_DEFAULT_REGION")):
            options.setdefault("region", "us-east-1")
        endpoint = options.get("endpoint", os.environ.get("AWS_ENDPOINT_URL", ""))
        try:
            return Client(
                self._place.bucket,
                prefix=self._place.prefix or None,
                config=options,
                client_options={
                    "allow_http": endpoint.startswith("http://"),
                    "timeout": timedelta(seconds=seconds),
                    "connect_timeout": timedelta(seconds=_CONNECT_SECONDS),
                },
                retry_config={
                    "max_retries": _RETRIES,
                    "retry_timeout": timedelta(seconds=self._retry_seconds),
                    "backoff": {
                        "init_backoff": timedelta(milliseconds=100),
                        "max_backoff": timedelta(seconds=10),
                        "base": 2.0,
                    },
                },
            )
        except Exception as error:  # the library's own errors have no common root that says what is meant
            raise ConfigError(f"checkpoint directory {self.location}: {_shortened(error)}") from error

    def _answered(self, path: str, attempt: Callable[[], _Result], *, wanted_bytes: int = 0) -> _Result:
        """Return what an attempt returns, or raise what its error means."""
        where = f"{path or 'the folder'} in {self.location}"
        try:
            return attempt()
        except AlreadyExistsError as error:
            raise FileExistsError(path) from error
        except FileNotFoundError as error:
            if "NoSuchBucket" in str(error):
                raise TierError(
                    f"{where}: there is no bucket {self._place.bucket!r}; make it, or name another one"
                ) from error
            raise ShardUnavailableError(f"{path} is not in {self.location}") from error
        except PreconditionError as error:
            raise TierError(f"{where}: it was replaced while it was read") from error
        except (PermissionDeniedError, UnauthenticatedError) as error:
            raise _refused(where, error) from error
        except GenericError as error:
            text = str(error)
            if "403 Forbidden" in text or "401 Unauthorized" in text:
                raise _refused(where, error) from error
            if any(sign in text for sign in _FULL):
                raise TierFullError(
                    where, wanted_bytes, 0, f"the store has no room: {_shortened(error)}"
                ) from error
            raise TierError(
                f"{where}: {_shortened(error)}; is the store up, and are endpoint and region right?"
            ) from error
        except (ValueError, OSError) as error:
            raise TierError(f"{where}: {_shortened(error)}") from error


def _refused(where: str, error: Exception) -> TierError:
    return TierError(
        f"{where}: the store refuses it ({_shortened(error)}); check AWS_ACCESS_KEY_ID, "
        "AWS_SECRET_ACCESS_KEY and what they are allowed to do, here and where the storage nodes run"
    )


def _shortened(error: Exception) -> str:
    """Return the first lines of an error: the library shows its own insides after them."""
    text = str(error).partition("\n\nDebug source")[0]
    text = " ".join(text.split())
    return text if len(text) <= _MESSAGE_CHARACTERS else f"{text[:_MESSAGE_CHARACTERS]}..."
