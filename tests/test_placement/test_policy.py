"""Which nodes a save gets: sticky, spread, and degraded only when it has to be."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import TooFewNodesError
from fastcheck_dask.placement.outlook import Outlook
from fastcheck_dask.placement.policy import choose, replacement


def node(name, *, rack=None, host=None, state="available"):
    return NodeInfo(name, f"fcs://{name}:1", rack or f"r-{name}", host or f"h-{name}", 1 << 30, state)


def nodes(count):
    return [node(f"n{number}") for number in range(count)]


def names(choice):
    return [info.name for info in choice.nodes]


def test_choose_nothing_alive_is_object_tier_only_and_says_so():
    choice = choose([], wanted=None, max_shards=3)
    assert (choice.shards, choice.parity, choice.nodes) == (0, False, ())
    assert "only the object tier" in choice.degraded


def test_choose_single_node_has_no_parity_and_says_so():
    choice = choose(nodes(1), wanted=None, max_shards=3)
    assert (choice.shards, choice.parity, names(choice)) == (1, False, ["n0"])
    assert "no parity" in choice.degraded


@pytest.mark.parametrize(("alive", "shards"), [(2, 1), (3, 2), (4, 3), (9, 3)])
def test_choose_automatic_uses_what_there_is_up_to_the_limit(alive, shards):
    choice = choose(nodes(alive), wanted=None, max_shards=3)
    assert (choice.shards, choice.parity, len(choice.nodes)) == (shards, True, shards + 1)
    assert choice.degraded is None


@pytest.mark.parametrize(
    ("alive", "shards", "parity", "says"),
    [
        (1, 1, 0, "no storage node may be lost"),
        (2, 1, 1, "1 parity shard instead of 2; one storage node may be lost, not two"),
        (3, 1, 2, None),
        (5, 3, 2, None),
        (9, 3, 2, None),
    ],
)
def test_choose_two_parity_shards_come_before_more_data_shards(alive, shards, parity, says):
    choice = choose(nodes(alive), wanted=None, max_shards=3, parity=2)
    assert (choice.shards, choice.parity, len(choice.nodes)) == (shards, parity, shards + parity)
    assert (choice.degraded is None) if says is None else (says in choice.degraded)


@pytest.mark.parametrize(("alive", "shards"), [(1, 1), (2, 2), (9, 3)])
def test_choose_without_parity_is_what_was_wanted_and_not_degraded(alive, shards):
    choice = choose(nodes(alive), wanted=None, max_shards=3, parity=0)
    assert (choice.shards, choice.parity, len(choice.nodes), choice.degraded) == (shards, 0, shards, None)


def test_choose_explicit_number_with_two_parity_shards_and_too_few_alive_says_what_to_do():
    with pytest.raises(TooFewNodesError, match="5 storage nodes are needed and 4 are alive") as caught:
        choose(nodes(4), wanted=3, max_shards=9, parity=2)
    assert "num_shards=2 or 'auto', or fewer parity shards" in str(caught.value)


@pytest.mark.parametrize(("before", "after"), [(1, 2), (2, 1), (0, 2), (2, 0)])
def test_choose_other_number_of_parity_shards_every_shard_stays_that_stays(before, after):
    previous = ["n5", "n3", "n1", "n0", "n2"][: 3 + before]
    alive = [info for info in nodes(6) if info.name != "n3"]
    choice = choose(alive, wanted=3, max_shards=3, parity=after, previous=previous, previous_shards=3)
    kept = [new == old for new, old in zip(names(choice), previous, strict=False)]
    assert kept == [place != 1 for place in range(3 + min(before, after))]


def test_choose_fewer_alive_with_two_parity_shards_says_that_two_may_be_lost():
    previous = ["n0", "n1", "n2", "n3", "n4"]
    choice = choose(nodes(4), wanted=None, max_shards=3, parity=2, previous=previous, previous_shards=3)
    assert (choice.shards, choice.parity) == (2, 2)
    assert "2 data shards instead of 3; any two of them may still be lost" in choice.degraded


def test_choose_explicit_number_is_kept_to():
    choice = choose(nodes(6), wanted=4, max_shards=3)
    assert (choice.shards, choice.parity, len(choice.nodes)) == (4, True, 5)


@pytest.mark.parametrize("alive", [0, 1, 3])
def test_choose_explicit_number_and_too_few_alive_says_what_to_do(alive):
    with pytest.raises(TooFewNodesError, match=f"4 storage nodes are needed and {alive} are alive") as caught:
        choose(nodes(alive), wanted=3, max_shards=9)
    assert f"num_shards={max(1, alive - 1)}" in str(caught.value)
    assert "dask fastcheck storage" in str(caught.value)


@pytest.mark.parametrize("dead", range(4))
def test_choose_one_node_dead_others_keep_their_shard(dead):
    previous = ["n3", "n1", "n0", "n2"]
    alive = [info for info in nodes(6) if info.name != previous[dead]]
    choice = choose(alive, wanted=None, max_shards=3, previous=previous)
    kept = [new == old for new, old in zip(names(choice), previous, strict=True)]
    assert kept == [place != dead for place in range(4)]
    assert names(choice)[dead] in ("n4", "n5")


def test_choose_fewer_alive_than_before_is_degraded():
    choice = choose(nodes(3), wanted=None, max_shards=3, previous=["n0", "n1", "n2", "n3"])
    assert choice.shards == 2
    assert "2 data shards instead of 3" in choice.degraded
    assert set(names(choice)) == {"n0", "n1", "n2"}


def test_choose_as_many_as_before_is_not_degraded():
    assert choose(nodes(3), wanted=None, max_shards=3, previous=["n0", "n1", "n2"]).degraded is None


def test_choose_excluded_and_draining_nodes_are_left_out():
    alive = [node("a", state="draining"), node("b"), node("c"), node("d")]
    choice = choose(alive, wanted=None, max_shards=3, excluded={"c"}, previous=["c", "b"])
    assert names(choice) == ["d", "b"]
    with pytest.raises(TooFewNodesError):
        choose(alive, wanted=2, max_shards=3, excluded={"c"})


def test_choose_new_nodes_prefer_other_hosts_then_other_racks():
    alive = [
        node("a", host="h1", rack="r1"),
        node("b", host="h1", rack="r1"),
        node("c", host="h2", rack="r1"),
        node("d", host="h3", rack="r2"),
    ]
    assert names(choose(alive, wanted=1, max_shards=3)) == ["a", "d"]
    assert names(choose(alive, wanted=2, max_shards=3)) == ["a", "d", "c"]
    assert names(choose(alive, wanted=1, max_shards=3, previous=["gone", "c"])) == ["d", "c"]


def test_choose_new_nodes_are_the_nearest_and_of_equally_near_ones_the_emptiest():
    outlooks = {
        "n0": Outlook(5e-3, None, 0.0),
        "n1": Outlook(0.9e-3, None, 0.8),
        "n2": Outlook(0.8e-3, None, 0.9),
        "n3": Outlook(1.0e-3, None, 0.1),
    }
    assert names(choose(nodes(4), wanted=1, max_shards=3, outlooks=outlooks)) == ["n3", "n1"]
    # Who was never asked comes after those that are known to be nearer than the furthest.
    assert names(choose(nodes(5), wanted=4, max_shards=3, outlooks=outlooks))[:3] == ["n3", "n1", "n2"]
    # What real transfers took counts, too.
    slow = {**outlooks, "n3": Outlook(1.0e-3, 1e-6, 0.1)}
    assert names(choose(nodes(4), wanted=1, max_shards=3, outlooks=slow)) == ["n1", "n2"]


def test_choose_is_sticky_whatever_the_outlook_and_apart_before_near():
    outlooks = {"n0": Outlook(1.0), "n1": Outlook(1.0), "n2": Outlook(1e-4), "n3": Outlook(1e-4)}
    assert names(choose(nodes(4), wanted=1, max_shards=3, previous=["n0", "n1"], outlooks=outlooks)) == [
        "n0",
        "n1",
    ]
    alive = [node("n0", rack="a"), node("n1", rack="b"), node("n2", rack="a"), node("n3", rack="a")]
    assert set(names(choose(alive, wanted=1, max_shards=3, outlooks=outlooks))) == {"n1", "n2"}


def test_choose_avoided_node_gives_its_shard_to_a_spare_if_there_is_one():
    previous = ["n0", "n1", "n2"]
    options = {"wanted": 2, "max_shards": 3, "previous": previous}
    assert names(choose(nodes(4), avoided={"n1"}, **options)) == ["n0", "n3", "n2"]
    assert names(choose(nodes(3), avoided={"n1"}, **options)) == previous
    assert names(choose(nodes(4), avoided={"n1", "n3"}, **options)) == previous
    assert choose(nodes(3), wanted=None, max_shards=3, avoided={"n0", "n1", "n2"}).shards == 2


def test_replacement_is_spare_available_and_apart_from_the_others():
    alive = [
        node("a", host="h1", rack="r1"),
        node("b", host="h1", rack="r1"),
        node("c", host="h2", rack="r1"),
        node("d", host="h3", rack="r2"),
        node("e", host="h4", rack="r3", state="draining"),
    ]
    assert replacement(alive, others=alive[:1], excluded={"a"}).name == "d"
    assert replacement(alive, others=alive[:1], excluded={"a", "d"}).name == "c"
    assert replacement(alive, others=alive[:1], excluded={"a", "c", "d"}).name == "b"
    assert replacement(alive, others=alive[:1], excluded={"a", "b", "c", "d"}) is None


@given(
    st.sets(st.sampled_from("abcdefgh")),
    st.lists(st.sampled_from("abcdefgh"), unique=True, max_size=6),
    st.none() | st.integers(1, 5),
    st.integers(1, 5),
    st.integers(0, 2),
    st.sets(st.sampled_from("abcdefgh"), max_size=3),
    st.sets(st.sampled_from("abcdefgh"), max_size=5),
    st.dictionaries(
        st.sampled_from("abcdefgh"),
        st.builds(
            Outlook,
            st.none() | st.floats(0, 10),
            st.none() | st.floats(0, 1e-3),
            st.none() | st.floats(0, 1),
        ),
    ),
)
def test_choose_anything_nodes_are_distinct_alive_and_as_many_as_said(
    alive, previous, wanted, max_shards, parity, excluded, avoided, outlooks
):
    infos = [node(name, host=f"h{ord(name) % 3}", rack=f"r{ord(name) % 2}") for name in sorted(alive)]
    usable = alive - excluded
    try:
        choice = choose(
            infos,
            wanted=wanted,
            max_shards=max_shards,
            parity=parity,
            previous=previous,
            excluded=excluded,
            avoided=avoided,
            outlooks=outlooks,
        )
    except TooFewNodesError:
        assert wanted is not None
        assert len(usable) < wanted + parity
        return
    chosen = names(choice)
    assert len(set(chosen)) == len(chosen)
    assert set(chosen) <= usable
    assert len(chosen) == choice.shards + choice.parity
    assert wanted is None or (choice.shards, choice.parity) == (wanted, parity)
    assert wanted is not None or choice.shards <= max_shards
    assert wanted is not None or choice.parity == max(0, min(parity, len(usable) - 1))
    assert choice.parity == parity or choice.degraded
    welcome = usable - avoided
    if len(previous) == len(chosen):
        assert all(new == old for new, old in zip(chosen, previous, strict=True) if old in welcome)
    # Nobody is avoided at the price of a shard, nor used while others are free.
    options = {"wanted": wanted, "max_shards": max_shards, "parity": parity, "excluded": excluded}
    assert choice.shards == choose(infos, **options).shards
    assert len(set(chosen) & avoided) == max(0, len(chosen) - len(welcome))
    again = choose(
        infos,
        **options,
        previous=chosen,
        previous_shards=choice.shards,
        avoided=avoided,
        outlooks=outlooks,
    )
    assert names(again) == chosen
