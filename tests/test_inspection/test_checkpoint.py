from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fastcheck_dask
from fastcheck_dask import open_checkpoint
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    CorruptDataError,
    ShardCorruptError,
    ShardUnavailableError,
)
from fastcheck_dask.tiers.folder_store import FolderStore


def test_open_newest_gives_every_array_bit_for_bit(location, checkpoints):
    checkpoints.save(location, "t1", generation=1)
    checkpoints.save(location, "t10", generation=10)
    found = open_checkpoint(location)
    state = checkpoints.state(10)["model"]
    assert (found.tag, found.generation, found.run, found.created_unix) == ("t10", 10, "run", 1.7e9)
    assert list(found) == [f"model/{name}" for name in state]
    for name, wanted in state.items():
        array = found[f"model/{name}"]
        got = array.numpy()
        assert (got.dtype, got.shape, got.tobytes()) == (wanted.dtype, wanted.shape, wanted.tobytes())
        assert (array.dtype, array.shape, array.nbytes) == (wanted.dtype.name, wanted.shape, wanted.nbytes)
        assert (array.ndim, array.size) == (wanted.ndim, wanted.size)
    assert found.tree == {"step": 10, "lr": 1e-3, "name": "small"}


def test_open_by_tag_and_by_directory(location, checkpoints):
    checkpoints.save(location, "t1", generation=1)
    checkpoints.save(location, "t2", generation=2)
    assert open_checkpoint(location, "t1").generation == 1
    base, mark, query = location.partition("?")
    direct = open_checkpoint(f"{base}/00000001-t1{mark}{query}")
    assert np.array_equal(direct["model/w"], checkpoints.state(1)["model"]["w"])
    with pytest.raises(CheckpointNotFoundError, match="'t3'; the newest tags are: t2, t1"):
        open_checkpoint(location, "t3")


def test_slices_read_only_the_chunks_they_need(folder, checkpoints, monkeypatch):
    checkpoints.save(folder)
    whole = checkpoints.state(1)["model"]["w"]
    array = open_checkpoint(folder)["model/w"]
    asked = []
    read = FolderStore.read
    monkeypatch.setattr(FolderStore, "read", lambda self, path: asked.append(path) or read(self, path))
    assert len(open_checkpoint(folder).manifest.chunks) > 12
    asked.clear()
    for key in [3, -1, (5, 7), slice(0, 2), slice(11, 14), slice(30, 2, -9), (slice(2, 4), [1, 3])]:
        asked.clear()
        assert np.array_equal(array[key], whole[key])
        rows = np.atleast_1d(np.arange(40)[key[0] if isinstance(key, tuple) else key])
        assert 1 <= len(asked) <= (rows.max() - rows.min()) // 10 + 2
    assert array[0:0].shape == (0, 100)
    assert [row.tobytes() for row in array] == [row.tobytes() for row in whole]
    assert array[..., 0].tobytes() == whole[..., 0].tobytes()
    with pytest.raises(IndexError):
        array[40]


def test_bfloat16_and_float8_are_integers_to_numpy_and_themselves_to_torch(folder, checkpoints):
    weights = torch.randn(300, 7, generator=torch.Generator().manual_seed(0))
    state = {"b": weights.bfloat16(), "f": weights.to(torch.float8_e4m3fn), "tiny": weights[0, :3].bfloat16()}
    checkpoints.save(folder, state=state)
    found = open_checkpoint(folder)
    assert [found[name].dtype for name in state] == ["bfloat16", "float8_e4m3fn", "bfloat16"]
    for name, wanted in state.items():
        integers = {1: torch.uint8, 2: torch.uint16}[wanted.element_size()]
        assert np.array_equal(found[name].numpy(), wanted.view(integers).numpy())
        got = found[name].torch()
        assert got.dtype is wanted.dtype
        assert torch.equal(got.view(integers), wanted.view(integers))
        assert np.array_equal(found[name][1:3], wanted.view(integers).numpy()[1:3])


def test_tied_and_expanded_tensors_are_there_under_every_name(folder, checkpoints):
    weight = torch.arange(1000.0).reshape(10, 100)
    state = {"embed": weight, "head": weight, "wide": torch.arange(100.0)[None].expand(50, 100)}
    checkpoints.save(folder, state=state)
    found = open_checkpoint(folder)
    assert found["head"].codec == "shared"
    assert found["head"].stored_nbytes == 0
    assert found["head"].torch().equal(weight)
    assert found["wide"].shape == (50, 100)
    assert found["wide"].torch().equal(state["wide"])
    assert np.array_equal(found["wide"][7], np.arange(100.0))
    assert found.nbytes == 4000 + 50 * 400


