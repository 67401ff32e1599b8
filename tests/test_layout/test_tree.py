import fnmatch

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, LayoutError, UnknownFormatError
from fastcheck_dask.layout.state import flatten, inline_arrays, leaf_paths, select, unflatten
from fastcheck_dask.layout.tree import walk

BIG = np.arange(100.0)
TINY = np.arange(3.0)
STATE = {
    "model": {"a": BIG, "tied": BIG, "tiny": TINY, "tiny2": TINY},
    "opt": [{"lr": 0.1, "m": BIG + 1}, (1, BIG + 2), {}],
    "epoch": 7,
}


def loaded(tree, flat):
    bits = {spec.path: source.view(np.uint8) for spec, source in zip(flat.arrays, flat.sources, strict=True)}
    return unflatten(tree, lambda spec: bits[spec.path].copy(), arrays=flat.arrays)


def test_leaf_paths_name_every_leaf_and_empty_container_in_order():
    assert leaf_paths(flatten(STATE).tree) == [
        *("model/a", "model/tied", "model/tiny", "model/tiny2"),
        *("opt/0/lr", "opt/0/m", "opt/1/0", "opt/1/1", "opt/2", "epoch"),
    ]
    assert leaf_paths(flatten(3).tree) == ["%root"]
    assert leaf_paths(flatten({0: 1, "0": {"c": 2}, "a/b": 3}).tree) == ["0%int", "0/%63", "a%2Fb"]


def test_inline_arrays_are_yielded_once_with_their_bits():
    assert list(inline_arrays(flatten(STATE).tree)) == [("model/tiny", "float64", (3,), TINY.tobytes())]


@pytest.mark.parametrize(
    ("patterns", "paths", "wanted"),
    [
        ("model/a", {"model/a"}, {"model": {"a": BIG}}),
        ("model/tied", {"model/a"}, {"model": {"tied": BIG}}),
        ("model/tiny2", set(), {"model": {"tiny2": TINY}}),
        ("*/m", {"opt/0/m"}, {"opt": [{"m": BIG + 1}, None, None]}),
        (["opt/1/1", "epoch"], {"opt/1/1"}, {"opt": [None, (None, BIG + 2), None], "epoch": 7}),
        ("opt/2", set(), {"opt": [None, None, {}]}),
        (["nothing", "e?och"], set(), {"epoch": 7}),
    ],
)
def test_select_keeps_what_matches_and_nothing_else(patterns, paths, wanted):
    flat = flatten(STATE)
    found, pruned = select(flat.tree, patterns)
    assert found == paths
    np.testing.assert_equal(loaded(pruned, flat), wanted)


def test_select_of_everything_is_the_whole_tree():
    flat = flatten(STATE)
    assert select(flat.tree, "*") == ({spec.path for spec in flat.arrays}, flat.tree)


def test_select_leaves_the_tree_as_it_was():
    flat, again = flatten(STATE), flatten(STATE)
    select(flat.tree, "epoch")
    assert flat.tree == again.tree


@pytest.mark.parametrize("patterns", ["model", "MODEL/*", [], "", "model/a/x"])
def test_select_without_match_raises_and_lists_some_paths(patterns):
    with pytest.raises(LayoutError, match=r"10 paths.*model/a"):
        select(flatten(STATE).tree, patterns)


STATES = st.recursive(
    st.integers(0, 9),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["a", "b", "a/b", "[x]"]) | st.integers(0, 2), inner, max_size=3)
    ),
    max_leaves=10,
)


@given(STATES, st.lists(st.text("ab0/*?", max_size=4), min_size=1, max_size=3))
def test_select_of_any_patterns_keeps_exactly_the_leaves_that_match(state, patterns):
    tree = flatten(state).tree
    before = dict(walk(tree))
    wanted = [p for p in before if any(fnmatch.fnmatchcase(p, pattern) for pattern in patterns)]
    if not wanted:
        with pytest.raises(LayoutError):
            select(tree, patterns)
        return
    after = dict(walk(select(tree, patterns)[1]))
    assert [path for path in after if path in wanted] == wanted
    assert all(after[path] == before[path] for path in wanted)
    assert all(node is None for path, node in after.items() if path not in wanted)


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"t": "unheard of"}, UnknownFormatError),
        ({}, UnknownFormatError),
        ({"t": "dict", "k": [], "v": [], "z": 1}, UnknownFormatError),
        ({"t": "dict", "k": "ab", "v": [1, 2]}, CorruptDataError),
        ({"t": "tuple", "v": "ab"}, CorruptDataError),
        ({"t": "dict", "k": [{"t": "str", "v": 3}], "v": [1]}, CorruptDataError),
    ],
)
@pytest.mark.parametrize(
    "read", [leaf_paths, lambda t: list(inline_arrays(t)), lambda t: select(t, "*")], ids=range(3)
)
def test_damaged_tree_raises_in_every_reader(tree, error, read):
    with pytest.raises(error):
        read([1, tree])


def test_tree_nested_too_deep_raises_in_every_reader():
    tree = []
    for _ in range(50_000):
        tree = [tree]
    for read in (leaf_paths, lambda t: list(inline_arrays(t)), lambda t: select(t, "*")):
        with pytest.raises(CorruptDataError, match="deeper"):
            read(tree)
