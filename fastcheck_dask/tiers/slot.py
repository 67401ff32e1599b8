"""One slot: a file in shared memory with room for one checkpoint, and what is in it."""

from __future__ import annotations

import contextlib
import functools
import mmap
import os
import threading
import uuid
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt
import xxhash

from fastcheck_dask.errors import (
    CorruptDataError,
    LayoutError,
    ShardUnavailableError,
    TierError,
    UnknownFormatError,
)
from fastcheck_dask.ids import check_name
from fastcheck_dask.tiers.process_lock import process_alive, process_start_time
from fastcheck_dask.tiers.slot_files import (
    check_room,
    discard_unfinished,
    free_bytes,
    give_back,
    identity_of,
    opened,
    read_bytes,
    replacing,
    write_document,
)
from fastcheck_dask.tiers.slot_header import (
    BLOCK_BYTES,
    FREE,
    HEADER_BYTES,
    SlotState,
    SlotStatus,
    advance,
    block_offset,
    decode,
    emptied,
    encode,
)

#: The room of a slot is a multiple of this, so that a state that grows by little fits where it was.
CAPACITY_STEP_BYTES = 2 * 2**20
#: A header that is written while it is read may look torn; this many times in a row, it is damaged.
_READ_ATTEMPTS = 8


class Slot:
    """Room for one checkpoint in a file that is mapped shared, and the state of what is in it.

    One process at a time may write: it calls `reserve`, `begin`, copies into `data`, and calls `complete`;
    from then on the slot is the business of whoever encodes it, who calls `seal` and `commit`. Others read.
    Any method may be called from any thread; none waits for another process.

    Parameters
    ----------
    path : Path
        The slot's file; the draft and the manifest lie beside it. Nothing is opened yet.
    readonly : bool
        Refuse transitions, and map the data read-only.
    """

    def __init__(self, path: Path, *, readonly: bool = False) -> None:
        self.path = path
        self._readonly = readonly
        self._lock = threading.RLock()
        self._map: mmap.mmap | None = None
        #: Device and inode of the mapped file.
        self._mapped: tuple[int, int] | None = None

    @classmethod
    def open(cls, path: Path, *, readonly: bool = False) -> Slot:
        """Return the slot at `path` with its data mapped; raises as `data` does."""
        slot = cls(path, readonly=readonly)
        with slot._lock:
            slot._attach()
        return slot

    def close(self) -> None:
        """Release the mapping; it stays while an array made from it is in use. Idempotent."""
        with self._lock:
            mapped, self._map, self._mapped = self._map, None, None
            if mapped is not None:
                # A view is still in use: the mapping goes with the last of them.
                with contextlib.suppress(BufferError):
                    mapped.close()

    def __enter__(self) -> Slot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def status(self) -> SlotStatus:
        """What the file at `path` says now: EMPTY if there is none.

        Raises
        ------
        CorruptDataError
            If the header or the length of the file is damaged; `clear` makes the slot usable again.
        UnknownFormatError
            If a newer version wrote it.
        ConfigError
            If the file is not ours.
        """
        try:
            with opened(self.path, os.O_RDONLY) as descriptor:
                return _read_status(descriptor, self.path)
        except FileNotFoundError:
            return SlotStatus()

    @property
    def torn(self) -> bool:
        """Whether a snapshot was begun here and can never become complete, because its writer is dead."""
        status = self.status
        pid, start_time = status.writer
        return status.state is SlotState.WRITING and not (
            status.boot_id == _boot_id() and process_alive(pid, start_time)
        )

    @property
    def replaced(self) -> bool:
        """Whether `path` names another file than the mapped one: arrays got earlier show old bytes."""
        with self._lock:
            return self._mapped is not None and self._mapped != identity_of(self.path)

    @property
    def data(self) -> npt.NDArray[np.uint8]:
        """The room for data, mapped; a file that replaced the mapped one is mapped anew.

        Returns
        -------
        ndarray of uint8, shape (capacity_bytes,)
            A view of the shared memory, not a copy; read-only in a read-only slot. It stays valid after
            `close`, and keeps the memory until it is dropped.

        Raises
        ------
        ShardUnavailableError
            If the slot has no file.
        CorruptDataError
            If the file is damaged.

        Notes
        -----
        For a writer all pages are faulted in here, once, and not while training waits for the copy.
        """
        with self._lock:
            if self._map is None or self.replaced:
                self._attach()
            assert self._map is not None
            return np.frombuffer(self._map, np.uint8, offset=HEADER_BYTES)

    def reserve(self, capacity: int, *, mapped: bool = True) -> None:
        """See to it that the slot has room for `capacity` bytes, and map it unless it is only to be written.

        A slot that has the room keeps its file and what is in it. A smaller one is made anew, EMPTY; other
        processes' mappings of the old file stay valid and show zeros, and are `replaced` there.

        Raises
        ------
        TierFullError
            If there is not enough room. The slot is as it was; or EMPTY and without a file, if its old file
            had to go for the new one and its memory is not given back.
        TierError
            If the file cannot be made for another reason.
        LayoutError
            If the slot would have to be made anew while a save of it is in flight.
        """
        if capacity < 0:
            raise LayoutError(f"{self.path}: cannot reserve {capacity} bytes")
        with self._lock:
            self._check_writable()
            status = self.status
            if not status.sequence or status.capacity_bytes < capacity:
                if status.state not in FREE:
                    raise LayoutError(
                        f"{self.path}: cannot grow to {capacity} bytes while in {status.state.name}"
                    )
                steps = max(1, -(-capacity // CAPACITY_STEP_BYTES))
                try:
                    self._make_anew(status, steps * CAPACITY_STEP_BYTES)
                except OSError as error:
                    raise TierError(f"{self.path}: cannot be made: {error}") from error
            if mapped and (self._map is None or self.replaced):
                self._attach()

    def write(self, offset: int, bits: npt.NDArray[np.uint8]) -> None:
        """Copy bits to the data at `offset` without mapping them.

        Raises
        ------
        LayoutError
            If they do not fit, or the slot is read-only.
        TierError
            If they cannot be written.
        """
        self._check_writable()
        left = memoryview(bits)
        try:
            with opened(self.path, os.O_RDWR) as descriptor:
                # The room was allocated when the slot was made: nothing is written beyond it.
                room = os.fstat(descriptor).st_size - HEADER_BYTES - offset
                if not 0 <= left.nbytes <= room or offset < 0:
                    raise LayoutError(f"{self.path}: {left.nbytes} bytes at {offset}, where {room} fit")
                at = HEADER_BYTES + offset
                while left:
                    written = os.pwrite(descriptor, left, at)
                    left, at = left[written:], at + written
        except OSError as error:
            raise TierError(f"{self.path}: cannot be written: {error}") from error

    def begin(self, token: str, tag: str) -> None:
        """EMPTY or COMMITTED becomes WRITING: what was in the slot is given up.

        Raises
        ------
        LayoutError
            In another state, or without a file: `reserve` first.
        ConfigError
            If `token` or `tag` is not a name.
        """
        check_name(token, "token")
        check_name(tag, "tag")
        me = os.getpid()
        self._go(
            SlotState.WRITING,
            token=token,
            tag=tag,
            generation=None,
            data_bytes=0,
            document_bytes=0,
            document_digest=bytes(16),
            writer=(me, process_start_time(me) or 0),
            boot_id=_boot_id(),
        )
        # After the header: a process that dies in between leaves documents that no header speaks of.
        self._drop_documents()

    def complete(self, document: bytes, data_bytes: int, *, token: str | None = None) -> None:
        """WRITING becomes SNAPSHOT: the copy is whole, and `document` is the draft of its manifest.

        Raises
        ------
        LayoutError
            In another state, if the slot belongs to another `token` than given, if `data_bytes` do not fit,
            or if the file was replaced since the data were copied.
        TierFullError
            If there is no room for the draft; the slot stays WRITING.
        """
        with self._lock:
            status = self._check(SlotState.SNAPSHOT, token)
            if not 0 <= data_bytes <= status.capacity_bytes:
                raise LayoutError(f"{self.path}: {data_bytes} bytes of data in {status.capacity_bytes}")
            if self.replaced:
                raise LayoutError(f"{self.path}: the file was replaced while the snapshot was copied")
            write_document(self._document("draft"), document)
            self._go(SlotState.SNAPSHOT, token=status.token, data_bytes=data_bytes, **_described(document))

    def seal(self, manifest: bytes, *, token: str | None = None) -> None:
        """SNAPSHOT becomes SEALED: the digests of the data are known and stand in `manifest`.

        Raises
        ------
        LayoutError
            In another state, or if the slot belongs to another `token` than given.
        TierFullError
            If there is no room for the manifest; the slot stays SNAPSHOT.
        """
        with self._lock:
            status = self._check(SlotState.SEALED, token)
            write_document(self._document("manifest"), manifest)
            self._go(SlotState.SEALED, token=status.token, **_described(manifest))
            self._document("draft").unlink(missing_ok=True)

    def commit(self, generation: int, *, token: str | None = None) -> None:
        """SEALED becomes COMMITTED: the checkpoint is visible as `generation`.

        Raises
        ------
        LayoutError
            In another state, or if the slot belongs to another `token` than given.
        """
        if not 0 <= generation < 2**62:
            raise LayoutError(f"{self.path}: {generation} is no generation")
        with self._lock:
            status = self._check(SlotState.COMMITTED, token)
            self._go(SlotState.COMMITTED, token=status.token, generation=generation)

    def clear(self) -> None:
        """Make the slot EMPTY, whatever it was. The memory is kept, unless the file is damaged."""
        with self._lock:
            self._check_writable()
            try:
                status = self.status
            except CorruptDataError:
                self.close()
                self.path.unlink(missing_ok=True)
            else:
                if status.sequence:
                    self._write_header(emptied(status))
            self._drop_documents()

    def read_draft(self) -> bytes:
        """Return the draft of a SNAPSHOT, verified; `CorruptDataError` as in `read_manifest`."""
        return self._read_document("draft", frozenset({SlotState.SNAPSHOT}))

    def read_manifest(self) -> bytes:
        """Return the manifest of a SEALED or COMMITTED checkpoint, verified.

        Raises
        ------
        CorruptDataError
            If the slot is in another state (torn, empty), or the manifest is missing or damaged.

        Notes
        -----
        The slot may be used again at any time: who reads the data after this compares `status.sequence`
        before and after, or verifies the digests in the manifest.
        """
        return self._read_document("manifest", frozenset({SlotState.SEALED, SlotState.COMMITTED}))

    def _attach(self) -> None:
        self.close()
        protection = mmap.PROT_READ if self._readonly else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_SHARED if self._readonly else mmap.MAP_SHARED | mmap.MAP_POPULATE
        try:
            with opened(self.path, os.O_RDONLY if self._readonly else os.O_RDWR) as descriptor:
                status = _read_status(descriptor, self.path)
                size = HEADER_BYTES + status.capacity_bytes
                self._map = mmap.mmap(descriptor, size, flags=flags, prot=protection)
                info = os.fstat(descriptor)
                self._mapped = info.st_dev, info.st_ino
        except FileNotFoundError as error:
            raise ShardUnavailableError(f"{self.path}: this host holds no such slot") from error
        except OSError as error:
            raise TierError(f"{self.path}: cannot be mapped: {error}") from error

    def _make_anew(self, status: SlotStatus, capacity_bytes: int) -> None:
        """Replace the file by a larger one; the old one goes first, so that memory never holds both."""
        file_bytes = HEADER_BYTES + capacity_bytes
        folder = self.path.parent
        discard_unfinished(self.path)
        old_bytes = self.path.lstat().st_blocks * 512 if status.sequence else 0
        check_room(folder, file_bytes, free_bytes(folder) + old_bytes)
        if status.sequence:
            self.close()
            with opened(self.path, os.O_RDWR) as old:
                self.path.unlink()
                give_back(old)
            self._drop_documents()
        # Again: not every file system gives the old memory back while another process maps it.
        check_room(folder, file_bytes, free_bytes(folder))
        fresh = emptied(status, capacity_bytes)
        with replacing(self.path, file_bytes) as descriptor:
            # Allocated now, or an error now: a sparse file would end a writer by SIGBUS in mid-copy.
            os.posix_fallocate(descriptor, 0, file_bytes)
            os.pwrite(descriptor, encode(fresh), block_offset(fresh))

    def _check(self, to: SlotState, token: str | None) -> SlotStatus:
        """Return the present status if the transition is in order."""
        self._check_writable()
        status = self.status
        if not status.sequence:
            raise LayoutError(f"{self.path}: no file yet; reserve first")
        advance(status, to, where=str(self.path))
        if token is not None and token != status.token:
            raise LayoutError(f"{self.path}: the slot belongs to {status.token!r}, not to {token!r}")
        return status

    def _go(self, to: SlotState, *, token: str, **changes: Any) -> None:
        with self._lock:
            status = self._check(to, None if to is SlotState.WRITING else token)
            self._write_header(advance(status, to, where=str(self.path), token=token, **changes))

    def _write_header(self, status: SlotStatus) -> None:
        with opened(self.path, os.O_RDWR) as descriptor:
            written = os.pwrite(descriptor, encode(status), block_offset(status))
        if written != BLOCK_BYTES:
            raise TierError(f"{self.path}: {written} of {BLOCK_BYTES} header bytes could be written")

    def _check_writable(self) -> None:
        if self._readonly:
            raise LayoutError(f"{self.path}: this slot was opened read-only")

    def _document(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}")

    def _drop_documents(self) -> None:
        for kind in ("draft", "manifest"):
            self._document(kind).unlink(missing_ok=True)
            discard_unfinished(self._document(kind))

    def _read_document(self, kind: str, states: frozenset[SlotState]) -> bytes:
        while True:
            status = self.status
            if status.state not in states:
                raise CorruptDataError(f"{self.path}: no {kind} while the slot is {status.state.name}")
            data = read_bytes(self._document(kind), status.document_bytes)
            if data is not None and xxhash.xxh3_128_digest(data) == status.document_digest:
                return data
            # Otherwise the slot went on between the two reads, and is looked at again.
            if self.status.sequence == status.sequence:
                raise CorruptDataError(f"{self._document(kind)}: missing or damaged; the slot cannot be used")


def _described(document: bytes) -> dict[str, Any]:
    return {"document_bytes": len(document), "document_digest": xxhash.xxh3_128_digest(document)}


def _read_status(descriptor: int, path: Path) -> SlotStatus:
    for attempt in range(_READ_ATTEMPTS):
        try:
            status = decode(os.pread(descriptor, HEADER_BYTES, 0), str(path))
            break
        except UnknownFormatError:
            raise
        except CorruptDataError:
            if attempt == _READ_ATTEMPTS - 1:
                raise
    size = os.fstat(descriptor).st_size
    if size != HEADER_BYTES + status.capacity_bytes:
        raise CorruptDataError(
            f"{path}: {size:,} bytes, its header says {HEADER_BYTES + status.capacity_bytes:,}"
        )
    if status.state is SlotState.SNAPSHOT and status.boot_id != _boot_id():
        # On a disk the header may have been written back before the data were when the machine went down, and
        # no digest would tell: only a sealed snapshot outlives a boot.
        return replace(status, state=SlotState.WRITING)
    return status


@functools.cache
def _boot_id() -> bytes:
    try:
        return uuid.UUID(Path("/proc/sys/kernel/random/boot_id").read_text().strip()).bytes
    except (OSError, ValueError):
        return bytes(16)
