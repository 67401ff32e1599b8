"""A state is taken apart and put together again: any state comes back as it was."""

from __future__ import annotations

import collections
import copy
import json
import random
import struct
import subprocess
import sys
import time

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import CorruptDataError
from fastcheck_dask.layout import leaves
from fastcheck_dask.layout.state import INLINE_BYTES, flatten, inline_arrays, unflatten
from fastcheck_dask.testing.flat_state import passed, put_together, take_apart

DEQUE = collections.deque
ODICT = collections.OrderedDict


def tensor_bytes(tensor):
    out = np.empty(leaves.describe(tensor, "").nbytes, np.uint8)
    leaves.copy_bits(tensor, out)
    return out.tobytes()


def assert_same(one, other, path="state"):
    assert type(one) is type(other), path
    if isinstance(one, torch.Tensor | np.ndarray):
        assert (one.dtype, one.shape) == (other.dtype, other.shape), path
        assert tensor_bytes(one) == tensor_bytes(other), path
        assert getattr(one, "requires_grad", None) == getattr(other, "requires_grad", None), path
    elif isinstance(one, dict):
        assert [(type(k), k) for k in one] == [(type(k), k) for k in other], path
        for key in one:
            assert_same(one[key], other[key], f"{path}[{key!r}]")
    elif isinstance(one, list | tuple | DEQUE):
        assert len(one) == len(other), path
        assert getattr(one, "maxlen", None) == getattr(other, "maxlen", None), path
        for index, (a, b) in enumerate(zip(one, other, strict=True)):
            assert_same(a, b, f"{path}[{index}]")
    elif isinstance(one, float):
        assert struct.pack(">d", one) == struct.pack(">d", other), path
    elif isinstance(one, np.generic):
        assert one.tobytes() == other.tobytes(), path
    else:
        assert one == other, path


def make_tensor(code, shape):
    name = ["float32", "bfloat16", "float8_e5m2", "int64", "bool", "complex64"][code % 6]
    width = torch.zeros(0, dtype=torch.uint8).view(getattr(torch, name)).element_size()
    bits = np.random.default_rng(code).integers(0, 256, int(np.prod(shape)) * width, np.uint8)
    made = leaves.revive("torch", bits, dtype=name, shape=tuple(shape))
    return made.t() if made.dim() == 2 and code % 2 else made


TENSORS = st.builds(make_tensor, st.integers(0, 1000), st.lists(st.integers(0, 12), max_size=3))
ARRAYS = st.builds(
    lambda n, order: np.arange(n * 3.0).reshape(n, 3).astype(order),
    st.integers(0, 40),
    st.sampled_from([">f4", "<f8"]),
)
KEYS = st.one_of(
    st.text(st.characters(codec=None), max_size=6),
    st.integers(-3, 10),
    st.sampled_from(["0", "1", "c", "a/b", "", True, False, None, 2.5, b"k", (1, "x"), 2**70]),
)
LEAVES = st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(max_size=5), TENSORS, ARRAYS)
STATES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.lists(inner, max_size=4).map(lambda items: DEQUE(items, 5)),
        st.dictionaries(KEYS, inner, max_size=5),
        st.dictionaries(KEYS, inner, max_size=3).map(ODICT),
        st.dictionaries(KEYS, inner, max_size=3).map(lambda d: collections.defaultdict(list, d)),
    ),
    max_leaves=15,
)


@given(STATES, st.sampled_from([1, 50, 8 * 2**20]))
def test_state_of_any_shape_comes_back_twice(state, chunk_bytes):
    saved = take_apart(state, chunk_bytes=chunk_bytes)
    once = put_together(saved)
    assert_same(state, once)
    again = take_apart(once, chunk_bytes=chunk_bytes)
    assert saved[:2] == again[:2]
    assert_same(state, put_together(again))


@given(STATES)
def test_array_paths_of_any_state_are_unique_and_none_lies_in_another(state):
    text, arrays, _ = take_apart(state)
    paths = [spec.path for spec in arrays] + [path for path, *_ in inline_arrays(json.loads(text))]
    assert len(set(paths)) == len(paths)
    assert not [(a, b) for a in paths for b in paths if b.startswith(f"{a}/")]


def test_bfloat16_and_float8_keep_dtype_and_bytes():
    state = {"w": make_tensor(1, [15, 50]), "s": torch.tensor(1.5, dtype=torch.bfloat16)}
    state["m"] = torch.ones(700).to(torch.float8_e4m3fn)
    assert_same(state, passed(state))
    assert [spec.dtype for spec in flatten(state).arrays] == ["bfloat16", "float8_e4m3fn"]


def test_view_of_large_storage_stores_only_what_is_viewed():
    big = torch.zeros(50_000_000)
    _, arrays, _ = take_apart({"v": big[:10], "u": big[5:105]})
    assert [(spec.path, spec.nbytes) for spec in arrays] == [("u", 400)]
    assert flatten({"v": big[:10]}).arrays == ()


