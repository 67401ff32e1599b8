"""A store of the object tier in a folder: a local disk, or one that several machines mount."""

from __future__ import annotations

import errno
import io
import logging
import os
import shutil
import stat
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import chain, islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from fastcheck_dask.errors import ConfigError, ShardUnavailableError, TierError, TierFullError
from fastcheck_dask.ids import normalised
from fastcheck_dask.tiers.new_file import TEMPORARY_PREFIX, NewFile
from fastcheck_dask.tiers.store import Parts, Payload, Stored, check_store_name, flat_views

logger = logging.getLogger(__name__)

_Result = TypeVar("_Result")
_Item = TypeVar("_Item")

#: How often a call is made that fails for a reason that may pass, and the first pause; the next are doubled.
ATTEMPTS = 5
FIRST_PAUSE_SECONDS = 0.05
#: Threads that wait for the disk, which makes one wait of several; and how long the first wait takes at least
#: where there is a disk: in memory, one thread is faster.
_WAITERS = 6
_WAIT_SECONDS = 0.0001
#: Files of one `write_all` that are written and not waited for yet.
_OPEN_FILES = 64

_TRANSIENT = frozenset({errno.EIO, errno.EAGAIN, errno.EBUSY, errno.ESTALE, errno.ETIMEDOUT})
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_ABSENT = (FileNotFoundError, NotADirectoryError)
_MOVE = "a file stands where a folder is needed, or the reverse: move it away"
_ADVICE = {
    errno.EACCES: "give the user that runs FastCheck the right to write there",
    errno.EPERM: "give the user that runs FastCheck the right to write there",
    errno.EROFS: "the file system is mounted read-only: remount it, or choose another checkpoint directory",
    errno.ENOTDIR: _MOVE,
    errno.EEXIST: _MOVE,
    errno.EISDIR: _MOVE,
    errno.ENAMETOOLONG: "the name is too long for this file system: shorten the keys of the state",
    errno.ENOENT: "the folder vanished: look whether its file system is still mounted",
    errno.EFBIG: "files may not be that large here: raise the limit (ulimit -f), or use smaller chunks",
}


class _Begun(NamedTuple):
    """A file that is written, and not in its place yet."""

    target: Path
    views: Sequence[memoryview]
    new: NewFile


