from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from fastcheck_dask.errors import ConfigError, CorruptDataError, UnknownFormatError
from fastcheck_dask.inspection.foreign import read_foreign


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_torch_file_comes_back(tmp_path):
    wanted = {"w": torch.arange(10.0), "b": torch.ones(3, dtype=torch.bfloat16), "step": 3}
    torch.save(wanted, tmp_path / "x.bin")
    found = read_foreign(tmp_path / "x.bin")
    assert found["step"] == 3
    assert torch.equal(found["w"], wanted["w"])


def test_torch_file_with_more_than_data_runs_nothing_unless_trusted(tmp_path):
    trap = tmp_path / "executed"
    torch.save({"w": torch.ones(3), "x": Bomb(trap)}, tmp_path / "x.pt")
    with pytest.raises(CorruptDataError, match="--trust runs it"):
        read_foreign(tmp_path / "x.pt")
    assert not trap.exists()
    read_foreign(tmp_path / "x.pt", trust=True)
    assert trap.exists()


def test_folder_of_safetensors_is_one_state_and_a_name_in_two_files_is_refused(tmp_path):
    save_file({"a": torch.ones(2)}, tmp_path / "1.safetensors")
    save_file({"b": torch.zeros(3)}, tmp_path / "2.safetensors")
    assert read_foreign(tmp_path).keys() == {"a", "b"}
    save_file({"b": torch.zeros(3)}, tmp_path / "3.safetensors")
    with pytest.raises(CorruptDataError, match="'b' stands in another file"):
        read_foreign(tmp_path)


@pytest.mark.parametrize("suffix", [".safetensors", ".pt"])
def test_damaged_and_empty_files_are_refused(tmp_path, suffix):
    file = tmp_path / f"x{suffix}"
    for data in (b"", b"x" * 100, pickle.dumps(Bomb(tmp_path / "executed"))):
        file.write_bytes(data)
        with pytest.raises(CorruptDataError, match="x"):
            read_foreign(file)
    assert not (tmp_path / "executed").exists()


def test_what_is_not_there_or_nothing_known_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="does not exist"):
        read_foreign(tmp_path / "x.pt")
    with pytest.raises(UnknownFormatError, match="neither"):
        read_foreign(tmp_path)