def test_repeated_view_stores_one_row_and_comes_back_repeated():
    state = {"e": torch.randn(1, 100).expand(1000, 100)}
    text, arrays, _ = take_apart(state)
    found = put_together((text, arrays, take_apart(state)[2]))
    assert sum(spec.nbytes for spec in arrays) == 400
    assert found["e"].stride() == (0, 1)
    assert torch.equal(found["e"], state["e"])


def test_empty_tensors_keep_their_shapes():
    state = {"e": torch.empty(0), "e2": torch.empty(0, 5), "e3": torch.empty(3, 0, 2), "s": torch.tensor(7)}
    state |= {"n": np.empty((0, 3), ">f8"), "h": torch.empty(0, 4, dtype=torch.bfloat16)}
    assert_same(state, passed(state))
    assert flatten(state).arrays == ()


def test_optimizer_and_scheduler_state_survive_two_round_trips_and_load_unpatched():
    model = torch.nn.Sequential(torch.nn.Linear(20, 20), torch.nn.Linear(20, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3, 3])
    for _ in range(2):
        model(torch.randn(4, 20)).sum().backward()  # no zero_grad: the gradients stay alive
        optimizer.step()
        scheduler.step()
    state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "sched": scheduler.state_dict()}
    found = passed(passed(state))
    assert_same(state, found)
    assert set(found["opt"]["state"][0]) == {"step", "exp_avg", "exp_avg_sq"}
    assert type(found["sched"]["milestones"]) is collections.Counter
    assert found["model"]._metadata == model.state_dict()._metadata
    other = copy.deepcopy(model)
    fresh = torch.optim.AdamW(other.parameters())
    resumed = torch.optim.lr_scheduler.MultiStepLR(fresh, [9])
    other.load_state_dict(found["model"])
    fresh.load_state_dict(found["opt"])
    resumed.load_state_dict(found["sched"])
    for net, stepped, schedule in ((model, optimizer, scheduler), (other, fresh, resumed)):
        net.zero_grad()
        net(torch.ones(4, 20)).sum().backward()
        stepped.step()
        schedule.step()
    assert_same(model.state_dict(), other.state_dict())
    assert scheduler.get_last_lr() == resumed.get_last_lr()


@pytest.mark.parametrize(
    "make",
    [
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 9),
        lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.1, 10),
        lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o),
        lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 1.0),
    ],
    ids=["cosine", "one cycle", "plateau", "lambda"],
)
def test_scheduler_state_comes_back_and_loads(make):
    def fresh():
        return make(torch.optim.SGD([torch.nn.Parameter(torch.ones(2))], lr=0.1, momentum=0.9))

    state = fresh().state_dict()
    found = passed(state)
    assert_same(state, found)
    fresh().load_state_dict(found)


def test_grad_scaler_state_comes_back_and_loads():
    state = {
        "scale": 65536.0,
        "growth_factor": 2.0,
        "backoff_factor": 0.5,
        "growth_interval": 2000,
        "_growth_tracker": 3,
    }
    scaler = torch.amp.GradScaler("cpu")
    scaler.load_state_dict(passed(state))
    assert_same(scaler.state_dict(), passed(scaler.state_dict()))
    assert scaler.state_dict()["_growth_tracker"] == 3


def test_containers_keep_type_and_order():
    state = {"a": None, "b": {}, "c": [], "d": (), "e": (1, None, torch.ones(100)), "f": ODICT()}
    state |= {
        "z": ODICT([("y", 1), ("x", 2)]),
        "q": DEQUE([1], 3),
        "n": collections.defaultdict(None, {1: 2}),
    }
    state |= {
        "k": collections.defaultdict(int, {"a": 1}),
        "s": {3, 1},
        1: "one",
        "1": "text",
        "hist": [torch.ones(99)] * 3,
    }
    found = passed(state)
    assert_same(state, found)
    assert list(found) == list(state)
    assert found["k"]["new"] == 0