class FolderStore:
    """An `ObjectStore` in a folder: a local disk, or one that several machines mount.

    Parameters
    ----------
    location : str
        Path of the folder; made if missing.
    sleep : callable
        Takes seconds; called between attempts.

    Raises
    ------
    ConfigError
        If something that is not a folder is there.
    TierError
        If the folder cannot be made.

    Notes
    -----
    A file is written under a temporary name in its own folder, fsynced through the very descriptor that
    wrote it (the only one that is sure to learn of a failed write-back), and then renamed. So each process
    makes its own files durable before `write` returns. Folders are left to :meth:`sync`: an fsync of a
    folder covers the names that any process of this machine put into it, and an NFS server has stored the
    names already.
    """

    def __init__(self, location: str, *, sleep: Callable[[float], None] = time.sleep) -> None:
        self.location = normalised(location)
        self._root = Path(self.location)
        self._sleep = sleep
        try:
            missing = [folder for folder in (self._root, *self._root.parents) if not folder.exists()]
            self._root.mkdir(parents=True, exist_ok=True)
            for folder in missing:
                _fsync_folder(folder.parent)
        except (FileExistsError, NotADirectoryError) as error:
            raise ConfigError(
                f"checkpoint directory {self.location}: {error.filename} is a file, wanted a folder; "
                "move it away, or choose another checkpoint directory"
            ) from error
        except OSError as error:
            raise _explained(error, self._root, wanted_bytes=0) from error

    def write(self, path: str, data: Payload | Parts) -> None:
        """See :meth:`ObjectStore.write`; the bytes are durable on return, the name after :meth:`sync`."""
        target, views = self._resolve(path), flat_views(data)

        def attempt() -> None:
            self._new_file(target, views).replace()

        self._repeat(attempt, target, wanted_bytes=sum(view.nbytes for view in views))

    def write_all(self, files: Iterable[tuple[str, Payload | Parts]]) -> None:
        """See :meth:`ObjectStore.write_all`; as :meth:`write`. A file is written before the next is taken.

        None is waited for before all are written (or as many as may be open): the disk stores them meanwhile.
        """
        files = iter(files)
        while self._write_some(islice(files, _OPEN_FILES)):
            pass

    def _write_some(self, files: Iterable[tuple[str, Payload | Parts]]) -> bool:
        """Write files, all open at once; return whether there were any."""
        begun: list[_Begun] = []
        try:
            for path, data in files:
                begun.append(self._begin(self._resolve(path), flat_views(data)))
            # The last one first: when it is stored, the others all but are.
            _for_each(self._finish, begun[::-1])
        finally:
            for file in begun:
                file.new.discard()
        return bool(begun)

    def create(self, path: str, data: Payload) -> bool:
        """See :meth:`ObjectStore.create`; needs a file system with hard links."""
        target, views = self._resolve(path), flat_views(data)

        def attempt() -> bool:
            return self._new_file(target, views).link()

        created = self._repeat(attempt, target, wanted_bytes=sum(view.nbytes for view in views))
        self.sync(path)
        return created

    def read(self, path: str) -> bytes:
        """See :meth:`ObjectStore.read`."""
        target = self._resolve(path)
        return self._repeat(lambda: self._present(path, target.read_bytes), target)

    def read_into(self, path: str, parts: Parts) -> bytes | None:
        """See :meth:`ObjectStore.read_into`."""
        target, views = self._resolve(path), flat_views(parts)
        return self._repeat(lambda: self._present(path, lambda: _read_into(target, views)), target)

    def size(self, path: str) -> int:
        """See :meth:`ObjectStore.size`."""
        target = self._resolve(path)
        found = self._repeat(lambda: self._present(path, target.stat), target)
        if not stat.S_ISREG(found.st_mode):
            raise ShardUnavailableError(f"{path} in {self.location} is not a file")
        return found.st_size

    def exists(self, path: str) -> bool:
        """See :meth:`ObjectStore.exists`."""
        try:
            self.size(path)
        except ShardUnavailableError:
            return False
        return True

    def list(self, prefix: str) -> tuple[str, ...]:
        """See :meth:`ObjectStore.list`."""
        top = self._resolve(prefix) if prefix else self._root

        def attempt() -> tuple[str, ...]:
            self._require_root()
            return tuple(sorted(str(found.relative_to(self._root)) for found in _files(top)))

        return self._repeat(attempt, top)

    def listing(self, prefix: str) -> tuple[Stored, ...]:
        """See :meth:`ObjectStore.listing`."""
        return self._described(self._resolve(prefix) if prefix else self._root, temporaries=False)

    def temporaries(self) -> tuple[Stored, ...]:
        """See :meth:`ObjectStore.temporaries`."""
        return self._described(self._root, temporaries=True)

    def _described(self, top: Path, *, temporaries: bool) -> tuple[Stored, ...]:
        def attempt() -> tuple[Stored, ...]:
            self._require_root()
            described = []
            for found in _files(top, temporaries=temporaries):
                # It may have been removed, or renamed, since its folder was read.
                with suppress(*_ABSENT):
                    status = found.stat()
                    described.append(
                        Stored(str(found.relative_to(self._root)), status.st_size, status.st_mtime)
                    )
            return tuple(sorted(described))

        return self._repeat(attempt, top)

    def delete(self, path: str) -> None:
        """See :meth:`ObjectStore.delete`."""
        target = self._resolve(path)

        def attempt() -> None:
            with suppress(*_ABSENT):
                target.unlink()

        self._repeat(attempt, target)

    def delete_tree(self, prefix: str) -> None:
        """See :meth:`ObjectStore.delete_tree`."""
        target = self._resolve(prefix)

        def attempt() -> None:
            try:
                shutil.rmtree(target)
            except FileNotFoundError:
                # Somebody else removes it too; what is left, if anything, is for the next attempt.
                if os.path.lexists(target):
                    raise OSError(errno.EBUSY, "changes while it is removed", str(target)) from None

        self._repeat(attempt, target)

    def sync(self, prefix: str) -> None:
        """See :meth:`ObjectStore.sync`: fsync every folder at and below `prefix`, and those above it."""
        top = self._resolve(prefix) if prefix else self._root
        above = [p for p in top.parents if p == self._root or self._root in p.parents]
        try:
            below = [Path(folder) for folder, _, _ in os.walk(top, onerror=_reraise_unless_absent)]
            _for_each(_fsync_folder, below + above)
        except OSError as error:
            # Not repeated: the kernel reports a failed write-back once, a second fsync would succeed in vain.
            raise _explained(error, top, wanted_bytes=0) from error

    def remove_temporaries(
        self, *, older_than_seconds: float = 86400.0, now: Callable[[], float] = time.time
    ) -> int:
        """Remove what killed writers left in the whole location; return how many files.

        A file younger than `older_than_seconds` may belong to a live writer, and stays.
        """
        removed = 0
        for found in _files(self._root, temporaries=True):
            with suppress(OSError):
                if now() - found.stat().st_mtime >= older_than_seconds:
                    found.unlink()
                    removed += 1
        return removed

    def _resolve(self, path: str) -> Path:
        check_store_name(path, self.location)
        if any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/")):
            raise ConfigError(f"{path!r} cannot name something in {self.location}: {TEMPORARY_PREFIX}")
        try:
            os.fsencode(path)
        except UnicodeEncodeError as error:
            raise ConfigError(f"{path!r} cannot be a file name: {error}") from error
        return self._root / path

    def _require_root(self) -> None:
        # A location that was unmounted must not look like one in which nothing was saved yet.
        if not self._root.is_dir():
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(self._root))

    def _present(self, path: str, action: Callable[[], _Result]) -> _Result:
        try:
            return action()
        except _ABSENT as error:
            self._require_root()
            raise ShardUnavailableError(f"{path} is not in {self.location}") from error

    def _new_file(self, target: Path, views: Sequence[memoryview]) -> NewFile:
        try:
            return NewFile(target, views)
        except FileNotFoundError:
            self._require_root()
            target.parent.mkdir(parents=True, exist_ok=True)
            return NewFile(target, views)

    def _begin(self, target: Path, views: Sequence[memoryview]) -> _Begun:
        nbytes = sum(view.nbytes for view in views)
        new = self._repeat(lambda: self._new_file(target, views), target, wanted_bytes=nbytes)
        return _Begun(target, views, new)

    def _finish(self, begun: _Begun) -> None:
        target, views, new = begun
        # What could not be stored is written anew: a second fsync of the same file would succeed in vain.
        files = chain([new], iter(lambda: self._new_file(target, views), None))
        nbytes = sum(view.nbytes for view in views)
        self._repeat(lambda: next(files).replace(), target, wanted_bytes=nbytes)

    def _repeat(self, attempt: Callable[[], _Result], target: Path, *, wanted_bytes: int = 0) -> _Result:
        """Return the result of `attempt`, called again while its error may pass."""
        pause = FIRST_PAUSE_SECONDS
        for left in range(ATTEMPTS - 1, -1, -1):
            try:
                return attempt()
            except OSError as error:
                if error.errno not in _TRANSIENT or not left:
                    raise _explained(error, target, wanted_bytes=wanted_bytes) from error
                logger.warning("%s: %s; trying again, %d attempts left", target, error.strerror, left)
                self._sleep(pause)
                pause *= 2
        raise AssertionError("the last attempt returns or raises")


