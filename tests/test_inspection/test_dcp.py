from __future__ import annotations

import pickle
import shutil
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from fastcheck_dask.errors import CorruptDataError, UnknownFormatError
from fastcheck_dask.inspection.dcp import is_dcp, read_dcp


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def save(state, folder):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(state, checkpoint_id=str(folder), no_dist=True)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A state, and the folder into which torch saved it."""
    torch.manual_seed(0)
    model = torch.nn.Linear(5, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(5)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 3, "l": [1, torch.ones(2)]}
    folder = tmp_path_factory.mktemp("dcp") / "saved"
    save(state, folder)
    return state, folder


@pytest.fixture
def copy(saved, tmp_path):
    return Path(shutil.copytree(saved[1], tmp_path / "copy"))


def altered(folder, change):
    """Change the metadata with pickle, as an attacker or a bug might."""
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata, protocol=4))


def test_state_comes_back_as_torch_saved_it(saved):
    state, folder = saved
    assert is_dcp(folder)
    found = read_dcp(folder)
    assert (found["epoch"], found["l"][0]) == (3, 1)
    assert torch.equal(found["l"][1], torch.ones(2))
    assert torch.equal(found["model"]["weight"], state["model"]["weight"])
    assert torch.equal(found["opt"]["state"]["0"]["exp_avg"], state["opt"]["state"][0]["exp_avg"])
    assert found["opt"]["param_groups"][0]["betas"] == (0.9, 0.999)


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_metadata_of_every_protocol_is_followed(copy, saved, protocol):
    metadata = pickle.loads((copy / ".metadata").read_bytes())
    (copy / ".metadata").write_bytes(pickle.dumps(metadata, protocol=protocol))
    assert torch.equal(read_dcp(copy)["model"]["bias"], saved[0]["model"]["bias"])


def test_shards_of_several_ranks_are_put_together(tmp_path):
    whole = torch.arange(35.0).reshape(7, 5)
    chunks, storage, at = [], {}, 0
    with open(tmp_path / "__0_0.distcp", "wb") as file:
        for rows in ((0, 3), (3, 5), (5, 7)):
            offsets = torch.Size([rows[0], 0])
            torch.save(whole[slice(*rows)].clone(), file)
            chunks.append(ChunkStorageMetadata(offsets, torch.Size([rows[1] - rows[0], 5])))
            info = dcp.filesystem._StorageInfo("__0_0.distcp", at, file.tell() - at)
            storage[MetadataIndex("w", offsets, len(chunks) - 1)] = info
            at = file.tell()
    described = TensorStorageMetadata(TensorProperties(dtype=torch.float32), torch.Size([7, 5]), chunks)
    metadata = Metadata({"w": described}, None, storage)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    assert torch.equal(read_dcp(tmp_path)["w"], whole)
    for change, said in [
        (lambda m: m.state_dict_metadata["w"].chunks.pop(), "do not add up"),
        (lambda m: m.state_dict_metadata["w"].chunks.__setitem__(2, chunks[1]), "overlap"),
        (lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([5, 7])), "overlap or lie outside"),
    ]:
        (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
        altered(tmp_path, change)
        with pytest.raises(CorruptDataError, match=said):
            read_dcp(tmp_path)


def test_metadata_with_a_call_in_it_runs_nothing(copy, tmp_path):
    trap = tmp_path / "executed"
    (copy / ".metadata").write_bytes(pickle.dumps(Bomb(trap)))
    with pytest.raises(CorruptDataError, match=r"\.metadata: damaged"):
        read_dcp(copy)
    altered_data = pickle.dumps({"x": Bomb(trap)}, protocol=0)
    (copy / ".metadata").write_bytes(altered_data)
    with pytest.raises(UnknownFormatError, match="the operation"):
        read_dcp(copy)
    assert not trap.exists()


def test_item_with_a_call_in_it_runs_nothing_unless_trusted(tmp_path):
    trap = tmp_path / "executed"
    save({"w": torch.ones(3), "x": Bomb(trap)}, tmp_path / "saved")
    with pytest.raises(CorruptDataError, match=r"x in __0_0.distcp .*--trust"):
        read_dcp(tmp_path / "saved")
    assert not trap.exists()
    read_dcp(tmp_path / "saved", trust=True)
    assert trap.exists()


def first(mapping):
    return next(iter(mapping.values()))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda m: setattr(first(m.storage_data), "relative_path", "../x"), "outside of the folder"),
        (lambda m: setattr(first(m.storage_data), "relative_path", "x"), "FileNotFoundError"),
        (lambda m: setattr(first(m.storage_data), "length", 2**62), "shorter than it says"),
        (lambda m: setattr(first(m.storage_data), "offset", -1), "shorter than it says"),
        (lambda m: setattr(first(m.storage_data), "transform_descriptors", ["zstd"]), "transformed"),
        (lambda m: setattr(m.state_dict_metadata["model.weight"], "size", torch.Size([2**40])), "weight"),
        (lambda m: m.storage_data.pop(next(iter(m.storage_data))), "KeyError"),
        (lambda m: m.planner_data.update({"epoch": ("model",)}), "twice|inside"),
        (lambda m: m.planner_data.update({"epoch": ("model", "weight", "x")}), "inside"),
    ],
    ids=["leaves", "missing", "long", "negative", "transformed", "huge", "unstored", "twice", "inside"],
)
def test_metadata_that_cannot_be_is_refused(copy, change, said):
    altered(copy, change)
    with pytest.raises(CorruptDataError, match=said):
        read_dcp(copy)


def test_damaged_file_is_refused(copy):
    file = copy / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[: len(data) // 2] = bytes(len(data) // 2)
    file.write_bytes(data)
    with pytest.raises(CorruptDataError, match=r"__0_0\.distcp"):
        read_dcp(copy)