def test_plain_values_come_back_in_a_new_process():
    state = {
        "epoch": 7,
        "lr": 1e-3,
        "flag": True,
        "big": 2**70,
        "nan": float("nan"),
        "args": {"name": "x", 3: (1,)},
    }
    code = (
        "import json, sys\nfrom fastcheck_dask.layout.state import unflatten\n"
        "print(repr(unflatten(json.load(sys.stdin), None, arrays=[])))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=take_apart(state)[0],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == repr(state)


def test_moments_and_weights_of_mixed_dtypes_keep_theirs():
    state = {
        "p": {0: torch.randn(90), 1: torch.randn(90).bfloat16()},
        "m": {0: torch.randn(90).bfloat16(), 1: torch.randn(90)},
        "step": torch.tensor(3.0),
        "quantised": torch.randint(0, 255, (400,), dtype=torch.uint8),
        "mask": torch.rand(400) > 0.5,
    }
    assert_same(state, passed(state))


def test_random_states_restore_unchanged():
    state = {
        "torch": torch.get_rng_state(),
        "numpy": np.random.get_state(),
        "numpy dict": np.random.get_state(legacy=False),
        "python": random.getstate(),
        "generator": np.random.default_rng(3).bit_generator.state,
        "mt": np.random.Generator(np.random.MT19937(1)).bit_generator.state,
        "philox": np.random.Generator(np.random.Philox(1)).bit_generator.state,
        "sfc": np.random.Generator(np.random.SFC64(1)).bit_generator.state,
    }
    saved = take_apart(state)
    generator = np.random.default_rng(3)
    wanted = torch.rand(3), np.random.rand(3), random.random(), generator.random(3)
    found = put_together(saved)
    torch.set_rng_state(found["torch"])
    np.random.set_state(found["numpy"])
    random.setstate(found["python"])
    revived = np.random.default_rng(99)
    revived.bit_generator.state = found["generator"]
    assert torch.equal(torch.rand(3), wanted[0])
    assert (np.random.rand(3) == wanted[1]).all()
    assert random.random() == wanted[2]
    assert (revived.random(3) == wanted[3]).all()
    np.random.set_state(found["numpy dict"])
    assert (np.random.rand(3) == wanted[1]).all()
    for kind in ("MT19937", "Philox", "SFC64"):
        bits = getattr(np.random, kind)(7)
        bits.state = found[{"MT19937": "mt", "Philox": "philox", "SFC64": "sfc"}[kind]]


def test_tied_weights_are_stored_once_and_stay_tied():
    model = torch.nn.Sequential(torch.nn.Embedding(50, 20), torch.nn.Linear(20, 50, bias=False))
    model[1].weight = model[0].weight
    state = {"sd": model.state_dict(), "same": [model[0].weight, model[0].weight]}
    text, arrays, held = take_apart(state)
    assert [spec.path for spec in arrays] == ["sd/0.weight"]
    found = put_together((text, arrays, held))
    assert found["sd"]["0.weight"] is found["sd"]["1.weight"]
    assert found["same"][0] is found["same"][1]
    assert type(found["same"][0]) is torch.nn.Parameter
    found["sd"]["0.weight"].fill_(3)
    assert (found["same"][0] == 3).all(), "a parameter and the plain tensor of it share their memory"


def test_tied_tiny_tensors_stay_tied_and_equal_ones_stay_apart():
    step = torch.tensor(3.0)
    found = passed([step, step, torch.tensor(3.0), torch.empty(0), torch.empty(0)])
    assert found[0] is found[1]
    assert found[0] is not found[2]
    assert found[3] is not found[4]


def test_overlapping_views_are_stored_each_with_their_own_elements():
    big = torch.arange(1000.0)
    found = passed({"a": big[:600], "b": big[400:], "c": big.view(10, 100).t()})
    assert torch.equal(found["b"], big[400:])
    assert torch.equal(found["c"], big.view(10, 100).t())
    found["a"].fill_(-1)
    assert torch.equal(found["b"], big[400:])


def test_loader_buffers_are_wrapped_without_a_copy():
    text, arrays, held = take_apart({"w": torch.ones(100), "n": np.ones(100)})
    found = unflatten(json.loads(text), lambda spec: held[spec.path], arrays=arrays)
    assert np.shares_memory(found["w"].numpy(), held["w"])
    assert np.shares_memory(found["n"], held["n"])


def test_state_that_is_one_leaf_has_the_root_path():
    assert [spec.path for spec in flatten(torch.ones(100)).arrays] == ["%root"]
    assert passed(7) == 7
    assert torch.equal(passed(torch.ones(100)), torch.ones(100))


def test_small_tensors_are_inline_and_larger_ones_arrays():
    at, above = torch.zeros(INLINE_BYTES, dtype=torch.uint8), torch.zeros(INLINE_BYTES + 1, dtype=torch.uint8)
    flat = flatten({"at": at, "above": above, "wide": np.array("x" * 1000)})
    assert [spec.path for spec in flat.arrays] == ["above"]
    assert [(p, d, s) for p, d, s, _ in inline_arrays(flat.tree)] == [
        ("at", "uint8", (256,)),
        ("wide", "<U1000", ()),
    ]


def test_keys_that_look_alike_have_arrays_of_their_own():
    state = {
        key: torch.full((100,), float(i))
        for i, key in enumerate([0, "0", "a/b", "a", "", None, "None", 1.5, "1.5"])
    }
    text, arrays, held = take_apart(state)
    assert len({spec.path for spec in arrays}) == len(state)
    assert_same(state, put_together((text, arrays, held)))


@given(STATES, st.data())
def test_tree_with_one_piece_replaced_is_read_or_corrupt(any_tree, state, data):
    text, arrays, held = take_apart({"s": state, "w": torch.ones(100)})
    tree = json.loads(text)
    places = []

    def gather(node):
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                gather(node[key])

    gather(tree)
    node, key = places[data.draw(st.integers(0, len(places) - 1))]
    node[key] = data.draw(any_tree)
    try:
        unflatten(tree, lambda spec: held[spec.path].copy(), arrays=arrays)
    except CorruptDataError:
        return


def test_flatten_of_a_thousand_tensors_takes_milliseconds():
    state = {f"layers.{i}.weight": torch.zeros(100) for i in range(1000)}
    times = []
    for _ in range(5):
        begin = time.perf_counter()
        flatten(state)
        times.append(time.perf_counter() - begin)
    assert min(times) < 0.1, "usually 5 ms; the bound is for busy machines"
