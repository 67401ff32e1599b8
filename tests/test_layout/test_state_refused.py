"""What a state cannot have, and what a damaged tree says instead of a state."""

from __future__ import annotations

import collections
import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError, UnsupportedLeafError
from fastcheck_dask.layout.state import flatten, unflatten
from fastcheck_dask.layout.values import MAX_DEPTH
from fastcheck_dask.testing.flat_state import passed, take_apart

DEQUE = collections.deque
ODICT = collections.OrderedDict


class Sub(dict):
    pass


class Scaled(torch.Tensor):
    pass


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (collections.namedtuple("Point", "x")(1), "Point"),
        (Sub(), "Sub"),
        (collections.defaultdict(lambda: 1), "defaultdict"),
        (torch.ones(3).as_subclass(Scaled), "Scaled"),
        (torch.nn.Linear(1, 1), "Linear"),
        (np.array([None]), "dtype"),
        ({(1, torch): 2}, "key"),
        (lambda: None, "function"),
        (memoryview(b"x"), "memoryview"),
        (torch.ones(3).untyped_storage(), "Storage"),
    ],
    ids=map(str, range(10)),
)
def test_value_that_could_not_come_back_is_refused_with_its_path(value, named):
    with pytest.raises(UnsupportedLeafError, match=named) as caught:
        flatten({"opt": [0, {"x": value}]})
    assert caught.value.path == "opt/1/x"


def test_mapping_with_lost_attributes_is_refused():
    odd = ODICT(a=1)
    odd.note = "kept nowhere"
    with pytest.raises(UnsupportedLeafError, match="note"):
        flatten({"x": odd})


def test_metadata_that_cannot_be_stored_is_left_out():
    odd = ODICT(a=1)
    odd._metadata = {"x": object()}
    assert not vars(passed(odd))


@pytest.mark.parametrize("make", [list, dict, lambda: DEQUE()], ids=["list", "dict", "deque"])
def test_cycle_is_refused_with_its_path(make):
    inner = make()
    if isinstance(inner, dict):
        inner["me"] = (inner,)
    else:
        inner.append((inner,))
    with pytest.raises(UnsupportedLeafError, match="holds itself") as caught:
        flatten({"x": inner})
    assert caught.value.path.startswith("x/")


def test_same_container_twice_is_no_cycle():
    shared = [1]
    assert passed([shared, shared]) == [[1], [1]]


@pytest.mark.parametrize(
    "wrap", [lambda x: [x], lambda x: (x,), lambda x: {"k": x}], ids=["list", "tuple", "dict"]
)
def test_nesting_up_to_the_limit_comes_back_and_beyond_is_refused(wrap):
    state = 1
    for _ in range(MAX_DEPTH):
        state = wrap(state)
    assert passed(state) == state
    with pytest.raises(UnsupportedLeafError, match="deeper"):
        flatten(wrap(state))


@pytest.mark.parametrize("depth", [MAX_DEPTH + 1, 400, 100_000])
def test_tree_nested_too_deep_raises_corrupt_data(depth):
    tree = 1
    for _ in range(depth):
        tree = [tree]
    with pytest.raises(CorruptDataError, match="deeper"):
        unflatten(tree, None, arrays=[])


BITS = {"dtype": "float32", "shape": [1], "bits": "AAAAAA=="}


@pytest.mark.parametrize(
    ("tree", "error"),
    [
        ({"t": "pickle", "v": "x"}, UnknownFormatError),
        ({"t": "tuple", "v": [], "extra": 1}, UnknownFormatError),
        ({"t": "defaultdict", "k": [], "v": [], "factory": "eval"}, UnknownFormatError),
        ({"t": "defaultdict", "k": [], "v": [], "factory": ["int"]}, UnknownFormatError),
        ({"t": "tensor", "path": "x", "hook": "os.system"}, UnknownFormatError),
        ({"t": "tensor", "path": "x", **BITS, "dtype": "object"}, UnknownFormatError),
        ({"t": "ndarray", "path": "x", **BITS, "grad": True}, UnknownFormatError),
        ({"t": "tensor", "path": "missing"}, CorruptDataError),
        ({"t": "tensor", "path": 3}, CorruptDataError),
        ({"t": "tensor", "path": "../x", **BITS}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "shape": [2]}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "shape": [-1]}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "shape": [True]}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "shape": [2**61] * 60}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "bits": "AAAA"}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "bits": 3}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "grad": 1}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "dtype": "int32", "grad": True}, CorruptDataError),
        ({"t": "tensor", "path": "x", **BITS, "expand": [2, 2]}, CorruptDataError),
        ({"t": "tensor", "path": "w", **BITS}, CorruptDataError),
        ({"t": "tensor", "path": "w", "dtype": "int64"}, CorruptDataError),
        ({"t": "tensor", "path": "w", "expand": [7]}, CorruptDataError),
        (
            [{"t": "tensor", "path": "x", **BITS}, {"t": "tensor", "path": "x", **BITS, "bits": "AAAAAQ=="}],
            CorruptDataError,
        ),
        ({"t": "tuple", "v": {}}, CorruptDataError),
        ({"t": "dict", "k": ["a"], "v": []}, CorruptDataError),
        ({"t": "dict", "k": ["a", "a"], "v": [1, 2]}, CorruptDataError),
        ({"t": "dict", "k": [1, True], "v": [1, 2]}, CorruptDataError),
        ({"t": "dict", "k": [[1]], "v": [1]}, CorruptDataError),
        ({"t": "dict", "k": [{"t": "str", "v": "zz"}], "v": [1]}, CorruptDataError),
        ({"t": "dict", "k": [{"t": "tuple"}], "v": [1]}, CorruptDataError),
        ({"t": "deque", "v": [1, 2], "maxlen": 1}, CorruptDataError),
        ({"t": "deque", "v": [1], "maxlen": "1"}, CorruptDataError),
        (
            {"t": "OrderedDict", "k": [], "v": [], "meta": {"t": "tensor", "path": "nowhere"}},
            CorruptDataError,
        ),
    ],
    ids=map(str, range(33)),
)
def test_damaged_tree_raises_and_names_what_is_wrong(tree, error):
    _, arrays, held = take_apart({"w": torch.ones(100)})
    with pytest.raises(error):
        unflatten([0, tree], lambda spec: held[spec.path], arrays=arrays)


@given(st.data())
def test_any_json_as_a_tree_is_read_or_corrupt(any_tree, data):
    tree = data.draw(any_tree)
    _, arrays, held = take_apart({"w": torch.ones(100)})
    try:
        unflatten(tree, lambda spec: held[spec.path], arrays=arrays)
    except CorruptDataError:
        return


def test_error_of_the_loader_passes_through_unchanged():
    text, arrays, _ = take_apart({"w": torch.ones(100)})

    def fail(spec):
        raise KeyError(spec.path)

    with pytest.raises(KeyError, match="w"):
        unflatten(json.loads(text), fail, arrays=arrays)


def test_loader_that_returns_too_few_bytes_raises_corrupt_data():
    text, arrays, _ = take_apart({"w": torch.ones(100)})
    with pytest.raises(CorruptDataError, match="3 bytes"):
        unflatten(json.loads(text), lambda spec: np.zeros(3, np.uint8), arrays=arrays)
