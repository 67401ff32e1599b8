"""Bytes by bandwidth, and moves that pay."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.dealing import (
    GAIN,
    HORIZON_SAVES,
    PATIENCE_SAVES,
    Dealer,
    is_worth,
    slowest,
)
from fastcheck_dask.layout.stripes import assign

SIZES = {f"c{i:03}": 10 for i in range(120)}
EVEN = (10.0, 10.0, 10.0)
#: The second node became slow.
UNEVEN = (10.0, 2.0, 10.0)


def deal(dealer, weights, previous=None, **options):
    arguments = {"shards": 2, "parity": 1, "weights": weights, "previous": previous, "delta_share": 1.0}
    return dealer.deal(SIZES, **(arguments | options))


def saved(dealer, weights, previous, **options):
    found = deal(dealer, weights, previous, **options)
    dealer.done()
    return found


def by_node(found):
    """Return the bytes of each node, in the order in which they were chosen."""
    layout = found.layout
    of_shard = [sum(SIZES[key] for key in layout.keys_of(shard)) for shard in range(layout.shards)]
    of_shard.append(10 * len(layout.stripes))
    return [of_shard[found.order.index(place)] for place in range(len(of_shard))]


def test_deal_without_weights_is_even_and_as_chosen():
    found = deal(Dealer(), ())
    assert found.order == (0, 1, 2)
    assert by_node(found) == [600, 600, 600]


def test_deal_first_time_gives_the_parity_to_the_fastest_node():
    found = deal(Dealer(), (40.0, 10.0, 20.0))
    assert found.order == (1, 2, 0)
    assert by_node(found) == [800, 400, 800]


def test_deal_is_capped_by_the_parity_node_that_stays():
    layout = assign({}, shards=2)
    assert by_node(deal(Dealer(), (40.0, 10.0, 10.0), layout)) == [600, 600, 600]


@given(st.lists(st.floats(0.1, 100), min_size=2, max_size=6))
def test_deal_of_fine_chunks_is_close_to_the_least_time(weights):
    sizes = {f"c{i}": 10 for i in range(1000)}
    found = Dealer().deal(sizes, shards=len(weights) - 1, parity=1, weights=weights)
    # With the fastest node for the parity no other is held back by it: nothing can be faster.
    ideal = sum(sizes.values()) / (sum(weights) - max(weights))
    placed = [weights[place] for place in found.order]
    fastest_data = max(placed[:-1])
    # Two chunks at the fastest node, for the whole stripes, and one for each shard that stays behind.
    assert slowest(found.layout, sizes, placed) <= ideal + 10 * (len(weights) + 2) / fastest_data
    assert sorted(found.order) == list(range(len(weights)))


def test_deal_small_changes_of_weights_move_nothing():
    dealer = Dealer()
    layout = saved(dealer, EVEN, None).layout
    for number in range(50):
        found = saved(dealer, (10.0, 10.0 + number % 2, 9.5 + number % 3 / 4), layout)
        assert (found.layout, found.order, found.anew) == (layout, (0, 1, 2), False)


def test_deal_moves_after_some_saves_that_say_so_and_not_again_soon():
    dealer = Dealer()
    layout = saved(dealer, EVEN, None).layout
    for _ in range(PATIENCE_SAVES - 1):
        assert not saved(dealer, UNEVEN, layout).anew
    found = saved(dealer, UNEVEN, layout)
    assert found.anew
    assert by_node(found) == [1000, 200, 1000]
    # And back again: the nodes are told by shard now.
    moves = []
    for _ in range(2 * HORIZON_SAVES):
        again = saved(dealer, EVEN, found.layout)
        moves.append(again.anew)
        found = again
    assert moves.index(True) == HORIZON_SAVES - 1
    assert moves.count(True) == 1


def test_deal_moves_only_if_the_saves_in_a_row_went_through():
    dealer = Dealer()
    layout = saved(dealer, EVEN, None).layout
    for _ in range(5):
        assert not deal(dealer, UNEVEN, layout).anew
    for _ in range(5):
        saved(dealer, UNEVEN, layout)
        assert not saved(dealer, EVEN, layout).anew


def test_deal_moves_nothing_before_it_is_known_what_deltas_take():
    dealer = Dealer()
    layout = saved(dealer, EVEN, None).layout
    assert not any(saved(dealer, UNEVEN, layout, delta_share=None).anew for _ in range(10))


def test_deal_to_another_number_of_shards_is_fresh():
    dealer = Dealer()
    layout = saved(dealer, EVEN, None).layout
    found = deal(dealer, (10.0, 10.0, 10.0, 30.0), layout, shards=3)
    assert by_node(found) == [400, 400, 400, 400]
    assert not found.anew


@pytest.mark.parametrize(
    ("now", "delta_share", "worth"),
    [
        (1.0, 1.0, False),
        (GAIN, 1.0, False),
        (GAIN + 0.01, 1.0, True),
        # A tenth is sent: a whole save more is dear.
        (GAIN + 0.01, 0.1, False),
        (1.89, 0.1, False),
        (1.91, 0.1, True),
        (100.0, 0.0, False),
    ],
)
def test_move_is_worth_a_whole_save_if_that_is_made_good(now, delta_share, worth):
    assert is_worth(now, 1.0, delta_share=delta_share) is worth


@given(st.floats(0.1, 10), st.floats(0.1, 10), st.floats(0, 1))
def test_move_that_is_worth_it_takes_less_over_the_horizon(now, best, delta_share):
    if is_worth(now, best, delta_share=delta_share):
        assert now * delta_share * HORIZON_SAVES > best + best * delta_share * (HORIZON_SAVES - 1)
