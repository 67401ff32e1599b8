import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.galois import power, product
from fastcheck_dask.layout.parity import HOLE, combine, rebuild

PARTS = st.lists(st.binary(max_size=70), min_size=1, max_size=6)


def bits(data):
    return np.frombuffer(data, np.uint8).copy()


def parity_of(parts, length=None):
    """XOR without numpy: the oracle and the maker of expected values."""
    length = max((len(p) for p in parts), default=0) if length is None else length
    return bytes(_xor(part[i] if i < len(part) else 0 for part in parts) for i in range(length))


def _xor(numbers):
    found = 0
    for number in numbers:
        found ^= number
    return found


def combined(parts, length, exponent=0):
    return combine([bits(p) for p in parts], np.full(length, 0xA5, np.uint8), exponent=exponent).tobytes()


@given(PARTS, st.integers(0, 20))
def test_parity_of_any_sizes_is_the_padded_xor(parts, extra):
    length = max(map(len, parts)) + extra
    assert combined(parts, length) == parity_of(parts, length)


@given(PARTS, st.integers(0, 20))
def test_second_parity_of_any_sizes_is_the_padded_sum_of_products(parts, extra):
    length = max(map(len, parts)) + extra
    weighted = [bytes(product(power(i), byte) for byte in part) for i, part in enumerate(parts)]
    assert combined(parts, length, exponent=1) == parity_of(weighted, length)


@given(st.data())
def test_any_two_chunks_of_a_stripe_are_computed_from_the_others(data):
    """Whichever are lost, parity chunks among them, and however long each is; a hole is in no way special."""
    members = data.draw(st.lists(st.binary(max_size=40), min_size=1, max_size=10), "members")
    count = len(members)
    length = max(map(len, members))
    parity = [bits(combined(members, length, exponent=number)) for number in range(2)]
    lost = data.draw(st.sets(st.integers(0, count + 1), min_size=1, max_size=2), "lost")
    known = {shard: bits(m) for shard, m in enumerate(members) if shard not in lost}
    given_parity = {number: p for number, p in enumerate(parity) if count + number not in lost}
    before = [p.copy() for p in parity]
    of_data = {shard for shard in lost if shard < count}
    found = rebuild(of_data, known, given_parity) if of_data else {}
    assert found.keys() == of_data
    for shard, whole in found.items():
        assert whole.tobytes() == members[shard].ljust(length, b"\0")
    assert all((p == b).all() for p, b in zip(parity, before, strict=True)), "what is read is not changed"


def test_rebuild_with_one_lost_reads_only_the_first_parity():
    members = {0: bits(b"abc"), 2: bits(b"xy")}
    first = combine([members[0], bits(b"lost"), members[2]], np.empty(4, np.uint8))
    assert rebuild([1], members, {0: first, 1: HOLE})[1].tobytes() == b"lost"


def test_rebuild_of_more_than_parity_gives_is_refused():
    with pytest.raises(AssertionError, match="more members"):
        rebuild([0, 1], {}, {0: HOLE})


@given(PARTS, st.data())
def test_parity_with_one_member_lost_returns_its_bytes(parts, data):
    parity = combined(parts, max(map(len, parts)))
    lost = data.draw(st.integers(0, len(parts) - 1))
    others = [part for i, part in enumerate(parts) if i != lost]
    assert combined([parity, *others], len(parity))[: len(parts[lost])] == parts[lost]


@given(
    st.lists(st.tuples(st.binary(max_size=40), st.binary(max_size=40)), min_size=1, max_size=5),
    st.integers(0, 1),
)
def test_parity_and_delta_commute_when_chunks_change_vanish_or_appear(pairs, exponent):
    """A chunk that vanished or appeared is one of length 0 before or after."""
    old, new = [a for a, _ in pairs], [b for _, b in pairs]
    length = max(map(len, old + new))
    residuals = [combined([a, b], max(len(a), len(b))) for a, b in pairs]
    merged = combined([combined(old, length, exponent), combined(residuals, length, exponent)], length)
    assert merged == combined(new, length, exponent)


def test_parity_of_nothing_is_zeros():
    assert combine([], np.full(9, 7, np.uint8)).tobytes() == bytes(9)


def test_parity_into_no_bytes_is_empty():
    assert combined([b"", b""], 0) == b""


def test_parity_at_odd_addresses_is_the_same():
    data = [bits(bytes(range(50))), bits(bytes(range(100, 149)))]
    shifted = [np.concatenate([np.zeros(3, np.uint8), part])[3:] for part in data]
    out = np.zeros(60, np.uint8)[5:55]
    assert combine(shifted, out).tobytes() == parity_of([p.tobytes() for p in data], 50)


def test_parity_of_chunk_longer_than_the_result_raises():
    for exponent in (0, 1):
        with pytest.raises(LayoutError, match="9 bytes"):
            combine([HOLE, np.zeros(9, np.uint8)], np.zeros(8, np.uint8), exponent=exponent)