def test_a_state_that_is_one_array_and_scalars(folder, checkpoints):
    checkpoints.save(folder, state=np.array(3.0))
    found = open_checkpoint(folder)
    array = found["%root"]
    assert (array[()], array.shape, array.codec, array.stored_nbytes) == (3.0, (), "inline", 0)
    with pytest.raises(TypeError, match="no axes"):
        len(array)


def test_array_protocol_converts_and_never_shares(folder, checkpoints):
    checkpoints.save(folder)
    array = open_checkpoint(folder)["model/w"]
    assert np.asarray(array, np.float64).dtype == np.float64
    assert (array[:] + 1).shape == np.add(array, 1).shape
    with pytest.raises(ValueError, match="without a copy"):
        np.array(array, copy=False)
    first, second = array.numpy(), array.numpy()
    assert not np.shares_memory(first, second)
    assert bool(open_checkpoint(folder)["model/none"])


def test_sizes_and_codec_come_from_one_listing_and_no_data(location, checkpoints):
    noise = np.random.default_rng(0).integers(0, 256, 5000, np.uint8)
    checkpoints.save(location, state={"w": np.zeros(3000, np.float32), "noise": noise, "s": np.float32([1])})
    found = open_checkpoint(location)
    assert (found["w"].codec, found["noise"].codec, found["s"].codec) == ("prefix_index", "raw", "inline")
    assert 0 < found["w"].stored_nbytes < 1000
    assert found["noise"].stored_nbytes >= 5000
    assert found.stored_nbytes > found["noise"].stored_nbytes


def test_missing_name_says_what_is_near(folder, checkpoints):
    checkpoints.save(folder)
    found = open_checkpoint(folder)
    with pytest.raises(KeyError, match=r"'model/v' is not among the 5 arrays of t1; did you mean model/"):
        found["model/v"]
    with pytest.raises(KeyError, match="the first are model/w"):
        found["zzzzzzzzzzz"]
    assert "model/w" in found
    assert found.get("nothing") is None


def test_representations_name_what_there_is_and_escape_it(folder, checkpoints):
    checkpoints.save(folder, state={f"<b>{n}": np.zeros(100, np.float32) for n in range(20)})
    found = open_checkpoint(folder)
    text, markup = repr(found), found._repr_html_()
    assert text.startswith(
        "<Checkpoint t1 (generation 1 of run, 2023-11-14 22:13:20 UTC), 20 arrays, 8,000 bytes:"
    )
    assert "<b>0: float32 (100,)" in text
    assert "... and 8 more" in text
    assert "&lt;b&gt;0" in markup
    assert "<b>0" not in markup
    assert repr(found["<b>3"]) == "<LazyArray <b>3 float32 (100,)>"


@pytest.mark.parametrize(
    ("harm", "error"),
    [
        (lambda path: path.unlink(), ShardUnavailableError),
        (lambda path: path.write_bytes(b""), ShardUnavailableError),
        (lambda path: path.write_bytes(path.read_bytes()[:-5]), ShardCorruptError),
        (lambda path: path.write_bytes(b"\x80\x04."), ShardCorruptError),
    ],
    ids=["deleted", "empty", "truncated", "pickle"],
)
def test_damaged_chunk_is_named_by_what_needs_it_and_no_other(folder, checkpoints, harm, error):
    checkpoints.save(folder)
    harm(Path(folder) / "00000001-t1/model/w/c/0/0")
    array = open_checkpoint(folder)["model/w"]
    with pytest.raises(error, match="model/w/c/0/0"):
        array.numpy()
    with pytest.raises(error, match="model/w/c/0/0"):
        array[0]
    assert np.array_equal(array[39], checkpoints.state(1)["model"]["w"][39])


def test_damaged_manifest_is_refused(folder, checkpoints):
    checkpoints.save(folder)
    path = Path(folder) / ".fastcheck/manifests/00000001-t1.json"
    path.write_bytes(path.read_bytes().replace(b"small", b"large"))
    with pytest.raises(CorruptDataError, match="sha256"):
        open_checkpoint(folder)


def test_opening_imports_no_torch_and_no_network(folder, checkpoints):
    checkpoints.save(folder)
    code = f"""
import sys
from fastcheck_dask import open_checkpoint
print(float(open_checkpoint({folder!r})["model/scale"][0]))
print([name for name in ("torch", "distributed", "kazoo", "rich") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "1.5\n[]\n"


def test_exported_from_the_package():
    assert fastcheck_dask.open_checkpoint is open_checkpoint
