"""A lock between live processes, which the kernel takes back from a dead one and no forked child inherits."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import platform
import stat
import struct
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from fastcheck_dask.clock import SYSTEM_CLOCK, Clock, Deadline
from fastcheck_dask.errors import TierError

_POLL_SECONDS = 0.02
#: The holder's description is padded to this, so that a longer one of a dead process is covered whole.
_CONTENT_BYTES = 1024
#: ``struct flock`` of 64-bit Linux: type, whence, start, length, process.
_FLOCK = struct.Struct("hhqqi4x")


@dataclass(frozen=True)
class Holder:
    """The process that holds a lock, for messages."""

    pid: int
    #: Clock ticks between the boot of the machine and the start of the process; None if it cannot be known.
    start_time: int | None
    host: str
    role: str
    #: When it took the lock, seconds since 1970.
    since_unix: float

    def __str__(self) -> str:
        role = f" ({self.role})" if self.role else ""
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.since_unix))
        return f"process {self.pid}{role} on {self.host} since {since}"


_Identity = tuple[int, int]


@dataclass
class _Held:
    owner: ProcessLock
    holder: Holder
    #: Closing any descriptor of the file drops the lock: all that were opened stay open until release.
    descriptors: list[int]


#: Device and inode of each lock file whose lock this process holds.
_held: dict[_Identity, _Held] = {}
#: Held while a descriptor of any lock file is opened or closed: a reader that opened the file before another
#: thread locked it, and closes it after, would drop that thread's lock.
_mutex = threading.Lock()


def _forget_in_child() -> None:
    """Forget the parent's locks: record locks are not inherited, and closing the copies leaves them alone."""
    global _mutex
    _mutex = threading.Lock()
    for held in _held.values():
        for descriptor in held.descriptors:
            with contextlib.suppress(OSError):
                os.close(descriptor)
    _held.clear()


os.register_at_fork(after_in_child=_forget_in_child)


class ProcessLock:
    """An exclusive lock on a file, held by one live process at a time, and by one holder in that process.

    The kernel releases it when the process ends, however it ends. A file that a dead process left is no
    obstacle. The file must be opened through this class only: closing any other descriptor of it in the
    process that holds the lock would drop the lock.

    Parameters
    ----------
    path : Path
        The lock file; it is made when missing, its folder must exist.
    role : str
        What the holder is, for messages (``"trainer"``, ``"agent"``).

    Notes
    -----
    May be used from any thread. After a fork the child holds nothing, and the parent goes on holding.
    """

    def __init__(self, path: Path, role: str = "") -> None:
        self.path = path
        self.role = role
        self._identity: _Identity | None = None

    @property
    def held(self) -> bool:
        """Whether this object holds the lock, in this process."""
        with _mutex:
            return self._is_held()

    def acquire(self, wait_seconds: float = 0.0, clock: Clock = SYSTEM_CLOCK) -> bool:
        """Take the lock, waiting for at most `wait_seconds`.

        Returns
        -------
        bool
            False if another process, or another holder in this one (this object included), has it still;
            :meth:`holder` then says who.

        Raises
        ------
        TierError
            If the file cannot be opened, or is not a regular file.
        """
        deadline = Deadline.after(wait_seconds, clock)
        while not self._try_acquire():
            left = deadline.left()
            if not left:
                return False
            time.sleep(min(_POLL_SECONDS, left))
        return True

    def holder(self) -> Holder | None:
        """Return the live process that holds the lock, this one included; None if nobody does.

        Raises
        ------
        TierError
            If the file is there and cannot be read.
        """
        with _mutex, _tier_errors(self.path):
            try:
                found = _open_unless_held(self.path, os.O_RDONLY)
            except FileNotFoundError:
                return None
            if isinstance(found, _Held):
                return found.holder
            try:
                return _foreign_holder(found)
            finally:
                os.close(found)

    def release(self) -> None:
        """Give the lock back. Idempotent, and nothing in a process that only forked from the holder."""
        with _mutex:
            if self._is_held() and self._identity is not None:
                for descriptor in _held.pop(self._identity).descriptors:
                    os.close(descriptor)
            self._identity = None

    def _is_held(self) -> bool:
        held = _held.get(self._identity) if self._identity is not None else None
        return held is not None and held.owner is self

    def _try_acquire(self) -> bool:
        with _mutex, _tier_errors(self.path):
            while not self._is_held():
                found = _open_unless_held(self.path, os.O_RDWR | os.O_CREAT)
                if isinstance(found, _Held):
                    return False
                try:
                    fcntl.lockf(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except (BlockingIOError, PermissionError):
                    os.close(found)
                    return False
                except OSError:
                    os.close(found)
                    raise
                if _names(self.path, found):
                    self._record(found)
                    return True
                # The former holder removed the file between our open and our lock: whoever comes next
                # would lock the new file and not meet ours.
                os.close(found)
            return False

    def _record(self, descriptor: int) -> None:
        me = os.getpid()
        holder = Holder(me, process_start_time(me), platform.node(), self.role[:200], time.time())
        content = json.dumps(asdict(holder)).encode().ljust(_CONTENT_BYTES)
        # The lock holds without its description, for which a full file system may have no room.
        with contextlib.suppress(OSError):
            os.pwrite(descriptor, content, 0)
        self._identity = _identity(os.fstat(descriptor))
        _held[self._identity] = _Held(self, holder, [descriptor])


def process_start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if it does not run.

    With the pid it names one process: pids are used again. A zombie does not run.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name, in parentheses, may itself hold spaces and parentheses.
            fields = file.read().rpartition(b")")[2].split()
    except (FileNotFoundError, ProcessLookupError):
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[19])


