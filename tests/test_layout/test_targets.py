"""What of a checkpoint goes where in a live state, and that nothing else is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import LayoutError, UnsupportedLeafError
from fastcheck_dask.layout.leaves import copy_bits
from fastcheck_dask.layout.state import flatten, refill
from fastcheck_dask.layout.targets import match


def bits_of(spec, source):
    out = np.empty(spec.nbytes, np.uint8)
    copy_bits(source, out)
    return out


def fill(saved, state, *, chunk_bytes=300, **options):
    """Take `saved` apart and put it into `state` chunk by chunk, as a load does; return what it returns."""
    flat = flatten(saved, chunk_bytes=chunk_bytes)
    filling = match(flat.tree, flat.arrays, state, **options)
    sources = dict(zip((spec.path for spec in flat.arrays), flat.sources, strict=True))
    for spec in filling.arrays:
        target, bits = filling.targets[spec.path], bits_of(spec, sources[spec.path])
        for chunk in spec.chunks:
            wanted = bits[chunk.offset : chunk.offset + chunk.nbytes]
            region = target.region(chunk)
            if region is not None:
                region[:] = wanted
            target.put(chunk, wanted)
            assert np.array_equal(target.get(chunk), wanted)
    filling.put_inline()
    return refill(filling.tree, filling.live)


def noise(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def strided(kind, shape):
    """Return zeros of a shape that lie in memory in some other way than C order."""
    rows, columns = shape
    return {
        "plain": lambda: np.zeros(shape, np.float32),
        "fortran": lambda: np.zeros(shape, np.float32, order="F"),
        "every second": lambda: np.zeros((2 * rows, 3 * columns), np.float32)[::2, 1::3],
        "reversed": lambda: np.zeros(shape, np.float32)[::-1, ::-1],
        "torch": lambda: torch.zeros(shape),
        "torch transposed": lambda: torch.zeros(columns, rows).t(),
        "torch every second": lambda: torch.zeros(2 * rows, 2 * columns)[1::2, ::2],
        "parameter": lambda: torch.nn.Parameter(torch.zeros(columns, rows).t()),
    }[kind]()


KINDS = ["plain", "fortran", "every second", "reversed", "torch", "torch transposed", "parameter"]


@pytest.mark.parametrize("kind", [*KINDS, "torch every second"])
@pytest.mark.parametrize("shape", [(40, 30), (3, 500), (1, 1), (7, 9)])
def test_fill_any_strides_element_by_element(kind, shape):
    state = {"w": strided(kind, shape), "step": 1}
    before = state["w"]
    found = fill({"w": torch.from_numpy(noise(*shape)), "step": 7}, state)
    assert found["w"] is before
    assert found["step"] == 7
    assert np.asarray(state["w"].detach() if hasattr(before, "detach") else before).tobytes() == noise(
        *shape
    ).tobytes(order="C")


@given(st.data())
def test_fill_any_slices_leaves_the_rest_alone(data):
    whole = np.full((12, 14, 16), 5, np.int16)
    cuts = tuple(
        slice(
            data.draw(st.integers(0, 3)),
            data.draw(st.integers(6, 12)),
            data.draw(st.integers(1, 3)),
        )
        for _ in range(3)
    )
    view = whole[cuts].transpose(data.draw(st.permutations([0, 1, 2])))
    values = np.random.default_rng(0).integers(-9, 0, view.shape, np.int16)
    fill({"w": values}, {"w": view}, chunk_bytes=data.draw(st.integers(16, 400)))
    assert np.array_equal(view, values)
    assert (whole < 0).sum() == values.size


@pytest.mark.parametrize(
    "dtype", ["bfloat16", "float8_e4m3fn", "complex64", "complex128", "bool", "int8", "float64"]
)
def test_fill_every_width_bit_for_bit(dtype):
    of = getattr(torch, dtype)
    width = torch.empty(0, dtype=of).element_size()
    bits = torch.randint(0, 2 if dtype == "bool" else 256, (60 * width, 10), dtype=torch.uint8)
    saved = bits.reshape(60, 10 * width).view(of)
    state = {"a": torch.zeros(60, 10, dtype=of), "b": torch.zeros(10, 60, dtype=of).t()}
    fill({"a": saved, "b": saved.clone()}, state)
    for tensor in state.values():
        assert torch.equal(tensor.contiguous().view(torch.uint8), saved.view(torch.uint8))


def test_fill_conjugated_and_negated_views_get_the_values():
    saved = torch.view_as_complex(torch.from_numpy(noise(50, 2)))
    under = torch.zeros(50, dtype=torch.complex64)
    fill({"w": saved}, {"w": under.conj()})
    assert torch.equal(under, saved.conj().resolve_conj())


def test_fill_tiny_tensors_and_scalars_in_place():
    state = {"s": torch.zeros(()), "n": np.zeros(()), "few": np.zeros(3, np.int32), "none": torch.zeros(0, 4)}
    kept = dict(state)
    found = fill(
        {
            "s": torch.tensor(2.5),
            "n": np.array(-0.0),
            "few": np.arange(3, dtype=np.int32),
            "none": torch.ones(0, 4),
        },
        state,
    )
    assert all(found[key] is kept[key] for key in kept)
    assert state["s"].item() == 2.5
    assert np.signbit(state["n"])
    assert state["few"].tolist() == [0, 1, 2]


def test_fill_tied_leaves_are_filled_where_they_are_apart():
    weight = torch.from_numpy(noise(30, 30))
    state = {"emb": torch.zeros(30, 30), "head": torch.zeros(30, 30).t()}
    fill({"emb": weight, "head": weight}, state)
    assert torch.equal(state["emb"], weight)
    assert torch.equal(state["head"], weight)
    tied = torch.zeros(30, 30)
    fill({"emb": weight, "head": weight}, {"emb": tied, "head": tied})
    assert torch.equal(tied, weight)


def test_match_two_tensors_for_the_same_memory_is_refused():
    tied = torch.zeros(30, 30)
    saved = {"emb": torch.ones(30, 30), "head": torch.full((30, 30), 2.0)}
    with pytest.raises(LayoutError, match="emb and head are the same memory"):
        fill(saved, {"emb": tied, "head": tied})
    assert not tied.any()


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_match_views_that_overlap_are_refused_and_interleaved_ones_are_not(library):
    memory = torch.zeros(40, 40) if library == "torch" else np.zeros((40, 40), np.float32)
    saved = {"a": noise(40, 20), "b": noise(40, 20, seed=1)}
    with pytest.raises(LayoutError, match="a and b share memory"):
        fill(saved, {"a": memory[:, :20], "b": memory[:, 19:39]})
    assert not memory.any()
    fill(saved, {"a": memory[:, :20], "b": memory[:, 20:]})
    assert np.array_equal(np.asarray(memory), np.concatenate([saved["a"], saved["b"]], axis=1))


def test_match_misfits_are_all_counted_and_the_first_are_named():
    saved = {f"old{n}": noise(100) for n in range(9)} | {"w": noise(10, 10), "s": np.zeros(3)}
    state = {"w": np.zeros((10, 11), np.float32), "s": np.zeros(3, np.float32), "new": np.zeros(2)}
    with pytest.raises(LayoutError) as caught:
        fill(saved, state)
    text = str(caught.value)
    assert "1 missing in the checkpoint: new;" in text
    assert "9 unexpected, the state has no such tensor: old0, old1, old2, old3, ...;" in text
    assert "2 of another shape or dtype: w (checkpoint float32 (10, 10), state float32 (10, 11)), s (" in text
    assert "Nothing was changed" in text
    assert not any(tensor.any() for tensor in state.values())


def test_match_not_strict_takes_what_fits_and_leaves_the_rest():
    saved = {"w": noise(100), "gone": noise(80), "list": [noise(90), noise(70)], "step": 3}
    state = {
        "w": np.zeros(100, np.float32),
        "list": [np.zeros(90, np.float32), np.ones(71)],
        "new": np.ones(5),
    }
    found = fill(saved, state, strict=False)
    assert found.keys() == {"w", "list", "step"}
    assert found["w"] is state["w"]
    assert np.array_equal(state["w"], saved["w"])
    assert found["list"][0] is state["list"][0]
    assert found["list"][1] is None
    assert state["new"].all()
    assert state["list"][1].all()


def test_match_not_strict_nothing_fits_gives_the_plain_values():
    assert fill({"w": noise(100), "step": 3}, {"v": noise(9)}, strict=False) == {"step": 3}
    assert fill({"w": noise(100)}, {}, strict=False) == {}


def test_match_include_confines_both_sides():
    state = {"model": {"w": np.zeros(100, np.float32)}, "optimizer": np.zeros(7)}
    found = fill({"model": {"w": noise(100)}, "step": 1}, state, include="model/*")
    assert found.keys() == {"model"}
    assert np.array_equal(state["model"]["w"], noise(100))
    with pytest.raises(LayoutError, match="nothing in the checkpoint matches"):
        fill({"model": noise(100)}, state, include="optimizer*")


def test_match_repeated_view_fits_its_like_only():
    saved = {"w": torch.from_numpy(noise(1, 90)).expand(5, 90)}
    state = {"w": torch.zeros(1, 90).expand(5, 90)}
    fill(saved, state)
    assert torch.equal(state["w"], saved["w"])
    with pytest.raises(LayoutError, match="repeated"):
        fill(saved, {"w": torch.zeros(5, 90)})


def test_match_read_only_and_unsupported_are_refused():
    target = np.zeros(100, np.float32)
    target.flags.writeable = False
    with pytest.raises(LayoutError, match="1 read-only: w"):
        fill({"w": noise(100)}, {"w": target})
    with pytest.raises(UnsupportedLeafError):
        fill({"w": noise(100)}, {"w": torch.zeros(100).to_sparse()})


@pytest.mark.parametrize("given_as", ["torch", "numpy"])
def test_fill_either_library_whatever_it_was_saved_from(given_as):
    saved = noise(20, 20)
    state = {"w": np.zeros((20, 20), np.float32) if given_as == "numpy" else torch.zeros(20, 20)}
    fill({"w": torch.from_numpy(saved) if given_as == "numpy" else saved}, state)
    assert np.array_equal(np.asarray(state["w"]), saved)
