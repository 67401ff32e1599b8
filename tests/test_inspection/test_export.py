from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from fastcheck_dask import open_checkpoint
from fastcheck_dask.errors import ConfigError, LayoutError, ShardUnavailableError, TierError
from fastcheck_dask.inspection.export import export
from fastcheck_dask.inspection.foreign import read_foreign
from fastcheck_dask.tiers.object_store import open_store


def state():
    weight = torch.randn(60, 100, generator=torch.Generator().manual_seed(0))
    return {
        "model": {
            "w": weight,
            "tied": weight,
            "b": weight[0].bfloat16(),
            "f": weight[:3].to(torch.float8_e5m2),
            "s": torch.tensor(3.5),
            "e": torch.empty(0, 4),
            "wide": weight[:1].expand(7, 100),
        },
        "step": 7,
        "name": ("x", None),
    }


@pytest.fixture
def opened(folder, checkpoints):
    checkpoints.save(folder, state=state())
    return open_checkpoint(folder)


def bits(tensor):
    return tensor.contiguous().view(torch.uint8) if tensor.dim() else tensor


def test_safetensors_is_read_by_its_own_library(opened, tmp_path):
    done = export(opened, tmp_path / "x.safetensors", strip="model/")
    assert done.tensors == 7
    assert done.left_out == ("step", "name/0", "name/1")
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == state()["model"].keys()
    for name, wanted in state()["model"].items():
        assert (found[name].dtype, found[name].shape) == (wanted.dtype, wanted.shape)
        assert torch.equal(bits(found[name]), bits(wanted))
    with safe_open(tmp_path / "x.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt", "fastcheck.tag": "t1", "fastcheck.run": "run"}


def test_safetensors_reads_back_here(opened, tmp_path):
    export(opened, tmp_path / "x.safetensors", include="model/*")
    found = read_foreign(tmp_path / "x.safetensors")
    assert torch.equal(found["model/w"], state()["model"]["w"])
    # The file stays what it is.
    before = (tmp_path / "x.safetensors").read_bytes()
    found["model/w"].zero_()
    assert (tmp_path / "x.safetensors").read_bytes() == before


def test_torch_file_holds_the_state_as_it_was(opened, tmp_path):
    assert export(opened, tmp_path / "x.pt").tensors == 7
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert (found["step"], found["name"]) == (7, ("x", None))
    assert found["model"]["tied"] is found["model"]["w"]
    assert torch.equal(found["model"]["wide"], state()["model"]["wide"])
    assert export(opened, tmp_path / "part.pt", include="model/w").tensors == 1
    assert torch.load(tmp_path / "part.pt").keys() == {"model"}


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_file_that_is_there_is_replaced_only_if_told(opened, tmp_path, name):
    file = tmp_path / name
    file.write_text("mine")
    with pytest.raises(ConfigError, match="--force"):
        export(opened, file)
    assert file.read_text() == "mine"
    export(opened, file, force=True)
    assert file.stat().st_size > 1000


def test_file_made_meanwhile_is_not_replaced(opened, tmp_path, monkeypatch):
    file = tmp_path / "x.safetensors"
    link = os.link
    monkeypatch.setattr(os, "link", lambda *names: (file.write_text("mine"), link(*names)))
    with pytest.raises(ConfigError, match="is there already"):
        export(opened, file)
    assert file.read_text() == "mine"
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["x.safetensors"]


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt"])
def test_damaged_chunk_leaves_no_file(opened, folder, tmp_path, name):
    open_store(folder).delete("00000001-t1/model/w/c/3/0")
    with pytest.raises(ShardUnavailableError, match="model/w/c/3/0"):
        export(opened, tmp_path / name)
    assert [path for path in tmp_path.iterdir() if path.is_file()] == []


def test_what_cannot_be_is_refused(opened, tmp_path):
    for name, options, error, said in [
        ("x.npz", {}, ConfigError, "one of .safetensors"),
        ("x.pt", {"strip": "model/"}, ConfigError, "stripped"),
        ("x.safetensors", {"include": "nothing"}, LayoutError, "'nothing'"),
        ("x.pt", {"include": "nothing"}, LayoutError, "nothing"),
        ("no/x.pt", {}, TierError, "cannot be written"),
    ]:
        with pytest.raises(error, match=said):
            export(opened, tmp_path / name, **options)


def test_dtype_that_the_format_lacks_leaves_no_file(folder, checkpoints, tmp_path):
    checkpoints.save(folder, state={"z": np.zeros(100, np.complex128)})
    with pytest.raises(LayoutError, match="complex128"):
        export(open_checkpoint(folder), Path(tmp_path / "x.safetensors"))
    assert not (tmp_path / "x.safetensors").exists()
