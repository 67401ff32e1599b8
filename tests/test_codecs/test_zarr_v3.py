"""Arrays written with the codecs, read by stock zarr in a process that imports nothing of ours."""

import json
import subprocess
import sys

import numpy as np
import pytest
import zarr
from fastcheck_codecs import CodecError, PrefixIndex, XorDelta
from fastcheck_codecs.zarr_v3 import PrefixIndexCodec, XorDeltaCodec
from zarr.core.buffer import default_buffer_prototype

READER = """
import sys, zarr
array = zarr.open_array(sys.argv[1], mode="r")
assert not any(name.startswith("fastcheck_dask") for name in sys.modules)
sys.stdout.buffer.write(array[...].tobytes())
"""
CODECS = {
    "xor_delta": {"name": "fastcheck.xor_delta", "configuration": {}},
    "prefix_index": {"name": "fastcheck.prefix_index"},
    "table": {"name": "fastcheck.prefix_index", "configuration": {"prefix_bits": 9, "dtype": "float32"}},
}


@pytest.fixture
def data():
    rng = np.random.default_rng(0)
    array = (rng.standard_normal((70, 33)) * 1e-3).astype("f4")
    array[3] = -0.0
    array.view("u4")[5] = 0x7FC00123
    return array


def read_elsewhere(path):
    command = [sys.executable, "-W", "error", "-c", READER, str(path)]
    done = subprocess.run(command, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr.decode()
    assert done.stderr == b""
    return done.stdout


@pytest.mark.parametrize("shards", [None, (64, 32)], ids=["plain", "sharded"])
@pytest.mark.parametrize("codec", CODECS)
def test_v3_array_is_read_by_a_fresh_process(tmp_path, data, codec, shards):
    how = {"chunks": (32, 16), "shards": shards, "compressors": [CODECS[codec]]}
    array = zarr.create_array(tmp_path / "a", shape=data.shape, dtype="f4", **how)
    array[...] = data
    array[60:, 20:] = data[60:, 20:]
    assert read_elsewhere(tmp_path / "a") == data.tobytes()


@pytest.mark.parametrize("codec", [XorDelta(), PrefixIndex(), PrefixIndex(9, dtype="float32")], ids=repr)
@pytest.mark.parametrize("role", ["compressors", "filters"])
def test_v2_array_is_read_by_a_fresh_process(tmp_path, data, codec, role):
    roles = {"compressors": None, "filters": None, role: codec if role == "compressors" else [codec]}
    array = zarr.create_array(
        tmp_path / "a", shape=data.shape, dtype="f4", chunks=(32, 16), zarr_format=2, **roles
    )
    array[...] = data
    assert read_elsewhere(tmp_path / "a") == data.tobytes()


@pytest.mark.parametrize("dtype", ["?", "i1", "u2", "i8", "f2", "f8", "c8", ">f4", "S3", "U2", "M8[s]"])
@pytest.mark.filterwarnings("ignore::zarr.errors.UnstableSpecificationWarning")
@pytest.mark.parametrize("codec", ["xor_delta", "prefix_index"])
def test_v3_array_of_other_dtypes_is_exact(dtype, codec):
    data = (np.arange(77) % 2).astype(dtype)
    array = zarr.create_array({}, shape=77, dtype=dtype, chunks=10, compressors=[CODECS[codec]])
    array[...] = data
    assert array[...].tobytes() == data.tobytes()


def test_v3_scalar_array_is_exact():
    array = zarr.create_array({}, shape=(), dtype="f8", compressors=[CODECS["prefix_index"]])
    array[...] = -0.0
    assert np.signbit(array[...])


def test_v3_array_of_strings_is_exact():
    array = zarr.create_array({}, shape=3, dtype=str, chunks=2, compressors=[CODECS["prefix_index"]])
    array[...] = np.array(["a", "", "long " * 30], dtype=object)
    assert list(array[...]) == ["a", "", "long " * 30]


def put(array, key, payload):
    zarr.core.sync.sync(array.store.set(key, default_buffer_prototype().buffer.from_array_like(payload)))


@pytest.mark.parametrize("codec", ["xor_delta", "prefix_index"])
def test_edge_chunk_stored_without_its_end_is_filled_up(codec):
    array = zarr.create_array(
        {}, shape=13, dtype="f4", chunks=10, compressors=[CODECS[codec]], config={"write_empty_chunks": True}
    )
    data = np.linspace(1, 2, 13, dtype="f4")
    put(array, "c/0", PrefixIndex().encode(data[:10]))
    put(array, "c/1", XorDelta().encode(data[10:]))
    assert array[...].tobytes() == data.tobytes()
    array.resize(20)
    assert array[13:].tobytes() == bytes(28)


def test_payload_larger_than_its_chunk_is_refused():
    array = zarr.create_array({}, shape=10, dtype="f4", chunks=10, compressors=[CODECS["prefix_index"]])
    put(array, "c/0", PrefixIndex().encode(np.zeros(11, "f4")))
    with pytest.raises(CodecError, match="44 raw bytes"):
        array[...]


def test_delta_in_a_store_is_refused():
    array = zarr.create_array({}, shape=10, dtype="f4", chunks=10, compressors=[CODECS["xor_delta"]])
    put(array, "c/0", XorDelta(base=np.ones(10, "f4")).encode(np.zeros(10, "f4")))
    with pytest.raises(CodecError, match="no base"):
        array[...]


def test_damaged_chunk_is_refused(data):
    store = {}
    array = zarr.create_array(
        store, shape=data.shape, dtype="f4", chunks=(70, 33), compressors=[CODECS["xor_delta"]]
    )
    array[...] = data
    payload = array.store._store_dict["c/0/0"].as_numpy_array().copy()
    payload[payload.size // 2] ^= 1
    put(array, "c/0/0", payload)
    with pytest.raises(CodecError):
        array[...]


def test_behind_another_compressor_is_refused_when_writing(data):
    array = zarr.create_array(
        {}, shape=data.shape, dtype="f4", compressors=[zarr.codecs.GzipCodec(), CODECS["prefix_index"]]
    )
    with pytest.raises(CodecError, match="first codec"):
        array[...] = data


def test_metadata_holds_the_configuration(tmp_path):
    codecs = {"a": PrefixIndexCodec(prefix_bits=12, dtype="bfloat16"), "b": XorDeltaCodec()}
    for name, codec in codecs.items():
        zarr.create_array(tmp_path / name, shape=4, dtype="u2", compressors=[codec])
        stored = json.loads((tmp_path / name / "zarr.json").read_text())["codecs"][-1]
        assert stored == codec.to_dict()
        assert type(codec).from_dict(stored) == codec
    assert XorDeltaCodec().to_dict() == {"name": "fastcheck.xor_delta", "configuration": {}}


@pytest.mark.parametrize("settings", [{"level": 3}, {"prefix_bits": 3}])
def test_configuration_that_is_wrong_is_refused(settings):
    with pytest.raises(CodecError):
        PrefixIndexCodec.from_dict({"name": "fastcheck.prefix_index", "configuration": settings})
