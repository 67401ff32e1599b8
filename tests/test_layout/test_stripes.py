import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout.stripes import Layout, assign, is_parity_key, parity_nbytes

SIZES = st.dictionaries(st.text("abcdef/", min_size=1, max_size=4), st.integers(0, 1000), max_size=40)
SHARDS = st.integers(1, 6)
WEIGHTS = st.lists(st.floats(0.01, 100), min_size=1, max_size=6)


def keys_in(layout):
    return sorted(key for stripe in layout.stripes for key in stripe.members if key is not None)


def shard_bytes(layout, sizes):
    return [sum(sizes[key] for key in layout.keys_of(shard)) for shard in range(layout.shards)]


@given(SIZES, SHARDS, st.integers(0, 2))
def test_fresh_layout_holds_every_key_once_within_one_chunk(sizes, shards, parity):
    layout = assign(sizes, shards=shards, parity=parity)
    assert keys_in(layout) == sorted(sizes)
    loads = shard_bytes(layout, sizes)
    assert max(loads) - min(loads) <= max(sizes.values(), default=0)
    assert all(any(member is not None for member in stripe.members) for stripe in layout.stripes)
    assert layout.nodes_wanted == shards + parity


def test_fresh_layout_gives_the_largest_of_a_group_to_the_emptiest_shard():
    sizes = {"a": 8, "b": 7, "c": 6, "d": 5}
    assert shard_bytes(assign(sizes, shards=2), sizes) == [13, 13]


@given(SIZES, SHARDS)
def test_layout_is_a_pure_function_of_sizes(sizes, shards):
    backwards = dict(reversed(sizes.items()))
    assert assign(sizes, shards=shards) == assign(backwards, shards=shards)


@given(SIZES, SIZES, SIZES, SHARDS)
def test_layout_after_changes_keeps_what_stays_where_it_is(first, second, third, shards):
    layout = assign(first, shards=shards)
    for sizes in (second, third):
        following = assign(sizes, shards=shards, previous=layout)
        assert keys_in(following) == sorted(sizes)
        assert len({stripe.id for stripe in following.stripes}) == len(following.stripes)
        assert all(any(stripe.members) for stripe in following.stripes)
        for key in set(keys_in(layout)) & set(sizes):
            before, after = layout.position[key], following.position[key]
            assert (before[0].id, before[1]) == (after[0].id, after[1])
        layout = following


@given(SIZES, SHARDS)
def test_layout_without_changes_is_the_previous_one(sizes, shards):
    layout = assign(sizes, shards=shards)
    assert assign(sizes, shards=shards, previous=layout) == layout


@given(st.dictionaries(st.text("abc", min_size=1), st.just(7), min_size=4, max_size=20), st.integers(2, 4))
def test_layout_with_removed_and_new_key_fills_the_hole(sizes, shards):
    layout = assign(sizes, shards=shards)
    gone = min(sizes)
    following = assign(
        {k: v for k, v in sizes.items() if k != gone} | {"new": 7}, shards=shards, previous=layout
    )
    assert len(following.stripes) <= len(layout.stripes)


@given(SIZES, SHARDS, SHARDS)
def test_layout_over_another_number_of_shards_is_fresh_with_new_stripe_ids(sizes, shards, others):
    layout = assign(sizes, shards=shards)
    following = assign(sizes, shards=others, previous=layout)
    if shards != others:
        assert not {s.id for s in layout.stripes} & {s.id for s in following.stripes}
        loads = shard_bytes(following, sizes)
        assert max(loads) - min(loads) <= max(sizes.values(), default=0)


@given(SIZES, SHARDS, st.integers(0, 2))
def test_position_names_every_data_and_parity_chunk(sizes, shards, parity):
    layout = assign(sizes, shards=shards, parity=parity)
    for shard in range(layout.nodes_wanted):
        for key in layout.keys_of(shard):
            assert layout.position[key][1] == shard
            assert is_parity_key(key) == (shard >= shards)
    assert len(layout.position) == len(sizes) + parity * len(layout.stripes)
    assert layout.keys_of(layout.nodes_wanted) == ()


@given(SIZES, SHARDS, st.integers(0, 2), st.integers(0, 2))
def test_layout_with_another_number_of_parity_shards_has_the_same_stripes(sizes, shards, before, after):
    layout = assign(sizes, shards=shards, parity=before)
    following = assign(sizes, shards=shards, parity=after, previous=layout)
    assert (following.parity, following.stripes) == (after, layout.stripes)


@given(SIZES, SHARDS)
def test_parity_chunk_is_as_long_as_the_longest_member(sizes, shards):
    for stripe in assign(sizes, shards=shards).stripes:
        members = [sizes[key] for key in stripe.members if key is not None]
        assert parity_nbytes(stripe, sizes) == max(members)


