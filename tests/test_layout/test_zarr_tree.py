"""What stock zarr makes of the documents: every name, every true bit, no warning."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from fastcheck_codecs import PrefixIndex
from hypothesis import given, settings
from hypothesis import strategies as st
from zarr.core.metadata.v3 import ArrayV3Metadata

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.layout import zarr_tree
from fastcheck_dask.layout.chunks import ArraySpec, chunk_shape_for
from fastcheck_dask.layout.dtypes import codec_dtype, itemsize_of, zarr_dtype
from fastcheck_dask.layout.manifest import Manifest, digest_of_manifest

DTYPES = (
    *("float32", "float64", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"),
    *("complex64", "complex128", "complex32", "bool", "int8", "uint8", "int16", "uint16"),
    *("int32", "uint32", "int64", "uint64", "int4", ">f4", ">i8", "<U5", ">U3", "|S3", "<M8[ns]", "<m8[s]"),
)

# Reads everything in a process that has only zarr and the codecs that its entry points name.
READER = """
import json, sys
import numpy as np, zarr
found = {}
modes = {"default": {}, "walked": {"use_consolidated": False}, "consolidated": {"use_consolidated": True}}
for mode in sys.argv[2:]:
    group = zarr.open_group(sys.argv[1], mode="r", **modes[mode])
    found[mode] = {
        path: [str(node.dtype), list(node.shape), np.asarray(node[...]).tobytes().hex(),
               node.attrs["fastcheck"]["dtype"]]
        for path, node in group.members(max_depth=None) if isinstance(node, zarr.Array)
    }
