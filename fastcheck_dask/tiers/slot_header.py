"""The header of a slot: two blocks written in turn, so that a torn write leaves the former state. Pure."""

from __future__ import annotations

import enum
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any

import google_crc32c

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError

MAGIC = b"FCSLOT\r\n"
FORMAT_VERSION = 1
BLOCK_BYTES = 4096
#: Two blocks; the data begin here.
HEADER_BYTES = 2 * BLOCK_BYTES

#: Magic, format version, crc32c of the block without these four bytes. The same in every version.
_PREFIX = struct.Struct("<8sII")
_CRC_AT = 12
#: The fields of `SlotStatus`, in its order but with sequence and state first.
_BODY = struct.Struct("<QIIqQQQ16sqq16s128s128s")


class SlotState(enum.IntEnum):
    """How far the checkpoint in a slot has come."""

    EMPTY = 0
    #: The snapshot is being copied; torn if its writer is dead.
    WRITING = 1
    #: The copy is complete; a draft of the manifest lies beside it.
    SNAPSHOT = 2
    #: The digests are known; the manifest lies beside it.
    SEALED = 3
    COMMITTED = 4


#: From which states each state may follow. What is in flight must be cleared before the slot is used again.
_BEFORE: Mapping[SlotState, frozenset[SlotState]] = MappingProxyType(
    {
        SlotState.EMPTY: frozenset(SlotState),
        SlotState.WRITING: frozenset({SlotState.EMPTY, SlotState.COMMITTED}),
        SlotState.SNAPSHOT: frozenset({SlotState.WRITING}),
        SlotState.SEALED: frozenset({SlotState.SNAPSHOT}),
        SlotState.COMMITTED: frozenset({SlotState.SEALED}),
    }
)
#: States in which nobody needs what is in the slot but a reader of an older checkpoint.
FREE = _BEFORE[SlotState.WRITING]


@dataclass(frozen=True)
class SlotStatus:
    """What the header in force says."""

    state: SlotState = SlotState.EMPTY
    #: None before the commit.
    generation: int | None = None
    token: str = ""
    tag: str = ""
    #: Bytes of the snapshot, from the start of the data.
    data_bytes: int = 0
    #: Grows with every transition, also when the file is made anew; 0 if there is no file.
    sequence: int = 0
    #: Room for data in the file.
    capacity_bytes: int = 0
    #: Length of the draft or manifest beside the slot, and its xxh3-128.
    document_bytes: int = 0
    document_digest: bytes = bytes(16)
    #: The process that began the snapshot: pid and start in clock ticks since boot.
    writer: tuple[int, int] = (0, 0)
    #: Boot of the machine under which the snapshot began.
    boot_id: bytes = bytes(16)


def advance(status: SlotStatus, to: SlotState, *, where: str, **changes: Any) -> SlotStatus:
    """Return the status that follows; `LayoutError` if `to` may not follow the present state."""
    if status.state not in _BEFORE[to]:
        raise LayoutError(f"{where}: a slot cannot go from {status.state.name} to {to.name}")
    return replace(status, state=to, sequence=status.sequence + 1, **changes)


def emptied(status: SlotStatus, capacity_bytes: int | None = None) -> SlotStatus:
    """Return the EMPTY status that follows, of a file with the same room or another."""
    room = status.capacity_bytes if capacity_bytes is None else capacity_bytes
    return SlotStatus(sequence=status.sequence + 1, capacity_bytes=room)


def block_offset(status: SlotStatus) -> int:
    """Return where the block of `status` goes: never over the block before it, which is in force."""
    return status.sequence % 2 * BLOCK_BYTES


def encode(status: SlotStatus) -> bytes:
    """Return one header block, `BLOCK_BYTES` long."""
    body = _BODY.pack(
        status.sequence,
        status.state,
        0,
        -1 if status.generation is None else status.generation,
        status.data_bytes,
        status.capacity_bytes,
        status.document_bytes,
        status.document_digest,
        *status.writer,
        status.boot_id,
        status.token.encode("ascii"),
        status.tag.encode("ascii"),
    )
    block = bytearray((_PREFIX.pack(MAGIC, FORMAT_VERSION, 0) + body).ljust(BLOCK_BYTES, b"\0"))
    block[_CRC_AT : _CRC_AT + 4] = _crc32c(block).to_bytes(4, "little")
    return bytes(block)


def decode(header: bytes, where: str) -> SlotStatus:
    """Return what is in force: the whole block with the highest sequence.

    Raises
    ------
    CorruptDataError
        If neither block is whole.
    UnknownFormatError
        If a block is of a newer format.
    """
    found = [
        status
        for start in (0, BLOCK_BYTES)
        if (status := _decode_block(header[start : start + BLOCK_BYTES], where)) is not None
    ]
    if not found:
        raise CorruptDataError(f"{where}: neither block of the header is whole")
    return max(found, key=lambda status: status.sequence)


def _crc32c(block: bytes | bytearray) -> int:
    before = google_crc32c.value(bytes(block[:_CRC_AT]))
    return int(google_crc32c.extend(before, bytes(block[_CRC_AT + 4 :])))


def _decode_block(block: bytes, where: str) -> SlotStatus | None:
    """Read one block; None if it was never written, or is torn."""
    if len(block) != BLOCK_BYTES:
        return None
    magic, version, crc = _PREFIX.unpack_from(block)
    if magic != MAGIC or crc != _crc32c(block):
        return None
    if version != FORMAT_VERSION:
        raise UnknownFormatError(
            f"{where}: slot format {version}, this FastCheck reads {FORMAT_VERSION}; "
            "upgrade it, or remove the file"
        )
    (
        sequence,
        state,
        _,
        generation,
        data_bytes,
        capacity_bytes,
        document_bytes,
        digest,
        writer_pid,
        writer_start,
        boot_id,
        token,
        tag,
    ) = _BODY.unpack_from(block, _PREFIX.size)
    if state not in SlotState.__members__.values():
        raise UnknownFormatError(f"{where}: slot state {state} is unknown to this FastCheck")
    return SlotStatus(
        state=SlotState(state),
        generation=None if generation < 0 else generation,
        token=token.rstrip(b"\0").decode("ascii"),
        tag=tag.rstrip(b"\0").decode("ascii"),
        data_bytes=data_bytes,
        sequence=sequence,
        capacity_bytes=capacity_bytes,
        document_bytes=document_bytes,
        document_digest=digest,
        writer=(writer_pid, writer_start),
        boot_id=boot_id,
    )