def _for_each(wait: Callable[[_Item], None], items: Sequence[_Item]) -> None:
    """Wait for each item; an error is raised when nobody waits any more."""
    started = time.perf_counter()
    for number, item in enumerate(items):
        wait(item)
        if time.perf_counter() - started > (number + 1) * _WAIT_SECONDS:
            with ThreadPoolExecutor(_WAITERS) as waiters:
                for _ in waiters.map(wait, items[number + 1 :]):
                    pass
            return


def _read_into(target: Path, views: list[memoryview]) -> bytes | None:
    with open(target, "rb", buffering=0) as file:
        if os.fstat(file.fileno()).st_size == sum(view.nbytes for view in views) and all(
            _filled(file, view) for view in views
        ):
            return None
        file.seek(0)
        return file.read()


def _filled(file: io.FileIO, view: memoryview) -> bool:
    """Fill a view from a file; False if the file ends before."""
    done = 0
    while done < view.nbytes:
        count = file.readinto(view[done:])
        if not count:
            return False
        done += count
    return True


def _files(top: Path, *, temporaries: bool = False) -> Iterator[Path]:
    """Yield the files at and below `top`: the finished ones, or the temporary ones."""
    for folder, _, names in os.walk(top, onerror=_reraise_unless_absent):
        for name in names:
            if name.startswith(TEMPORARY_PREFIX) == temporaries:
                yield Path(folder, name)


def _reraise_unless_absent(error: OSError) -> None:
    if not isinstance(error, _ABSENT):
        raise error


def _fsync_folder(folder: Path) -> None:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems know no fsync of folders: with them, names are stored at once.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(descriptor)


def _explained(error: OSError, target: Path, *, wanted_bytes: int) -> TierError:
    """Say what could not be done where, and what to do about it."""
    number = error.errno or 0
    if number in _FULL:
        quota = " (a quota is used up)" if number == errno.EDQUOT else ""
        return TierFullError(
            str(target),
            wanted_bytes,
            _free_bytes(target),
            f"free some room, remove old checkpoints, or choose another checkpoint directory{quota}",
        )
    advice = _ADVICE.get(number, "look at the file system and its log")
    if number in _TRANSIENT:
        advice = f"the file system failed again and again; {advice}"
    elif number in (errno.ENOTSUP, errno.EMLINK, errno.EXDEV):
        advice = "this file system has no hard links, by which commits are made: choose another one"
    return TierError(f"{target}: {error.strerror or error} ({errno.errorcode.get(number, number)}); {advice}")


def _free_bytes(target: Path) -> int:
    """Return the room that is left where `target` would lie, symbolic links and mounts followed."""
    for folder in target.parents:
        with suppress(OSError):
            found = os.statvfs(folder)
            return found.f_bavail * found.f_frsize
    return 0
