"""What crosses at once is bounded, and together it is all there was, in order."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.tiers.pacing import PIECE_BYTES
from fastcheck_dask.tiers.pieces import cost_of, pieces_of

sizes = st.one_of(
    st.integers(0, 200),
    st.integers(16 * 2**10 - 1, 16 * 2**10 + 1),
    st.integers(2 * PIECE_BYTES - 1, 2 * PIECE_BYTES + 1),
)


@given(st.lists(st.tuples(sizes, st.integers(1, 200)), max_size=6))
def test_pieces_are_all_bytes_in_order_and_bounded(runs: list[tuple[int, int]]) -> None:
    counts = [size for size, times in runs for _ in range(times if size <= 200 else 1)]
    views = [memoryview(bytes([number % 251]) * size) for number, size in enumerate(counts)]
    pieces = list(pieces_of(views))
    assert b"".join(view for piece in pieces for view in piece) == b"".join(views)
    assert all(view.nbytes for piece in pieces for view in piece)
    assert all(cost_of(piece) <= (PIECE_BYTES + 2**12 if len(piece) == 1 else 2**19) for piece in pieces)


def test_thousands_of_small_buffers_cross_in_few_pieces() -> None:
    pieces = list(pieces_of([memoryview(bytes(64))] * 2000))
    assert max(map(len, pieces)) > 50
    # A turn of a loop has its share by what they cost, not by their few bytes.
    assert sum(map(cost_of, pieces)) > 7 * 2**20


def test_buffers_are_made_as_they_are_needed() -> None:
    made = []

    def targets():
        for _ in range(3):
            made.append(bytearray(PIECE_BYTES))
            yield memoryview(made[-1])

    next(pieces_of(targets()))
    assert len(made) == 1
