"""What a store of the object tier is: bytes under names, relative to one location."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from fastcheck_dask.errors import ConfigError

#: Files that are written at once.
_WRITERS = 16

Payload = bytes | bytearray | memoryview | npt.NDArray[np.uint8]
#: What lies in several places and is one in the store.
Parts = tuple[Payload, ...]


class Stored(NamedTuple):
    """What a listing says of one object."""

    path: str
    nbytes: int
    #: Seconds, by the clock of the store.
    modified_unix: float


class ObjectStore(Protocol):
    """Bytes under names like ``a/b/c``, relative to one location.

    Every method blocks, may be called from any thread and process, and raises `TierError` when the store
    cannot do it (`TierFullError` when there is no room), and `ConfigError` for a name that leads out of the
    location. A call that fails or is killed leaves what was there, never a part of the new.
    """

    location: str

    def write(self, path: str, data: Payload | Parts) -> None:
        """Put `data` under `path`, in place of what was there, all at once."""
        ...

    def write_all(self, files: Iterable[tuple[str, Payload | Parts]]) -> None:
        """Do what :meth:`write` does for each, in any order; after an error some are there, and others not.

        `files` is gone through by the calling thread. The data are used until this returns or raises.
        """
        ...

    def create(self, path: str, data: Payload) -> bool:
        """Put `data` under `path`, durably, if nothing is there; return whether it was this call that did."""
        ...

    def read(self, path: str) -> bytes:
        """Return what is under `path`; `ShardUnavailableError` if nothing is."""
        ...

    def read_into(self, path: str, parts: Parts) -> bytes | None:
        """Fill `parts`, one after the other, with what is under `path`, if it is as long as they together.

        Returns
        -------
        bytes or None
            None if they were filled; else what is there, as of `read`.
        """
        ...

    def size(self, path: str) -> int:
        """Return the bytes under `path`; `ShardUnavailableError` if nothing is there."""
        ...

    def exists(self, path: str) -> bool:
        """Say whether something is under `path`."""
        ...

    def list(self, prefix: str) -> tuple[str, ...]:
        """Return all names that begin with ``prefix/``, sorted; all there are for an empty prefix."""
        ...

    def listing(self, prefix: str) -> tuple[Stored, ...]:
        """Return what :meth:`list` names, with sizes and times; asks once, whatever the number of objects."""
        ...

    def temporaries(self) -> tuple[Stored, ...]:
        """Return the unfinished writes of the whole location, those under way included."""
        ...

    def remove_temporaries(self, *, older_than_seconds: float = 86400.0) -> int:
        """Remove unfinished writes that nothing was added to for so long; return how many."""
        ...

    def delete(self, path: str) -> None:
        """Remove what is under `path`, if anything."""
        ...

    def delete_tree(self, prefix: str) -> None:
        """Remove everything whose name begins with ``prefix/``, unfinished writes included."""
        ...

    def sync(self, prefix: str) -> None:
        """Return when `prefix`, and all below it that was written before, would survive a loss of power."""
        ...


def write_at_once(
    write: Callable[[str, Payload | Parts], None], files: Iterable[tuple[str, Payload | Parts]]
) -> None:
    """Write files by several threads: each waits for the store, and not for the others."""
    with ThreadPoolExecutor(_WRITERS) as writers:
        for written in [writers.submit(write, *file) for file in files]:
            written.result()


def check_store_name(path: str, location: str) -> None:
    """Raise `ConfigError` for a name that leads out of a location, or that no store can have."""
    for part in path.split("/"):
        if part in ("", ".", "..") or "\0" in part:
            raise ConfigError(f"{path!r} cannot name something in {location}: wrong part {part!r}")


def flat_view(data: Payload) -> memoryview:
    """Return the bytes of `data`, flat and without a copy."""
    if isinstance(data, np.ndarray):
        if data.dtype != np.uint8 or not data.flags.c_contiguous:
            raise ConfigError(
                f"wanted contiguous bytes, got an array of {data.dtype} with strides {data.strides}"
            )
        return data.reshape(-1).data
    view = memoryview(data)
    return view.cast("B") if view.nbytes else memoryview(b"")


def flat_views(data: Payload | Parts) -> list[memoryview]:
    """Return the bytes of every part, flat and without a copy."""
    return [flat_view(part) for part in (data if isinstance(data, tuple) else (data,))]


def scatter(data: bytes, parts: Parts) -> bool:
    """Copy `data` into `parts`, one after the other; False, and nothing is changed, if the lengths differ."""
    views = flat_views(parts)
    if len(data) != sum(view.nbytes for view in views):
        return False
    start = 0
    for view in views:
        view[:] = data[start : start + view.nbytes]
        start += view.nbytes
    return True
