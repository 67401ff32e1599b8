"""Headers: what one write of one block can leave behind."""

from __future__ import annotations

import dataclasses

import google_crc32c
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError
from fastcheck_dask.tiers.slot_header import (
    BLOCK_BYTES,
    HEADER_BYTES,
    SlotState,
    SlotStatus,
    advance,
    block_offset,
    decode,
    emptied,
    encode,
)

_names = st.text("abcXYZ019._=+-", min_size=0, max_size=128)
_natural = st.integers(0, 2**62 - 1)
_statuses = st.builds(
    SlotStatus,
    state=st.sampled_from(SlotState),
    generation=st.none() | _natural,
    token=_names,
    tag=_names,
    data_bytes=_natural,
    sequence=_natural,
    capacity_bytes=_natural,
    document_bytes=_natural,
    document_digest=st.binary(min_size=16, max_size=16),
    writer=st.tuples(_natural, _natural),
    boot_id=st.binary(min_size=16, max_size=16),
)
_ORDER = [SlotState.WRITING, SlotState.SNAPSHOT, SlotState.SEALED, SlotState.COMMITTED]


def _written(header: bytes, status: SlotStatus) -> bytes:
    at = block_offset(status)
    return header[:at] + encode(status) + header[at + BLOCK_BYTES :]


def _life() -> list[SlotStatus]:
    """Return all that a slot goes through in two saves."""
    steps = [emptied(SlotStatus(), 2**21)]
    for number in range(2):
        for state in _ORDER:
            changes = (
                {"token": f"token{number}", "generation": number} if state is SlotState.COMMITTED else {}
            )
            steps.append(advance(steps[-1], state, where="slot", tag=f"tag{number}", **changes))
    return steps


@given(_statuses)
def test_status_encoded_and_decoded_is_the_same(status):
    assert decode(_written(bytes(HEADER_BYTES), status), "slot") == status


@given(_statuses, _statuses)
def test_decode_two_whole_blocks_takes_the_higher_sequence(first, second):
    if first.sequence != second.sequence:
        newest = max(first, second, key=lambda s: s.sequence)
        assert decode(encode(first) + encode(second), "slot") == newest


@pytest.mark.parametrize("step", range(1, 9))
def test_write_torn_at_any_byte_leaves_the_former_state(step):
    life = _life()
    header = bytes(HEADER_BYTES)
    for status in life[:step]:
        header = _written(header, status)
    former, following = life[step - 1], life[step]
    at, block = block_offset(following), encode(following)
    for cut in range(BLOCK_BYTES):
        torn = header[:at] + block[:cut] + header[at + cut :]
        whole = torn[at : at + BLOCK_BYTES] == block
        assert decode(torn, "slot") == (following if whole else former), cut
    assert decode(_written(header, following), "slot") == following


@given(st.integers(1, 8), st.lists(st.tuples(st.integers(0, 400), st.integers(0, 400)), max_size=6))
def test_write_of_any_part_of_a_block_leaves_the_former_state_or_the_new(step, parts):
    life = _life()
    header = bytes(HEADER_BYTES)
    for status in life[:step]:
        header = _written(header, status)
    at, block = block_offset(life[step]), encode(life[step])
    torn = bytearray(header)
    for start, stop in parts:
        torn[at + start : at + stop] = block[start:stop] if stop > start else b""
    torn = bytes(torn)
    whole = torn[at : at + BLOCK_BYTES] == block
    assert decode(torn, "slot") == life[step if whole else step - 1]


@given(_statuses, st.integers(0, 8 * BLOCK_BYTES - 1))
def test_decode_one_block_with_a_flipped_bit_raises(status, bit):
    block = bytearray(encode(status))
    block[bit // 8] ^= 1 << bit % 8
    with pytest.raises(CorruptDataError):
        decode(bytes(block) + bytes(BLOCK_BYTES), "slot")


@pytest.mark.parametrize("header", [b"", bytes(HEADER_BYTES), bytes(100), b"FCSLOT\r\n" * 1024])
def test_decode_without_a_whole_block_raises(header):
    with pytest.raises(CorruptDataError, match="slot7"):
        decode(header, "slot7")


def _resealed(block: bytearray) -> bytes:
    """Return the block with the checksum that fits it."""
    value = google_crc32c.extend(google_crc32c.value(bytes(block[:12])), bytes(block[16:]))
    block[12:16] = value.to_bytes(4, "little")
    return bytes(block)


def test_decode_block_of_a_newer_version_raises_unknown_format():
    newer = bytearray(encode(SlotStatus(sequence=2)))
    newer[8] = 2
    with pytest.raises(UnknownFormatError, match="slot format 2"):
        decode(_resealed(newer) + encode(SlotStatus(sequence=1)), "slot")


def test_decode_unknown_state_raises_unknown_format():
    odd = bytearray(encode(SlotStatus(sequence=2)))
    odd[24] = 9
    with pytest.raises(UnknownFormatError, match="state 9"):
        decode(_resealed(odd) + bytes(BLOCK_BYTES), "slot")


def test_header_of_version_1_is_pinned():
    status = SlotStatus(
        SlotState.COMMITTED, 7, "token", "tag", 1000, 12, 2**21, 99, bytes(range(16)), (5, 6), b"b" * 16
    )
    block = encode(status)
    assert block[:16].hex() == "4643534c4f540d0a01000000" + block[12:16].hex()
    body = "0c0000000000000004000000000000000700000000000000e8030000000000000000200000000000"
    body += "6300000000000000000102030405060708090a0b0c0d0e0f05000000000000000600000000000000" + "62" * 16
    assert block[16 : 16 + len(body) // 2].hex() == body
    assert block[112:240] == b"token".ljust(128, b"\0")
    assert block[240:] == b"tag".ljust(BLOCK_BYTES - 240, b"\0")
    assert _resealed(bytearray(block)) == block


@pytest.mark.parametrize("before", SlotState)
@pytest.mark.parametrize("after", SlotState)
def test_advance_only_in_order(before, after):
    allowed = after is SlotState.EMPTY or (before, after) in {
        (SlotState.EMPTY, SlotState.WRITING),
        (SlotState.COMMITTED, SlotState.WRITING),
        (SlotState.WRITING, SlotState.SNAPSHOT),
        (SlotState.SNAPSHOT, SlotState.SEALED),
        (SlotState.SEALED, SlotState.COMMITTED),
    }
    status = SlotStatus(state=before, sequence=4)
    if allowed:
        assert advance(status, after, where="slot") == dataclasses.replace(status, state=after, sequence=5)
    else:
        with pytest.raises(LayoutError, match=f"from {before.name} to {after.name}"):
            advance(status, after, where="slot")
