"""What saves ask the nodes to set aside."""

from __future__ import annotations

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex, max_encoded_nbytes
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.plan import Content
from fastcheck_dask.engine.reservation import Reservations, Room, shard_sizes
from fastcheck_dask.layout.chunks import ArraySpec, place
from fastcheck_dask.layout.stripes import assign

SIZES = [[1000, 3000], [4000]]


def room(reservations: Reservations, *, compress: bool = True, deltas: bool = False) -> Room:
    made = reservations.room(SIZES, manifest_bytes=10, compress=compress)
    if deltas:
        made.deltas |= {0, 1}
    return made


def learn(reservations: Reservations, *sent: int, deltas: bool = False, compress: bool = True) -> None:
    took = room(reservations, deltas=deltas, compress=compress)
    for shard, nbytes in enumerate(sent):
        took.sent(shard, nbytes // 2)
        took.sent(shard, nbytes - nbytes // 2)
    reservations.learn(took)


def test_first_save_asks_for_all_that_it_may_take_and_begins_with_a_quarter() -> None:
    wish = room(Reservations()).wish(0)
    most = max_encoded_nbytes(1000) + max_encoded_nbytes(3000)
    assert wish.wanted_bytes == most + 10
    assert wish.least_bytes == pytest.approx(most / 4 + 10, abs=1)


def test_delta_that_was_never_measured_begins_wherever_its_manifest_fits() -> None:
    reservations = Reservations()
    learn(reservations, 2000, 3000)
    wish = room(reservations, deltas=True).wish(0)
    assert wish == (round(4000 * 0.75 * 1.25) + 10, 10)


def test_measured_kind_asks_for_the_largest_share_with_a_margin_and_for_no_less() -> None:
    reservations = Reservations()
    learn(reservations, 2000, 3000)
    learn(reservations, 400, 800, deltas=True)
    assert room(reservations).wish(1) == (3750 + 10,) * 2
    assert room(reservations, deltas=True).wish(0) == (1000 + 10,) * 2


def test_raw_save_asks_for_all_and_says_nothing_of_compressed_ones() -> None:
    reservations = Reservations()
    learn(reservations, 4000, 4000, compress=False)
    learn(reservations, 400, 400)
    raw = room(reservations, compress=False).wish(1)
    assert raw == (max_encoded_nbytes(4000) + 10,) * 2
    assert room(reservations).wish(1).wanted_bytes == 510


def test_save_that_took_more_than_estimated_is_forgotten() -> None:
    reservations = Reservations()
    learn(reservations, 400, 400)
    reservations.forget()
    assert room(reservations).wish(1).wanted_bytes == max_encoded_nbytes(4000) + 10


@given(nbytes=st.integers(0, 5000), seed=st.integers(0, 2**32 - 1))
def test_no_payload_is_larger_than_what_a_first_save_asks_for(nbytes: int, seed: int) -> None:
    bits = np.random.default_rng(seed).integers(0, 256, nbytes, dtype=np.uint8)
    wish = Reservations().room([[nbytes]], manifest_bytes=0, compress=True).wish(0)
    assert PrefixIndex(dtype="float32").encode(bits).nbytes <= wish.wanted_bytes


def test_sizes_of_shards_have_the_parity_last() -> None:
    arrays = tuple(
        ArraySpec(path, "float32", (size,), (size,)) for path, size in (("a", 300), ("b", 200), ("c", 100))
    )
    sizes = {chunk.key: chunk.nbytes for spec in arrays for chunk in spec.chunks}
    content = Content(arrays, place(arrays), assign(sizes, shards=2))
    data = shard_sizes(content)
    assert sorted(map(sum, data[:2])) == sorted([1200 + 0, 800 + 400])
    assert sorted(data[2]) == [400, 1200]
