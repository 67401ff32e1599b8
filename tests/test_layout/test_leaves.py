import importlib
import subprocess
import sys
import tracemalloc
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as npst

from fastcheck_dask.errors import (
    ConfigError,
    CorruptDataError,
    LayoutError,
    UnknownFormatError,
    UnsupportedLeafError,
)
from fastcheck_dask.layout import leaves
from fastcheck_dask.layout.dtypes import TORCH_ONLY, itemsize_of
from fastcheck_dask.layout.leaves import Form

NAMES = [
    *("bool", "int8", "uint8", "int16", "uint16", "int32", "uint32", "int64", "uint64"),
    *("float16", "float32", "float64", "complex64", "complex128", *sorted(TORCH_ONLY)),
]


def raw(nbytes, seed=0):
    """Random bytes: among them NaNs with payloads, -0.0, subnormals."""
    return np.random.default_rng(seed).integers(0, 256, nbytes, np.uint8)


def tensor_of(name, shape, seed=0):
    bits = raw(int(np.prod(shape)) * itemsize_of(name), seed)
    return torch.from_numpy(bits).view(getattr(torch, name)).view(shape)


def bits_of(source):
    leaf = leaves.describe(source, "x")
    out = np.full(leaf.nbytes, 0xA5, np.uint8)
    leaves.copy_bits(source, out)
    return leaf, out


def passed(source):
    leaf, bits = bits_of(source)
    library = leaves.LIBRARY[leaf.form.kind]
    return leaves.dress(leaves.revive(library, bits, dtype=leaf.dtype, shape=leaf.shape), leaf.form)


def elements(tensor):
    """The bytes of each element in C order, by way of a contiguous copy of bytes: the oracle."""
    width = tensor.element_size()
    flat = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    index = np.zeros(tuple(tensor.shape), np.int64) + tensor.storage_offset()
    for axis, step in enumerate(tensor.stride()):
        index += (np.arange(tensor.shape[axis]) * step).reshape(
            [-1 if a == axis else 1 for a in range(tensor.dim())]
        )
    return (flat[(index * width)[..., None] + np.arange(width)]).tobytes()


def same(one, other):
    return (
        type(one) is type(other)
        and one.dtype == other.dtype
        and one.shape == other.shape
        and elements(one) == elements(other)
        and one.requires_grad == other.requires_grad
    )


VIEWS = {
    "whole": lambda t: t,
    "transposed": lambda t: t.t(),
    "every second row": lambda t: t[::2],
    "one column": lambda t: t[:, 1],
    "inner columns": lambda t: t.view(2, 12).t()[:, 1:],
    "permuted": lambda t: t.view(3, 2, 4).permute(2, 0, 1),
    "overlapping": lambda t: t.as_strided((4, 5), (1, 2)),
    "repeated": lambda t: t[:1].expand(50, 4),
    "repeated inside": lambda t: t[:, 1:2].t()[..., None].expand(1, 6, 7),
    "one element repeated": lambda t: t[2, 2].expand(3, 3),
    "offset": lambda t: t.view(-1)[5:17],
    "empty": lambda t: t[:0],
    "empty inside": lambda t: t[:, :0].expand(6, 0),
    "no axes": lambda t: t[1, 1],
}


@pytest.mark.parametrize("view", VIEWS)
@pytest.mark.parametrize("name", NAMES)
def test_tensor_of_any_dtype_and_view_comes_back_bit_for_bit(name, view):
    source = VIEWS[view](tensor_of(name, (6, 4)))
    leaf, bits = bits_of(source)
    assert leaf.dtype == name
    found = passed(source)
    assert same(source, found)
    if view in ("repeated", "repeated inside", "one element repeated"):
        assert found.stride() == source.stride() or 0 in found.stride()
        assert bits.size < elements(source).__len__()


@given(npst.array_shapes(min_dims=0, max_dims=4, min_side=0, max_side=5), st.sampled_from(NAMES), st.data())
def test_tensor_with_any_strides_comes_back_bit_for_bit(shape, name, data):
    strides = [data.draw(st.integers(0, 7)) for _ in shape]
    reach = 1 + sum((n - 1) * s for n, s in zip(shape, strides, strict=True) if n)
    source = tensor_of(name, (max(1, reach) + 3,), seed=reach).as_strided(shape, strides, 2)
    assert same(source, passed(source))


@pytest.mark.filterwarnings("ignore:ComplexHalf")  # the oracle's
@pytest.mark.parametrize("name", ["complex64", "complex128", "complex32"])
def test_lazily_conjugated_tensor_is_stored_resolved(name):
    source = tensor_of(name, (6, 4))
    for view in (source.conj(), source.t().conj(), source[::2].conj()):
        assert view.is_conj()
        assert elements(passed(view)) == elements(view.resolve_conj())
    plain = torch.tensor([[1 + 2j, complex(0.0, 0.0)]]).conj()
    assert torch.equal(passed(plain), plain.resolve_conj())
    assert passed(plain).imag.signbit().all()


