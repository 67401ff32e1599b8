"""A file that is being made: under a temporary name until it is whole, and durable, and gets its own."""

from __future__ import annotations

import ctypes
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

#: Files that a writer has not finished; nobody else reads or lists them.
TEMPORARY_PREFIX = ".tmp-"
#: Of `sync_file_range`: begin to store what is not stored, and wait for nothing.
_BEGIN_WRITE_BACK = 2


class NewFile:
    """A file beside the place where it is to be. Ends by :meth:`replace`, :meth:`link` or :meth:`discard`.

    Parameters
    ----------
    target : Path
        Its place, in a folder that is there.
    views : sequence of memoryview
        What is in it.

    Raises
    ------
    OSError
        If it cannot be written; nothing is left.

    Notes
    -----
    The bytes are on their way to the disk when this returns, so that who makes several files and then
    waits for each waits for the disk once. It is the descriptor that wrote them which waits: the only one
    that is sure to learn of a failed write-back.
    """

    def __init__(self, target: Path, views: Sequence[memoryview]) -> None:
        self._target = target
        #: Where it lies until it gets its place; None when nothing lies there any more.
        self._path: str | None = f"{target.parent}/{TEMPORARY_PREFIX}{secrets.token_hex(8)}"
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        self._descriptor: int | None = os.open(self._path, flags, 0o666)
        try:
            for view in views:
                _write(self._descriptor, view)
            _begin_write_back(self._descriptor)
        except OSError:
            self.discard()
            raise

    def replace(self) -> None:
        """Wait until it is durable, and put it in place of what was there."""
        try:
            os.replace(self._settled(), self._target)
            self._path = None
        except OSError:
            self.discard()
            raise

    def link(self) -> bool:
        """Wait until it is durable, and put it in its place if nothing is there; return whether it is."""
        try:
            path = self._settled()
            try:
                os.link(path, self._target)
            except FileExistsError:
                # An NFS server may have made the link and lost the answer: then it is this very file.
                return os.path.samestat(os.stat(path), os.stat(self._target))
        finally:
            self.discard()
        return True

    def discard(self) -> None:
        """Remove it, unless it got its place. Idempotent."""
        self._close()
        if self._path is not None:
            with suppress(OSError):
                os.unlink(self._path)
            self._path = None

    def _settled(self) -> str:
        """Wait until it is durable; return where it lies."""
        assert self._descriptor is not None
        assert self._path is not None
        try:
            os.fsync(self._descriptor)
        finally:
            self._close()
        return self._path

    def _close(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is not None:
            os.close(descriptor)


def _write(descriptor: int, view: memoryview) -> None:
    written = 0
    while written < view.nbytes:
        written += os.write(descriptor, view[written:])


def _begin_write_back(descriptor: int) -> None:
    # It is a hint: whether it succeeded is told by the fsync that follows.
    if _sync_file_range is not None:
        _sync_file_range(descriptor, 0, 0, _BEGIN_WRITE_BACK)


_sync_file_range = getattr(ctypes.CDLL(None), "sync_file_range", None)
if _sync_file_range is not None:
    _sync_file_range.argtypes = (ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint)