def process_alive(pid: int, start_time: int | None = None) -> bool:
    """Say whether the process `pid` that started at `start_time` (None: at any time) runs on this host."""
    started = process_start_time(pid)
    return started is not None and start_time in (None, started)


def _identity(info: os.stat_result) -> _Identity:
    return info.st_dev, info.st_ino


def _names(path: Path, descriptor: int) -> bool:
    """Say whether `path` still names the file that `descriptor` has open."""
    try:
        return _identity(path.lstat()) == _identity(os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextlib.contextmanager
def _tier_errors(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise TierError(f"lock file {path}: {error.strerror or error}") from error


def _open_unless_held(path: Path, flags: int) -> int | _Held:
    """Open a lock file, or return the record of our own lock on it, which opening and closing would drop."""
    with contextlib.suppress(FileNotFoundError):
        known = _held.get(_identity(path.lstat()))
        if known is not None:
            return known
    # Without O_NONBLOCK a FIFO in the file's place would make a reader wait for ever.
    descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK, 0o600)
    info = os.fstat(descriptor)
    known = _held.get(_identity(info))
    if known is not None:
        known.descriptors.append(descriptor)
        return known
    if not stat.S_ISREG(info.st_mode):
        os.close(descriptor)
        raise OSError(None, "is not a regular file")
    return descriptor


def _foreign_holder(descriptor: int) -> Holder | None:
    """Ask the kernel who holds the lock, and the file for the rest.

    Trying to lock instead would make another process's attempt fail for that moment.
    """
    asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
    kind, _, _, _, pid = _FLOCK.unpack(fcntl.fcntl(descriptor, fcntl.F_GETLK, asked))
    if kind == fcntl.F_UNLCK:
        return None
    written = _parse(os.pread(descriptor, _CONTENT_BYTES, 0))
    # The kernel's pid is 0 or less when the holder is in another pid namespace or on another host. Where they
    # differ, the file is what a dead process left, and the holder has not written yet.
    if written is not None and (pid <= 0 or written.pid == pid):
        return written
    return Holder(pid, process_start_time(pid), platform.node(), "", os.fstat(descriptor).st_mtime)


def _parse(content: bytes) -> Holder | None:
    try:
        fields = json.loads(content)
        start_time = fields["start_time"]
        return Holder(
            int(fields["pid"]),
            None if start_time is None else int(start_time),
            str(fields["host"]),
            str(fields["role"]),
            float(fields["since_unix"]),
        )
    except (ValueError, TypeError, KeyError):
        return None