def test_lazily_negated_tensor_is_stored_resolved():
    source = torch.tensor([1 + 2j, 3 - 4j, complex(0, 0)]).conj().imag
    assert source.is_neg()
    assert passed(source).tolist() == [-2.0, 4.0, -0.0]
    assert elements(passed(source)) == elements(source.resolve_neg())


def test_tensor_that_requires_grad_comes_back_as_leaf_that_does():
    source = torch.randn(9, requires_grad=True)
    inside = source * 2
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for tensor in (source, inside):
            found = passed(tensor)
            assert found.requires_grad
            assert found.is_leaf
            assert elements(found) == elements(tensor.detach())


@pytest.mark.parametrize("grad", [True, False])
def test_parameter_comes_back_as_parameter(grad):
    source = torch.nn.Parameter(torch.randn(9), requires_grad=grad)
    assert same(source, passed(source))
    assert type(passed(source)) is torch.nn.Parameter


@pytest.mark.parametrize("persistent", [True, False])
def test_buffer_comes_back_as_buffer(persistent):
    found = passed(torch.nn.Buffer(torch.ones(2), persistent=persistent))
    assert isinstance(found, torch.nn.Buffer)
    assert found.persistent is persistent


def test_inference_tensor_comes_back_as_plain_tensor():
    with torch.inference_mode():
        source = torch.randn(6, 4)
    for view in (source, source.t()):
        assert torch.equal(passed(view), view)


def test_leaf_read_under_default_device_meta_is_copied_and_revived_on_the_cpu():
    source = torch.randn(6, 4)
    with torch.device("meta"):
        assert passed(source.t()).device.type == "cpu"


def test_view_of_large_storage_is_as_long_as_the_view():
    big = torch.zeros(50_000_000)
    assert leaves.describe(big[:10], "v").nbytes == 40
    assert bits_of(big[:10])[1].size == 40


ARRAYS = npst.arrays(
    st.one_of(
        npst.scalar_dtypes(),
        npst.byte_string_dtypes(min_len=1),
        npst.unicode_string_dtypes(min_len=1),
    ),
    npst.array_shapes(min_dims=0, min_side=0, max_side=4),
)


@given(ARRAYS, st.data())
def test_numpy_array_of_any_dtype_and_view_comes_back_bit_for_bit(array, data):
    index = data.draw(npst.basic_indices(array.shape, allow_newaxis=True)) if array.ndim else ()
    for view in (array, array.T, np.asfortranarray(array), np.asarray(array[index])):
        found = passed(view)
        assert found.dtype == view.dtype
        assert found.dtype.str == view.dtype.str
        assert found.shape == view.shape
        assert found.tobytes() == view.tobytes()


def test_numpy_view_that_repeats_is_stored_once_and_comes_back_repeated():
    source = np.broadcast_to(np.arange(4.0)[:, None], (4, 1000))
    leaf, bits = bits_of(source)
    assert bits.size == 32
    assert leaf.shape == (4, 1)
    np.testing.assert_array_equal(passed(source), source)
    assert passed(source).strides == (8, 0)


@pytest.mark.parametrize(
    "source",
    [
        *(
            np.array([None]),
            np.zeros(2, "f4,f4"),
            np.array(["a"], np.dtypes.StringDType()),
        ),
        *(np.ma.masked_array([1.0]), np.array([1]).view(np.recarray), np.char.array(["a"])),
        np.zeros(1, np.dtype("f4", metadata={"unit": "m"})),
    ],
    ids=map(str, range(7)),
)
def test_numpy_array_that_could_not_come_back_is_refused(source):
    with pytest.raises(UnsupportedLeafError) as caught:
        leaves.describe(source, "a/b")
    assert caught.value.path == "a/b"


def test_numpy_array_of_a_dtype_that_an_extension_registered_is_refused():
    """Its `str` is that of bare bytes, and as such it would come back."""
    rational = pytest.importorskip("numpy._core._rational_tests").rational
    with pytest.raises(UnsupportedLeafError):
        leaves.describe(np.array([rational(1, 3)]), "a")


def test_numpy_memmap_is_refused(tmp_path):
    with pytest.raises(UnsupportedLeafError, match="memmap"):
        leaves.describe(np.memmap(tmp_path / "m", np.uint8, "w+", shape=(3,)), "a")


class Scaled(torch.Tensor):
    """A subclass that holds more than its elements."""


def quantized():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)


def freed():
    tensor = torch.ones(5)
    tensor.untyped_storage().resize_(0)
    return tensor


def nested():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


@pytest.mark.parametrize(
    ("make", "named"),
    [
        (lambda: torch.eye(3).to_sparse(), "sparse"),
        (lambda: torch.eye(3).to_mkldnn(), "mkldnn"),
        (lambda: torch.ones(3, device="meta"), "meta"),
        (lambda: torch.ones(3).as_subclass(Scaled), "Scaled"),
        (lambda: torch.nn.Parameter(torch.ones(3).as_subclass(Scaled)), "Scale"),
        (lambda: torch.nn.UninitializedParameter(), "Uninitialized"),
        (quantized, "quantized"),
        (nested, "nested"),
        (freed, "freed"),
        (lambda: "text", "str"),
    ],
)
def test_leaf_that_could_not_come_back_is_refused_by_name(make, named):
    with pytest.raises(UnsupportedLeafError, match=named) as caught:
        leaves.describe(make(), "opt/0")
    assert caught.value.path == "opt/0"
    assert caught.value.advice


