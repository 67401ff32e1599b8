"""Files of a slot: opened only if they are ours, replaced whole or not at all, never without room."""

from __future__ import annotations

import contextlib
import errno
import mmap
import os
import stat
from collections.abc import Iterator
from pathlib import Path

from fastcheck_dask.errors import ConfigError, TierError, TierFullError

_ADVICE = (
    "give FastCheck a folder with more room (local_dir=...) or enlarge /dev/shm "
    "(mount -o remount,size=... /dev/shm)"
)
_NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENOMEM})
_SAFE = os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """Open a file of ours; `ConfigError` if it is not a regular file that belongs to us."""
    try:
        descriptor = os.open(path, flags | _SAFE)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EISDIR, errno.ENXIO, errno.EACCES):
            raise ConfigError(f"{path} is not a file of ours: {error.strerror}; remove it") from error
        raise
    try:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
            raise ConfigError(f"{path} is not a regular file that belongs to user {os.geteuid()}; remove it")
        yield descriptor
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def replacing(path: Path, wanted_bytes: int) -> Iterator[int]:
    """Write a file under another name, and give it its own at the end: it is whole, or nothing changed."""
    unfinished = discard_unfinished(path)
    try:
        descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | _SAFE, 0o600)
        try:
            yield descriptor
        finally:
            os.close(descriptor)
        unfinished.replace(path)
    except OSError as error:
        unfinished.unlink(missing_ok=True)
        if error.errno in _NO_ROOM:
            raise TierFullError(str(path), wanted_bytes, free_bytes(path.parent), _ADVICE) from error
        raise TierError(f"{path}: cannot be written: {error}") from error
    finally:
        unfinished.unlink(missing_ok=True)


def discard_unfinished(path: Path) -> Path:
    """Remove what a process that was killed left of `replacing`, and return where it was."""
    unfinished = path.with_name(f"{path.name}.new")
    unfinished.unlink(missing_ok=True)
    return unfinished


def write_document(path: Path, document: bytes) -> None:
    """Write a whole file. Nothing is synced: the tier outlives the process, not the machine."""
    check_room(path.parent, len(document), free_bytes(path.parent))
    with replacing(path, len(document)) as descriptor, open(descriptor, "wb", closefd=False) as file:
        file.write(document)


def read_bytes(path: Path, length: int) -> bytes | None:
    """Return the file's bytes, None if it is missing or not `length` long (then none are read)."""
    try:
        with opened(path, os.O_RDONLY) as descriptor, open(descriptor, "rb", closefd=False) as file:
            return file.read() if os.fstat(descriptor).st_size == length else None
    except FileNotFoundError:
        return None


def identity_of(path: Path) -> tuple[int, int] | None:
    """Return device and inode of what is at `path`, None if nothing is."""
    try:
        info = path.lstat()
    except FileNotFoundError:
        return None
    return info.st_dev, info.st_ino


def give_back(descriptor: int) -> None:
    """Give back what a file takes, though other processes map it: they see zeros from now on.

    The agent maps the slots for as long as it lives, and an unlinked file is there until nobody maps it.
    """
    size = os.fstat(descriptor).st_size
    # Where a file system has no holes, the last mapping decides.
    with contextlib.suppress(OSError, ValueError), mmap.mmap(descriptor, size) as whole:
        whole.madvise(mmap.MADV_REMOVE)


def free_bytes(folder: Path) -> int:
    """Return the bytes that may still be written to the file system of `folder`."""
    room = os.statvfs(folder)
    return room.f_bavail * room.f_frsize


def check_room(where: Path, wanted_bytes: int, free: int) -> None:
    """Raise `TierFullError` if `wanted_bytes` are more than are free."""
    if wanted_bytes > free:
        raise TierFullError(str(where), wanted_bytes, free, _ADVICE)
