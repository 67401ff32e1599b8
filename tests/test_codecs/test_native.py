"""The kernels in C give the bytes that numpy gives, and nobody needs them."""

import importlib.util
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex, XorDelta, kernels, native
from hypothesis import given, settings
from hypothesis import strategies as st

ROOT = Path(__file__).parents[2]
COMPILER = shutil.which(os.environ.get("CC", "cc"))


def build(folder, **environment):
    """Run the build of the kernels alone; return what it left."""
    done = subprocess.run(
        [sys.executable, "setup.py", "-q", "build_ext", "-b", folder / "lib", "-t", folder / "temp"],
        cwd=ROOT,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return list(folder.rglob("_kernels*.so"))


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """The kernels as they are in the tree, whether or not this installation has them."""
    if COMPILER is None:
        pytest.skip("no C compiler")
    (path,) = build(tmp_path_factory.mktemp("kernels"))
    spec = importlib.util.spec_from_file_location("fastcheck_codecs._kernels", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def both(compiled, work):
    """Do something with the kernels, and without."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "KERNELS", compiled)
        assert kernels() == "c"
        with_c = work()
        patch.setattr(native, "KERNELS", None)
        assert kernels() == "numpy"
        return with_c, work()


def state(seed, count, *, dtype, zeros, change):
    """Words of a training state, and the same some steps before."""
    rng = np.random.default_rng(seed)
    scale = np.exp2(rng.integers(-9, 1, count // 700 + 1)).repeat(700)[:count]
    values = (rng.standard_normal(count) * scale).astype("f4")
    values[rng.random(count) < zeros] = 0
    before = values + (rng.standard_normal(count) * change).astype("f4")
    if dtype == "bfloat16":
        return (values.view("u4") >> 16).astype("u2"), (before.view("u4") >> 16).astype("u2")
    return values.astype(dtype), before.astype(dtype)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 1000),
    count=st.one_of(st.integers(0, 200), st.integers(1000, 60_000)),
    dtype=st.sampled_from(["float32", "bfloat16", "float16", "float64"]),
    zeros=st.sampled_from([0, 0.001, 0.1, 0.9]),
    change=st.sampled_from([0, 1e-7, 1e-4, 1]),
)
def test_payloads_are_the_same_bytes_and_each_reads_the_other(compiled, seed, count, dtype, zeros, change):
    now, before = state(seed, count, dtype=dtype, zeros=zeros, change=change)
    for codec in (PrefixIndex(dtype=dtype), XorDelta(base=before, dtype=dtype)):
        with_c, plain = both(compiled, lambda codec=codec: codec.encode(now))
        np.testing.assert_array_equal(with_c, plain)
        for decoded in both(compiled, lambda codec=codec, payload=plain: codec.decode(payload)):
            assert decoded.tobytes() == now.tobytes()


@settings(max_examples=60, deadline=None)
@given(data=st.binary(max_size=5000), zeros=st.integers(0, 3), dtype=st.sampled_from(["uint8", "bfloat16"]))
def test_any_bytes_are_encoded_the_same(compiled, data, zeros, dtype):
    words = np.frombuffer(data, "u1").copy()
    words[words % 4 < zeros] = 0
    words = np.repeat(words, 7)
    for codec in (PrefixIndex(dtype=dtype), XorDelta(dtype=dtype)):
        with_c, plain = both(compiled, lambda codec=codec: codec.encode(words))
        np.testing.assert_array_equal(with_c, plain)
        for decoded in both(compiled, lambda codec=codec, payload=plain: codec.decode(payload)):
            assert decoded.tobytes() == words.tobytes()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10_000), dtype=st.sampled_from(["float32", "bfloat16"]))
def test_damage_is_the_same_error_or_the_same_bytes(compiled, seed, dtype):
    now, before = state(7, 6000, dtype=dtype, zeros=0.05, change=1e-4)
    rng = np.random.default_rng(seed)
    for codec in (
        PrefixIndex(dtype=dtype, checksum=False),
        XorDelta(base=before, dtype=dtype, checksum=False),
    ):
        payload = codec.encode(now)
        payload[rng.integers(48, payload.size, 3)] ^= np.uint8(1 << rng.integers(8))

        def decode(codec=codec, payload=payload):
            try:
                return codec.decode(payload).tobytes()
            except ValueError as error:
                return str(error)

        with_c, plain = both(compiled, decode)
        assert with_c == plain


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("split", (16, 8, 4, 5)),
        ("split", (15, 0, 4, 4)),
        ("join", (8, 4, 4, 0, 16)),
        ("join", (8, 4, 4, 1, 17)),
        ("pack", (100, 49, 100)),
        ("pack", (100, 56, 99)),
        ("unpack", (49, 100, 100)),
        ("list_filled", (100, 10, 9)),
        ("references", (1024, 2)),
        ("halves", (12, 4, 4)),
        ("halves", (16, 4, 3)),
        ("gather", (32, 2, 32)),
        ("gather", (32, 1, 31)),
        ("scatter", (2, 32, 32)),
        ("scatter", (1, 0, 32)),
    ],
)
def test_kernels_refuse_sizes_that_do_not_fit(compiled, name, sizes):
    numbers = {
        "references": (11, 5),
        "halves": (0, 0, 0),
        "pack": (0, 4),
        "unpack": (0, 4),
        "gather": (4,),
        "scatter": (4,),
    }.get(name, ())
    with pytest.raises(ValueError, match=f"{name}: sizes do not fit"):
        getattr(compiled, name)(*(np.zeros(size, "u1") for size in sizes), *numbers)


def test_kernels_refuse_memory_that_is_read_only_or_not_contiguous(compiled):
    fixed = np.zeros(8, "u1")
    fixed.flags.writeable = False
    with pytest.raises((BufferError, ValueError)):
        compiled.list_filled(np.zeros(8, "u1"), fixed, fixed)
    with pytest.raises((BufferError, ValueError)):
        compiled.list_filled(np.zeros(16, "u1")[::2], np.zeros(8, "u1"), np.zeros(8, "u1"))


def test_list_that_does_not_fit_is_said_so(compiled):
    assert compiled.list_filled(np.ones(40, "u1"), np.zeros(39, "u1"), np.zeros(39, "u1")) == -1


def test_build_without_a_compiler_goes_on(tmp_path):
    assert build(tmp_path, CC="false") == []


def test_variable_keeps_the_kernels_out_of_use():
    done = subprocess.run(
        [sys.executable, "-c", "from fastcheck_codecs import kernels; print(kernels())"],
        env={**os.environ, native.VARIABLE: "numpy"},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    assert done.stdout.strip() == "numpy"