def test_distributed_tensor_is_refused_with_advice_of_its_own():
    kind = type("DTensor", (torch.Tensor,), {})
    with pytest.raises(UnsupportedLeafError, match="full_tensor"):
        leaves.describe(torch.ones(3).as_subclass(kind), "w")


def test_identity_of_two_views_is_equal_only_for_the_same_elements():
    big = torch.arange(20.0)
    complex_one = torch.ones(3, dtype=torch.complex64)

    def of(tensor):
        return leaves.describe(tensor, "").identity

    assert of(big) == of(big.detach()) == of(torch.nn.Parameter(big))
    others = [big, big[:10], big[1:], big[::2], big.view(4, 5), big.view(4, 5).t(), big.view(torch.int32)]
    others += [complex_one, complex_one.conj(), big.clone(), torch.empty(0), torch.empty(0)]
    assert len({of(tensor) for tensor in others}) == len(others)


@pytest.mark.parametrize("size", [0, 39, 41, 80])
def test_copy_into_room_of_another_length_raises(size):
    for source in (torch.ones(10), torch.ones(20)[::2], np.ones(10, np.float32)):
        with pytest.raises(LayoutError, match="40 bytes"):
            leaves.copy_bits(source, np.zeros(size, np.uint8))


@pytest.mark.parametrize(
    "make", [lambda t: t, lambda t: t.t(), lambda t: t.t().numpy(), lambda t: t.numpy()], ids=range(4)
)
def test_copy_of_large_leaf_allocates_next_to_nothing(make):
    source = make(torch.zeros(1000, 1000))
    out = np.empty(4_000_000, np.uint8)
    leaves.copy_bits(source, out)
    tracemalloc.start()
    try:
        leaves.copy_bits(source, out)
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


def test_copy_keeps_nothing_of_the_source():
    source = torch.ones(100)
    _, bits = bits_of(source)
    source.fill_(2)
    assert (bits.view(np.float32) == 1).all()


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_revived_tensor_wraps_writable_memory_and_copies_other(library):
    bits = raw(64)
    owned = leaves.revive(library, bits, dtype="float32", shape=(16,))
    assert np.shares_memory(np.asarray(owned), bits)
    locked = bits.copy()
    locked.flags.writeable = False
    shifted = raw(65)[1:]
    for given_bits in (locked, shifted):
        found = leaves.revive(library, given_bits, dtype="float32", shape=(16,))
        assert not np.shares_memory(np.asarray(found), given_bits)
        assert np.asarray(found).tobytes() == given_bits.tobytes()


@pytest.mark.parametrize(
    ("dtype", "shape", "error"),
    [
        ("float32", (3,), CorruptDataError),
        ("float32", (2**40, 2**40), CorruptDataError),
        ("nonsense", (4,), UnknownFormatError),
        ("object", (1,), UnknownFormatError),
        ("<U4", (1,), UnknownFormatError),
    ],
)
def test_revive_of_what_does_not_fit_raises(dtype, shape, error):
    with pytest.raises(error):
        leaves.revive("torch", np.zeros(16, np.uint8), dtype=dtype, shape=shape)


@pytest.mark.parametrize("library", ["torch", "numpy"])
def test_revive_of_impossible_empty_shape_raises(library):
    with pytest.raises(CorruptDataError):
        leaves.revive(library, np.zeros(0, np.uint8), dtype="float32", shape=(2**62, 0, 2**62))


def test_dress_of_whole_numbers_with_gradient_raises():
    base = torch.zeros(3, dtype=torch.int64)
    for form in (Form("tensor", True), Form("parameter", True)):
        with pytest.raises(CorruptDataError):
            leaves.dress(base, form)


def test_revive_without_torch_names_the_import_error(monkeypatch):
    def fail(name):
        raise ImportError("libtorch.so is broken")

    monkeypatch.setattr(importlib, "import_module", fail)
    with pytest.raises(ConfigError, match=r"libtorch.so is broken.*pip install"):
        leaves.revive("torch", np.zeros(4, np.uint8), dtype="float32", shape=(1,))


def test_layout_in_a_process_without_torch_saves_and_loads_numpy_without_importing_it():
    code = """
import sys
import numpy as np
from fastcheck_dask.layout import leaves, state
flat = state.flatten({"a": np.arange(100.0), "b": np.float64(3), "c": [1, (2,)]})
out = np.empty(800, np.uint8)
leaves.copy_bits(flat.sources[0], out)
found = state.unflatten(flat.tree, lambda spec: out, arrays=flat.arrays)
assert (found["a"] == np.arange(100.0)).all() and found["c"] == [1, (2,)]
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