assert "fastcheck_dask" not in sys.modules
print(json.dumps(found))
"""


def make_manifest(*specs: ArraySpec) -> Manifest:
    digests = {chunk.key: "0" * 8 for spec in specs for chunk in spec.chunks}
    return Manifest("run", 7, "tag", "token", 1.5, None, specs, digests)


def make_spec(path: str, dtype: str, shape: tuple[int, ...], chunk_bytes: int = 60) -> ArraySpec:
    return ArraySpec(path, dtype, shape, chunk_shape_for(shape, itemsize_of(dtype), chunk_bytes))


def bits_of(dtype: str, shape: tuple[int, ...], seed: int = 0) -> bytes:
    nbytes = math.prod(shape) * itemsize_of(dtype)
    random = np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, nbytes, np.uint8)
    return random.tobytes()


def read_by_stock_zarr(folder: Path, *modes: str) -> dict[str, dict[str, list]]:
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", READER, str(folder), *modes],
        capture_output=True,
        text=True,
        timeout=100,
        cwd=folder,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert not done.stderr
    return json.loads(done.stdout)


def put(folder: Path, files: dict[str, bytes]) -> None:
    for path, data in files.items():
        target = folder / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)


def encoded(spec: ArraySpec, bits: bytes) -> dict[str, bytes]:
    codec = PrefixIndex(dtype=codec_dtype(spec.dtype))
    raw = np.frombuffer(bits, np.uint8)
    return {c.key: codec.encode(raw[c.offset : c.offset + c.nbytes]).tobytes() for c in spec.chunks}


def test_stock_zarr_every_dtype_and_edge_chunk_reads_true_bits(tmp_path):
    specs, payloads, inline, wanted = [], {}, [], {}
    for number, dtype in enumerate(DTYPES):
        for shape in [(7,), (5, 3), (3, 5, 7)]:
            spec = make_spec(f"model/{number}.weight/{len(shape)}d", dtype, shape)
            bits = bits_of(dtype, shape, seed=number)
            specs.append(spec)
            payloads |= encoded(spec, bits)
            wanted[spec.path] = (dtype, shape, bits)
        small = [("scalar", ()), ("row", (3,)), ("square", (2, 2)), ("none", (0,)), ("no_rows", (2, 0, 3))]
        for name, shape in small:
            bits = bits_of(dtype, shape, seed=100 + number)
            inline.append((f"inline/{number}/{name}", dtype, shape, bits))
            wanted[f"inline/{number}/{name}"] = (dtype, shape, bits)
    assert any(len(spec.chunks) > 1 and spec.shape[0] % spec.chunk_shape[0] for spec in specs)
    manifest = make_manifest(*specs)
    put(tmp_path, payloads | zarr_tree.documents(manifest, inline) | zarr_tree.inline_chunks(inline))

    found = read_by_stock_zarr(tmp_path, "default", "walked", "consolidated")

    for mode in ("default", "walked", "consolidated"):
        assert found[mode].keys() == wanted.keys()
        for path, (dtype, shape, bits) in wanted.items():
            stored, stored_shape, got, true_dtype = found[mode][path]
            assert np.dtype(stored) == np.dtype(zarr_dtype(dtype))
            assert tuple(stored_shape) == zarr_tree.stored_shape_of(dtype, shape)
            assert got == bits.hex(), (mode, path)
            assert true_dtype == dtype


def test_stock_zarr_group_inside_opened_alone_lists_its_members(tmp_path):
    inline = [
        ("model/layers.0/bias", "float32", (1,), b"\0\0\x80?"),
        ("model/step", "int64", (), b"\1" + bytes(7)),
    ]
    put(tmp_path, zarr_tree.documents(make_manifest(), inline) | zarr_tree.inline_chunks(inline))

    found = read_by_stock_zarr(tmp_path / "model", "default")["default"]

    assert found.keys() == {"layers.0/bias", "step"}
    assert found["step"][2] == (b"\1" + bytes(7)).hex()


ELEMENTS = {
    "float32": [0, 0x80000000, 0x7FC00000, 0xFFC00000, 0x7F800001, 0x7F800000, 0xFF800000, 0x3DCCCCCD, 1],
    "float16": [0, 0x8000, 0x7E00, 0x7E01, 0xFE00, 0x7C01, 0x7C00, 0xFC00, 1],
    "float64": [0, 1 << 63, 0x7FF8 << 48, (0x7FF8 << 48) + 1, 0xFFF8 << 48, 0x7FF0 << 48, 0xFFF0 << 48, 1],
    "int64": [0, 1, (1 << 64) - 1, 1 << 63, (1 << 53) + 1],
    "uint64": [0, (1 << 64) - 1, (1 << 53) + 1],
    "bool": [0, 1, 2, 255],
    "bfloat16": [0, 0x8000, 0x7FC1, 0x3F80],
    "float8_e4m3fn": [0, 0x80, 0x7F],
}


COMPLEX_ELEMENTS = ["000000800000c07f", "0000c0ff00000000", "0000807f000080ff"]
CASES = [
    (dtype, e.to_bytes(itemsize_of(dtype), "little")) for dtype, found in ELEMENTS.items() for e in found
]


@pytest.mark.parametrize(
    ("dtype", "element"), [*CASES, *(("complex64", bytes.fromhex(e)) for e in COMPLEX_ELEMENTS)]
)
def test_fill_value_special_element_is_exact_or_a_chunk_is_written(dtype, element):
    assert_shown_exactly(dtype, (2, 3), element * 6)
    assert_shown_exactly(dtype, (), element)


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_inline_array_any_bits_is_shown_exactly(data):
    dtype = data.draw(st.sampled_from(DTYPES))
    shape = tuple(data.draw(st.lists(st.integers(0, 3), max_size=3)))
    width = itemsize_of(dtype)
    count = math.prod(shape)
    if data.draw(st.booleans()):
        bits = data.draw(st.binary(min_size=width, max_size=width)) * count
    else:
        bits = data.draw(st.binary(min_size=width * count, max_size=width * count))
    assert_shown_exactly(dtype, shape, bits)


def assert_shown_exactly(dtype: str, shape: tuple[int, ...], bits: bytes) -> None:
    inline = [("a", dtype, shape, bits)]
    document = json.loads(zarr_tree.documents(make_manifest(), inline)["a/zarr.json"])
    metadata = ArrayV3Metadata.from_dict(document)
    stored = metadata.data_type.to_native_dtype()
    chunks = zarr_tree.inline_chunks(inline)
    if chunks:
        assert metadata.shape == metadata.chunk_grid.chunk_shape
        key = "a/" + metadata.encode_chunk_key((0,) * metadata.ndim)
        assert chunks == {key: bits}
    else:
        assert np.full(metadata.shape, metadata.fill_value, stored).tobytes() == bits


@settings(deadline=None, max_examples=200)
@given(
    st.sampled_from(DTYPES),
    st.lists(st.integers(0, 9), min_size=1, max_size=4).map(tuple),
    st.integers(1, 200),
)
def test_chunk_keys_any_shape_and_dtype_are_those_that_zarr_asks_for(dtype, shape, chunk_bytes):
    spec = make_spec("a/b", dtype, shape, chunk_bytes)

    document = json.loads(zarr_tree.documents(make_manifest(spec), [])["a/b/zarr.json"])

    metadata = ArrayV3Metadata.from_dict(document)
    coordinates = metadata.chunk_grid.all_chunk_coords(metadata.shape)
    asked = {f"a/b/{metadata.encode_chunk_key(c)}" for c in coordinates}
    assert {chunk.key for chunk in spec.chunks} == (asked if spec.nbytes else set())


def test_documents_root_comes_last_and_holds_every_other_one():
    manifest = make_manifest(make_spec("model/w", "bfloat16", (4, 4)))
    inline = [("step", "int64", (), bytes(8))]

    found = zarr_tree.documents(manifest, inline)

    assert list(found)[-1] == "zarr.json"
    assert found["zarr.json"] == zarr_tree.root_document(manifest, inline)
    root = json.loads(found.pop("zarr.json"))
    members = root["consolidated_metadata"]["metadata"]
    assert members == {path.removesuffix("/zarr.json"): json.loads(data) for path, data in found.items()}
    assert members.keys() == {"model", "model/w", "step"}
    described = root["attributes"]["fastcheck"]
    assert described["manifest"] == {
        "file": ".fastcheck/manifests/00000007-tag.json",
        "sha256": digest_of_manifest(manifest.to_bytes()),
    }
    assert (described["run"], described["generation"], described["tag"]) == ("run", 7, "tag")


def test_document_of_a_dtype_that_zarr_lacks_names_the_true_one_to_reader_and_codec():
    found = zarr_tree.documents(
        make_manifest(make_spec("w", "bfloat16", (4, 4)), make_spec("b", ">f4", (9,))), []
    )
    codec = {"name": "fastcheck.prefix_index", "configuration": {"dtype": "bfloat16"}}
    document = json.loads(found["w/zarr.json"])
    assert document["codecs"] == [{"name": "bytes", "configuration": {"endian": "little"}}, codec]
    assert document["data_type"] == "uint16"
    assert document["attributes"] == {
        "fastcheck": {"dtype": "bfloat16", "stored_dtype": "uint16", "shape": [4, 4]}
    }
    described = json.loads(found["b/zarr.json"])["attributes"]["fastcheck"]
    assert (described["dtype"], described["byte_order"]) == (">f4", "big")


@pytest.mark.parametrize("paths", [("a", "a"), ("a", "a/b"), ("a/b/c", "a/b"), ("",)])
def test_documents_paths_that_collide_are_refused(paths):
    inline = [(path, "int8", (1,), b"\1") for path in paths]
    with pytest.raises(LayoutError):
        zarr_tree.documents(make_manifest(), inline)


def test_documents_inline_bits_of_wrong_length_are_refused():
    with pytest.raises(LayoutError, match="3 bytes for int16"):
        zarr_tree.documents(make_manifest(), [("a", "int16", (2,), b"abc")])
