"""Chunks that a node makes of those that it holds."""

from __future__ import annotations

from typing import Any

import pytest
import xxhash
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout.casts import cast
from fastcheck_dask.node.casts import Wanted, encoded_cast
from fastcheck_dask.node.entries import accept


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_encoded_cast_decodes_to_the_cast_of_the_stored_bits(chunks: Any, dtype: str) -> None:
    bits = chunks.bits(1)
    made = cast(bits, dtype)
    wanted = Wanted("m/c/0", dtype, xxhash.xxh3_128_hexdigest(made))
    payload = encoded_cast(accept(*chunks.whole("m/c/0", bits), "node-1"), wanted)
    assert PrefixIndex(dtype=dtype).decode(payload).tobytes() == made.tobytes()


def test_encoded_cast_with_another_digest_is_refused(chunks: Any) -> None:
    entry = accept(*chunks.whole("m/c/0", chunks.bits(1)), "node-1")
    with pytest.raises(CorruptDataError, match="bfloat16 cast of chunk m/c/0 has digest"):
        encoded_cast(entry, Wanted("m/c/0", "bfloat16", "0" * 32))


def test_encoded_cast_of_a_damaged_or_another_chunk_is_refused(chunks: Any) -> None:
    descriptor, payload = chunks.whole("m/c/0", chunks.bits(1))
    wanted = Wanted("m/c/0", "bfloat16", "0" * 32)
    other = accept(descriptor._replace(dtype="float64"), payload.copy(), "node-1")
    with pytest.raises(CorruptDataError, match="is float64"):
        encoded_cast(other, wanted)
    entry = accept(descriptor, payload, "node-1")
    damaged = type(entry)(entry.descriptor, entry.payload[:-9], entry.summary)
    with pytest.raises(CorruptDataError, match="m/c/0"):
        encoded_cast(damaged, wanted)


@pytest.mark.parametrize(
    "value",
    [None, "m", [], ["m", "bfloat16"], ["m", "bfloat16", 3], ["m", "int16", "0"], [b"m", "float16", "0"]],
)
def test_wanted_of_anything_else_is_refused(value: object) -> None:
    with pytest.raises(CorruptDataError, match="a derived chunk is"):
        Wanted.from_wire(value)


def test_wanted_comes_back_from_the_wire() -> None:
    wanted = Wanted("m/c/0", "bfloat16", "0" * 32)
    assert Wanted.from_wire(list(wanted)) == wanted
