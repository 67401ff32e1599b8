"""From raw bits to a payload and back: the loop over blocks that both codecs share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from fastcheck_codecs import dtypes, holes
from fastcheck_codecs.bitops import (
    BLOCK_NBYTES,
    SCRATCH,
    U8,
    UNSIGNED,
    Bytes,
    Checksum,
    Words,
    as_array,
    as_bytes,
    checksum,
    fingerprint,
)
from fastcheck_codecs.errors import CodecError
from fastcheck_codecs.header import (
    ENTRY_NBYTES,
    HEADER_NBYTES,
    Block,
    CodecId,
    Entry,
    Header,
    Kind,
    Residual,
    block_count,
    max_encoded_nbytes,
    padded,
    read_header,
    write_header,
)
from fastcheck_codecs.planes import Traits, get_planes, put_planes
from fastcheck_codecs.prefixes import get_index, get_table
from fastcheck_codecs.sections import NoRoomError, Sink, Source

#: What a payload may claim to hold when the caller does not say what to expect.
MAX_UNASKED_NBYTES = 4 << 30

#: A block that does not shrink by this share is stored raw, which decodes at the speed of a copy.
_WORTHWHILE = 64
#: Bases that are larger are compared by their fingerprint first.
_GLANCE_NBYTES = 1 << 16
#: Words that stay in the cache from one kernel to the next.
_TILE = 1 << 16

#: The kind of a block once its zeros are taken out, and back.
_HOLED = {Block.PLANES: Block.HOLED_PLANES, Block.INDEX: Block.HOLED_INDEX}
_WHOLE = {holed: block for block, holed in _HOLED.items()}

Coder = Callable[[Sink, Words], None]


@dataclass(frozen=True)
class Plan:
    """How one payload is to be written.

    Attributes
    ----------
    codec : CodecId
    word_type : WordType
    coder : callable, optional
        Writes the words of one block into a sink, or raises `NoRoomError`; None for byte planes.
    block : Block
        What `coder` writes.
    base : ndarray of uint8, optional
        Bits to take the residual against; None makes a full payload.
    choose : callable, optional
        Takes the words of a block and those of the base, and says which residual suits them, and what is
        known of its planes.
    prefix_bits : int
    """

    codec: CodecId
    word_type: dtypes.WordType
    coder: Coder | None = None
    block: Block = Block.PLANES
    base: Bytes | None = None
    choose: Callable[[Words, Words], tuple[Residual, list[Traits] | None]] | None = None
    prefix_bits: int = 0


def word_type_of(array: Any, dtype: str | None) -> dtypes.WordType:
    """Choose the words for a buffer: by the configured name, else by what numpy knows of it."""
    if dtype is not None:
        return dtypes.by_name(dtype)
    return dtypes.of_numpy(array.dtype) if isinstance(array, np.ndarray) else dtypes.by_name("uint8")


def encode(raw: Bytes, plan: Plan) -> Bytes:
    """Encode into fresh memory.

    Returns
    -------
    ndarray of uint8, shape (n,)
        Owns its memory.
    """
    out = np.empty(max_encoded_nbytes(raw.size), U8)
    used = encode_into(raw, plan, out=out)
    # No view of it is alive any more, and shrinking in place spares a copy.
    out.resize(used, refcheck=False)
    return out


def encode_into(raw: Bytes, plan: Plan, *, out: Bytes) -> int:
    """Encode into the start of `out` and return the bytes used.

    Raises
    ------
    CodecError
        If `out` is smaller than `max_encoded_nbytes`, is read-only or overlaps the input, or if base and
        input differ in size.
    """
    base = plan.base
    _check_room(raw, base, out)
    width = plan.word_type.word_nbytes
    body = raw.size - raw.size % width
    position = HEADER_NBYTES + ENTRY_NBYTES * block_count(raw.size, width)
    entries = []
    raw_crc, base_crc = Checksum(), Checksum()
    for start in range(0, body, BLOCK_NBYTES):
        words = raw[start : min(start + BLOCK_NBYTES, body)].view(UNSIGNED[width])
        residual, traits = Residual.NONE, None
        if base is not None and plan.choose is not None:
            base_words = base[start : start + words.nbytes].view(words.dtype)
            residual, traits = plan.choose(words, base_words)
            words = _residual(words, base_words, residual, crcs=(raw_crc, base_crc))
        entry = _encode_block(words, (residual, traits), plan, out=out[position:])
        if residual is Residual.NONE:
            # Last, as other kernels fetch from memory at a higher rate.
            raw_crc.update(raw[start : min(start + BLOCK_NBYTES, body)])
        out[position + entry.length : position + padded(entry.length)] = 0
        position += padded(entry.length)
        entries.append(entry)
    raw_crc.update(raw[body:])
    if base is not None:
        base_crc.update(base[body:])
    header = Header(
        kind=Kind.FULL if base is None else Kind.DELTA,
        codec=plan.codec,
        word_type=plan.word_type,
        prefix_bits=plan.prefix_bits,
        raw_nbytes=raw.size,
        raw_crc=raw_crc.value,
        base_crc=base_crc.value,
        tail=_tail(raw[body:], None if base is None else base[body:]),
        entries=tuple(entries),
        base_fingerprint=0 if base is None else fingerprint(base),
    )
    write_header(out, header)
    return position


def encode_raw_into(raw: Any, out: Any, *, dtype: str) -> int:
    """Write a full payload without looking for anything to compress, at little more than the cost of a copy.

    Parameters
    ----------
    raw : buffer
        Contiguous, of any dtype.
    out : buffer
        Of at least ``max_encoded_nbytes`` bytes; receives the payload, which either codec decodes.
    dtype : str
        True dtype of the data, for the header.

    Returns
    -------
    int
        The bytes used. Blocks of zeros take none.

    Raises
    ------
    CodecError
        As :func:`encode_into` does.
    """
    plan = Plan(codec=CodecId.PREFIX_INDEX, word_type=dtypes.by_name(dtype), coder=_store)
    return encode_into(as_bytes(raw), plan, out=as_bytes(out))


def _store(_sink: Sink, _words: Words) -> None:
    """Have a block stored as it is."""
    raise NoRoomError


def _check_room(raw: Bytes, base: Bytes | None, out: Bytes) -> None:
    if base is not None and base.size != raw.size:
        raise CodecError(f"the base has {base.size} bytes, the data {raw.size}")
    if out.size < max_encoded_nbytes(raw.size):
        raise CodecError(f"out has {out.size} bytes, {max_encoded_nbytes(raw.size)} may be needed")
    if not out.flags.writeable:
        raise CodecError("out is read-only")
    if np.may_share_memory(out, raw) or (base is not None and np.may_share_memory(out, base)):
        raise CodecError("out overlaps the data or its base")


def _tail(raw: Bytes, base: Bytes | None) -> bytes:
    return (raw if base is None else np.bitwise_xor(raw, base)).tobytes()


def _residual(words: Words, base: Words, residual: Residual, *, crcs: tuple[Checksum, Checksum]) -> Words:
    """Compute the residual into scratch memory, and both checksums while the bits are in the cache."""
    operation = np.subtract if residual is Residual.DIFFERENCE else np.bitwise_xor
    out = SCRATCH.room("words", words.size, words.dtype)
    for start in range(0, words.size, _TILE):
        tile = slice(start, start + _TILE)
        # First, as it fetches from memory at a higher rate than a checksum does.
        operation(words[tile], base[tile], out=out[tile])
        crcs[0].update(words[tile].view(U8))
        crcs[1].update(base[tile].view(U8))
    return out


def _encode_block(
    words: Words, choice: tuple[Residual, list[Traits] | None], plan: Plan, *, out: Bytes
) -> Entry:
    residual, traits = choice
    if not words.flags.aligned:
        target = SCRATCH.room("words", words.size, words.dtype)
        np.copyto(target, words)
        words = target
    if not words[words.size // 2] and not words.any():
        return Entry(0, Block.ELIDED, residual)
    sink = Sink(out[: words.nbytes - words.nbytes // _WORTHWHILE - 1])
    signed, block, coded = residual is Residual.DIFFERENCE, plan.block, words
    try:
        if block in _HOLED and holes.pay(words, signed=signed):
            coded, block, traits = holes.take_out(sink, words), _HOLED[block], None
        if plan.coder is None:
            put_planes(sink, coded, traits, signed=signed)
        else:
            plan.coder(sink, coded)
    except NoRoomError:
        out[: words.nbytes] = words.view(U8)
        return Entry(words.nbytes, Block.RAW, residual)
    return Entry(sink.position, block, residual)


def decode(payload: Any, *, out: Any, base: Bytes | None, verify: bool) -> Any:
    """Decode a payload of either codec.

    Parameters
    ----------
    payload : buffer
    out : buffer, optional
        Writable and contiguous, of exactly the raw size; unspecified after an error.
    base : ndarray of uint8, optional
    verify : bool
        Compare the crc32c of the result.

    Returns
    -------
    buffer
        `out`, or a fresh ndarray of uint8, shape (raw size,).

    Raises
    ------
    CodecError
        If the payload is damaged, or needs a base and gets none or another one.
    """
    source = as_bytes(payload)
    header = read_header(source)
    base = _base(header, base)
    if base is not None:
        _look_at_base(header, base, verify=verify)
    target = _target(header.raw_nbytes, out)
    if np.may_share_memory(target, source) or (base is not None and np.may_share_memory(target, base)):
        raise CodecError("out overlaps the payload or the base")
    crc = Checksum() if verify else None
    _decode_blocks(source, header, target=target, base=base, crc=crc)
    if crc is not None and (got := crc.value) != header.raw_crc:
        # Right bits come from the right base alone: its own checksum only says which of the two is wrong.
        if base is not None:
            _check_base(header, base)
        raise CodecError(f"damaged payload: crc32c {got:#010x} once decoded, expected {header.raw_crc:#010x}")
    return target if out is None else out


def _base(header: Header, base: Bytes | None) -> Bytes | None:
    """Return the base that a payload needs, as far as its size shows; None if it stands alone."""
    if header.kind is Kind.FULL:
        return None
    if base is None:
        raise CodecError("this payload is a delta, and no base was given")
    if base.size != header.raw_nbytes:
        raise CodecError(f"wrong base: it has {base.size} bytes, the delta {header.raw_nbytes}")
    return base


def _look_at_base(header: Header, base: Bytes, *, verify: bool) -> None:
    """Refuse other bases before anything is written.

    Where the result is verified, a glance is enough for now: a base that differs elsewhere shows in the end.
    """
    if not verify or base.size < _GLANCE_NBYTES or header.base_fingerprint != fingerprint(base):
        _check_base(header, base)


def _check_base(header: Header, base: Bytes) -> None:
    got = checksum(base)
    if got != header.base_crc:
        raise CodecError(f"wrong base: its crc32c is {got:#010x}, the delta wants {header.base_crc:#010x}")


def _target(raw_nbytes: int, out: Any) -> Bytes:
    if out is None:
        if raw_nbytes > MAX_UNASKED_NBYTES:
            raise CodecError(f"payload claims {raw_nbytes} bytes; pass out for over {MAX_UNASKED_NBYTES}")
        return np.empty(raw_nbytes, U8)
    array = as_array(out)
    if array.nbytes != raw_nbytes:
        raise CodecError(f"out has {array.nbytes} bytes, the payload decodes to {raw_nbytes}")
    if not array.flags.writeable:
        raise CodecError("out is read-only")
    return as_bytes(array)


def _decode_blocks(
    source: Bytes, header: Header, *, target: Bytes, base: Bytes | None, crc: Checksum | None
) -> None:
    """Decode into `target`, and let `crc` see it."""
    width = header.word_type.word_nbytes
    body = target.size - target.size % width
    position = HEADER_NBYTES + ENTRY_NBYTES * len(header.entries)
    for entry, start in zip(header.entries, range(0, body, BLOCK_NBYTES), strict=True):
        out = target[start : min(start + BLOCK_NBYTES, body)].view(UNSIGNED[width])
        # The scratch buffer is needed only where the destination is odd memory.
        words = out if out.flags.aligned else SCRATCH.room("words", out.size, out.dtype)
        stored = source[position : position + padded(entry.length)]
        _decode_block(entry, stored, header, out=words)
        base_words = None if base is None else base[start : start + out.nbytes].view(out.dtype)
        _apply(entry.residual, words, base_words, out=out)
        if crc is not None:
            crc.update(out.view(U8))
        position += padded(entry.length)
    tail = np.frombuffer(header.tail, U8)
    if base is not None:
        tail = np.bitwise_xor(tail, base[body:])
    target[body:] = tail
    if crc is not None:
        crc.update(target[body:])


def _decode_block(entry: Entry, stored: Bytes, header: Header, *, out: Words) -> None:
    source = Source(stored)
    if entry.block is Block.ELIDED:
        out[:] = 0
    elif entry.block is Block.RAW:
        if entry.length != out.nbytes:
            raise CodecError(f"damaged block: {entry.length} raw bytes, expected {out.nbytes}")
        out.view(U8)[:] = source.take(entry.length)
    elif entry.block in _WHOLE and out.itemsize >= holes.WIDE:
        bits, kept = holes.get_bits(source, out.size)
        dense = SCRATCH.room("dense", kept, out.dtype)
        _decode_words(source, _WHOLE[entry.block], entry.residual, header, out=dense)
        holes.put_back(bits, dense, out=out)
    else:
        _decode_words(source, entry.block, entry.residual, header, out=out)
    source.finish()


def _decode_words(source: Source, block: Block, residual: Residual, header: Header, *, out: Words) -> None:
    floats = header.word_type.exponent_bits
    if block is Block.PLANES:
        get_planes(source, out=out, signed=residual is Residual.DIFFERENCE)
    elif block is Block.INDEX and floats:
        get_index(source, exponent_bits=floats, out=out)
    elif block is Block.TABLE and floats and 7 <= header.prefix_bits <= 16:
        get_table(source, prefix_bits=header.prefix_bits, out=out)
    else:
        raise CodecError(f"damaged header: a {block.name} block of {header.word_type.name}")


def _apply(residual: Residual, words: Words, base: Words | None, *, out: Words) -> None:
    if residual is Residual.NONE or base is None:
        if words is not out:
            np.copyto(out, words)
    elif residual is Residual.XOR:
        np.bitwise_xor(words, base, out=out)
    else:
        np.add(words, base, out=out)


def undo(payload: Any, *, current: Bytes, verify: bool) -> Bytes:
    """Take a delta back: from the bits that it leads to, return those that it was made against.

    Parameters
    ----------
    payload : buffer
        A delta.
    current : ndarray of uint8, shape (raw size,)
        What the delta decodes to.
    verify : bool
        Compare the crc32c of the result.

    Returns
    -------
    ndarray of uint8, shape (raw size,)
        In memory of its own.

    Raises
    ------
    CodecError
        If the payload is damaged or is no delta, or `current` are other bits than it leads to.
    """
    source = as_bytes(payload)
    header = read_header(source)
    if header.kind is Kind.FULL or any(entry.residual is Residual.NONE for entry in header.entries):
        raise CodecError("this payload stands alone: it does not say what was before it")
    if current.size != header.raw_nbytes:
        raise CodecError(f"these bits have {current.size} bytes, the delta leads to {header.raw_nbytes}")
    bits = _target(header.raw_nbytes, None)
    # Without a base the residuals are left as they are.
    _decode_blocks(source, header, target=bits, base=None, crc=None)
    width = header.word_type.word_nbytes
    body = bits.size - bits.size % width
    for entry, start in zip(header.entries, range(0, body, BLOCK_NBYTES), strict=True):
        words = bits[start : min(start + BLOCK_NBYTES, body)].view(UNSIGNED[width])
        after = current[start : start + words.nbytes].view(words.dtype)
        operation = np.subtract if entry.residual is Residual.DIFFERENCE else np.bitwise_xor
        operation(after, words, out=words)
    np.bitwise_xor(bits[body:], current[body:], out=bits[body:])
    if verify and (got := checksum(bits)) != header.base_crc:
        raise CodecError(
            f"damaged delta, or other bits than it leads to: crc32c {got:#010x} once undone, expected "
            f"{header.base_crc:#010x}"
        )
    return bits
