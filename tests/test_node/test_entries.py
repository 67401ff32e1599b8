"""Entries: what is accepted, and what deltas merge to."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from fastcheck_codecs import CodecError
from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, ShardCorruptError
from fastcheck_dask.node.entries import accept, accept_whole, extend, is_intact, merge


def entry(chunk: Any) -> Any:
    return accept(*chunk, "node-1")


@settings(max_examples=40, deadline=None)
@given(sizes=st.lists(st.integers(1, 3000), min_size=2, max_size=5), seed=st.integers(0, 2**32))
def test_merge_of_deltas_of_any_size_gives_the_newest_bits(make_author: Any, sizes: Any, seed: int) -> None:
    rng = np.random.default_rng(seed)
    states = [rng.integers(0, 256, n, dtype=np.uint8) for n in sizes]
    author = make_author(None)
    chain = (entry(author.chunks({"k": states[0]}, {"k"})[0]),)
    for old, new in pairwise(states):
        author.state = {"k": old}
        chain = (*chain, entry(author.chunks({"k": new}, set())[0]))
    merged = merge(chain)
    assert accept_whole(merged.descriptor, merged.payload, "x").descriptor.raw_nbytes == sizes[-1]
    assert is_intact(merged)
    assert merged.descriptor.digest == chain[-1].descriptor.digest


def test_merge_with_another_base_is_refused(chunks: Any) -> None:
    base, other = chunks.bits(1), chunks.bits(2)
    chain = (entry(chunks.whole("k", other)), entry(chunks.delta("k", chunks.nudged(base, 3), base)))
    with pytest.raises((CodecError, CorruptDataError)):
        merge(chain)


def test_merge_to_another_digest_is_refused(chunks: Any) -> None:
    base = chunks.bits(1)
    descriptor, payload = chunks.delta("k", chunks.nudged(base, 3), base)
    lying = entry((descriptor._replace(digest="0" * 32), payload))
    with pytest.raises(CorruptDataError, match="its author gave"):
        merge((entry(chunks.whole("k", base)), lying))


@pytest.mark.parametrize(
    "change",
    [{"nbytes": 1}, {"crc32c": 1}, {"raw_nbytes": 1}],
)
def test_accept_of_payload_unlike_its_descriptor_raises(chunks: Any, change: dict[str, int]) -> None:
    descriptor, payload = chunks.whole("k", chunks.bits(1))
    with pytest.raises(ShardCorruptError, match="chunk k from node-1"):
        accept(descriptor._replace(**change), payload, "node-1")


def test_accept_of_what_is_no_payload_raises(chunks: Any) -> None:
    with pytest.raises(ShardCorruptError, match="encoded chunk"):
        entry(chunks.described("k", chunks.bits(1), np.zeros(50, np.uint8)))


def test_accept_keeps_the_array_and_makes_it_read_only(chunks: Any) -> None:
    descriptor, payload = chunks.whole("k", chunks.bits(1))
    assert accept(descriptor, payload, "x").payload is payload
    assert not payload.flags.writeable


def test_accept_whole_of_delta_or_wrong_bits_raises(chunks: Any) -> None:
    base = chunks.bits(1)
    with pytest.raises(CorruptDataError, match="a delta"):
        accept_whole(*chunks.delta("k", chunks.nudged(base, 2), base), "x")
    descriptor, payload = chunks.whole("k", base)
    with pytest.raises(CorruptDataError, match="its author gave"):
        accept_whole(descriptor._replace(digest="0" * 32), payload, "x")


def test_extend_with_identity_keeps_the_chain(chunks: Any) -> None:
    base = chunks.bits(1)
    chain = (entry(chunks.whole("k", base)),)
    assert extend(chain, entry(chunks.delta("k", base, base))) is chain
    assert extend(None, entry(chunks.delta("k", base, base))) is None


def test_extend_with_identity_that_claims_other_bits_is_left_to_the_merge(chunks: Any) -> None:
    base = chunks.bits(1)
    chain = (entry(chunks.whole("k", base)),)
    descriptor, payload = chunks.delta("k", base, base)
    longer = extend(chain, entry((descriptor._replace(digest="1" * 32), payload)))
    assert longer is not None
    assert len(longer) == 2
    with pytest.raises(CorruptDataError):
        merge(longer)