def test_layout_without_parity_has_no_keys_on_the_parity_shard():
    assert assign({"a": 1}, shards=2, parity=False).keys_of(2) == ()


def test_layout_of_nothing_has_no_stripes():
    assert assign({}, shards=3) == Layout(3, True, ())


@pytest.mark.parametrize(("shards", "parity"), [(2, 3), (2, -1), (256, 2)])
def test_layout_with_parity_that_cannot_be_computed_raises(shards, parity):
    with pytest.raises(LayoutError, match="at most 2 parity shards"):
        assign({"a": 1}, shards=shards, parity=parity)
    assert assign({"a": 1}, shards=255, parity=2).nodes_wanted == 257


@pytest.mark.parametrize("shards", [0, -1])
def test_layout_without_shards_raises(shards):
    with pytest.raises(LayoutError, match="shards"):
        assign({"a": 1}, shards=shards)


def parity_bytes(layout, sizes):
    return sum(parity_nbytes(stripe, sizes) for stripe in layout.stripes)


@given(SIZES, WEIGHTS, SIZES, WEIGHTS)
def test_weighted_layout_holds_every_key_once_and_keeps_what_stays(first, weights, second, others):
    others = (others * len(weights))[: len(weights)]
    layout = assign(first, shards=len(weights), weights=weights)
    following = assign(second, shards=len(weights), weights=others, previous=layout)
    for dealt, sizes in ((layout, first), (following, second)):
        assert keys_in(dealt) == sorted(sizes)
        assert all(len(stripe.members) == len(weights) and any(stripe.members) for stripe in dealt.stripes)
        assert len({stripe.id for stripe in dealt.stripes}) == len(dealt.stripes)
    for key in set(first) & set(second):
        before, after = layout.position[key], following.position[key]
        assert (before[0].id, before[1]) == (after[0].id, after[1])


@given(SIZES, WEIGHTS)
def test_weighted_layout_gives_each_shard_what_its_node_takes_in_the_time(sizes, weights):
    layout = assign(sizes, shards=len(weights), weights=weights)
    total, largest = parity_bytes(layout, sizes), max(sizes.values(), default=0)
    loads = shard_bytes(layout, sizes)
    assert total - largest <= max(loads, default=0) <= total
    for nbytes, weight in zip(loads, weights, strict=True):
        wanted = total * weight / max(weights)
        assert wanted - 2 * largest <= nbytes <= wanted * (1 + 1e-9)


@given(SIZES, SHARDS, st.floats(0.1, 10))
def test_weighted_layout_of_equal_weights_is_the_even_one(sizes, shards, weight):
    assert assign(sizes, shards=shards, weights=[weight] * shards) == assign(sizes, shards=shards)


@given(st.integers(0, 200), WEIGHTS, st.integers(1, 50))
def test_weighted_layout_grows_by_weight(count, weights, more):
    """Chunks that come later go where there is time, and holes of slow shards are no reason to fill them."""
    before = {f"a{i}": 10 for i in range(count)}
    sizes = before | {f"b{i}": 10 for i in range(more)}
    layout = assign(before, shards=len(weights), weights=weights)
    layout = assign(sizes, shards=len(weights), weights=weights, previous=layout)
    total = parity_bytes(layout, sizes)
    for nbytes, weight in zip(shard_bytes(layout, sizes), weights, strict=True):
        assert total * weight / max(weights) - 40 <= nbytes <= total * weight / max(weights) * (1 + 1e-9)


@given(SIZES, SIZES, WEIGHTS)
def test_layout_anew_is_a_fresh_one_with_new_stripe_ids(sizes, former, weights):
    shards = len(weights)
    layout = assign(former, shards=shards)
    anew = assign(sizes, shards=shards, weights=weights, previous=layout, anew=True)
    fresh = assign(sizes, shards=shards, weights=weights)
    assert [stripe.members for stripe in anew.stripes] == [stripe.members for stripe in fresh.stripes]
    assert not {stripe.id for stripe in anew.stripes} & {stripe.id for stripe in layout.stripes}


def test_layout_with_a_much_slower_node_leaves_it_out():
    sizes = {f"c{i}": 10 for i in range(30)}
    assert shard_bytes(assign(sizes, shards=2, weights=[1, 0.01]), sizes) == [300, 0]


@pytest.mark.parametrize(
    "weights", [[1.0], [1.0, 0.0], [1.0, -1.0], [1.0, float("nan")], [1.0, float("inf")], []]
)
def test_layout_of_impossible_weights_raises(weights):
    with pytest.raises(LayoutError, match="2 weights above 0"):
        assign({"a": 1}, shards=2, weights=weights)
