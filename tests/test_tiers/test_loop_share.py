"""What crosses in one turn of an event loop is bounded, and nobody waits for ever."""

from __future__ import annotations

import asyncio

from hypothesis import given, settings
from hypothesis import strategies as st

from fastcheck_dask.tiers.loop_share import LoopShare


@settings(max_examples=50, deadline=None)
@given(
    pieces=st.lists(st.lists(st.integers(0, 40), min_size=1, max_size=8), min_size=1, max_size=8),
    budget=st.integers(1, 50),
)
def test_bytes_of_one_turn_are_bounded_and_all_get_through(pieces: list[list[int]], budget: int) -> None:
    async def main() -> list[int]:
        share, turns = LoopShare(budget), [0]

        def next_turn() -> None:
            turns.append(0)
            asyncio.get_running_loop().call_soon(next_turn)

        async def cross(mine: list[int]) -> None:
            for nbytes in mine:
                await share.take(nbytes)
                turns[-1] += nbytes

        next_turn()
        await asyncio.gather(*map(cross, pieces))
        return turns

    crossed = asyncio.run(main())
    assert sum(crossed) == sum(map(sum, pieces))
    # Counted from the middle of one turn to that of the next: at most two of them meet in it.
    assert max(crossed) <= 2 * (budget - 1 + max(map(max, pieces)))


def test_pieces_pass_in_the_order_in_which_they_come() -> None:
    async def main() -> list[int]:
        share, seen = LoopShare(1), []

        async def cross(number: int) -> None:
            await share.take(5)
            seen.append(number)

        await asyncio.gather(*map(cross, range(9)))
        return seen

    assert asyncio.run(main()) == list(range(9))


def test_one_that_is_cancelled_leaves_its_place() -> None:
    async def main() -> None:
        share = LoopShare(1)
        tasks = [asyncio.create_task(share.take(1)) for _ in range(6)]
        await asyncio.sleep(0)
        # Of six, at most two have passed by now.
        tasks[4].cancel()
        await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 20)
        assert [task.cancelled() for task in tasks] == [False] * 4 + [True, False]

    asyncio.run(main())


def test_connections_of_one_loop_share_it_and_other_loops_have_their_own() -> None:
    async def both() -> tuple[LoopShare, LoopShare]:
        return LoopShare.of_running_loop(), LoopShare.of_running_loop()

    first, second = asyncio.run(both())
    assert first is second
    assert asyncio.run(both())[0] is not first
