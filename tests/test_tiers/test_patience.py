"""By when a message, and each piece of it, has to have crossed; the clock is moved by hand."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.config import settings
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.tiers.pacing import PIECE_BYTES
from fastcheck_dask.tiers.patience import Patience


def patience(nbytes: int, clock: FakeClock, *, floor: float = 10.0, grace: float = 2.0) -> Patience:
    return Patience(nbytes, floor_bytes_per_second=floor, grace_seconds=grace, now=clock.now())


@given(
    pieces=st.lists(st.integers(1, 100), min_size=1, max_size=20),
    stops_after=st.integers(0, 19),
    held_back=st.lists(st.floats(0, 50), min_size=20, max_size=20),
)
def test_silence_is_noticed_after_the_grace_wherever_it_begins(
    pieces: list[int], stops_after: int, held_back: list[float]
) -> None:
    clock = FakeClock()
    message = patience(sum(pieces), clock)
    for nbytes, wait in zip(pieces[: stops_after + 1], held_back, strict=False):
        clock.advance(wait)
        message.held_back(wait)
        noticed = message.next_piece(nbytes, clock.now())
        assert 0 < noticed - clock.now() <= nbytes / 10 + 2.0 + 1e-9
        # At the floor it goes on.
        clock.advance(nbytes / 10)
        assert noticed > clock.now()


@given(pieces=st.lists(st.integers(1, 100), min_size=2, max_size=20))
def test_message_whose_every_piece_is_a_little_too_slow_ends_with_its_own_time(pieces: list[int]) -> None:
    clock = FakeClock()
    began, message = clock.now(), patience(sum(pieces), clock)
    for nbytes in pieces:
        by = message.next_piece(nbytes, clock.now())
        assert by <= began + sum(pieces) / 10 + 2.0 + 1e-9
        clock.advance(max(0.0, by - clock.now()))


def test_hung_node_is_noticed_within_three_seconds_as_documented() -> None:
    found, clock = settings(), FakeClock()
    message = patience(2**28, clock, floor=found.floor_bytes_per_second, grace=found.grace_seconds)
    assert message.next_piece(PIECE_BYTES, clock.now()) - clock.now() < 3.0
    # Nor is the handshake of a connection that the kernel of a hung node accepts waited for longer.
    assert found.connect_seconds < 3.0


def test_told_says_how_far_it_came() -> None:
    clock = FakeClock()
    message = patience(3000, clock)
    for nbytes in (0, 1000, 1000):
        message.next_piece(nbytes, clock.now())
    assert message.told() == "no more than 1,000 of 3,000 bytes crossed in time"
