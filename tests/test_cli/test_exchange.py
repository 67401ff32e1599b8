from __future__ import annotations

import numpy as np
import pytest
import torch

from fastcheck_dask import FastCheckManager, open_checkpoint
from fastcheck_dask.testing.checkpoints import write_joint


def test_export_writes_both_kinds_and_refuses_to_overwrite(saved, run, answer, tmp_path):
    done = answer("export", saved, "step_500", "--to", tmp_path / "x.safetensors", "--strip", "model/")
    assert (done["tensors"], done["left_out"]) == (2, ["step", "name"])
    assert "2 tensors" in run("export", saved, "--to", tmp_path / "x.pt").stdout
    assert "--force" in run("export", saved, "--to", tmp_path / "x.pt", status=2).stderr
    run("export", saved, "--to", tmp_path / "x.pt", "--force")
    assert ".safetensors" in run("export", saved, "--to", tmp_path / "x.npy", status=2).stderr


@pytest.mark.slow
def test_import_saves_a_checkpoint_that_loads_and_counts_on(run, answer, tmp_path, monkeypatch):
    monkeypatch.setenv("DASK_FASTCHECK__LOCAL_DIR", str(tmp_path / "shm"))
    state = {"w": torch.arange(3000.0), "b": torch.ones(300, dtype=torch.bfloat16), "step": 4}
    torch.save(state, tmp_path / "x.pt")
    found = answer("import", tmp_path / "x.pt", "--to", tmp_path / "c", "--tag", "a")
    assert (found["tag"], found["generation"]) == ("a", 1)
    run("export", tmp_path / "c", "--to", tmp_path / "x.safetensors", "--include", "[wb]")
    run("import", tmp_path / "x.safetensors", "--to", tmp_path / "c", "--tag", "b")
    newest = open_checkpoint(str(tmp_path / "c"))
    assert (newest.tag, newest.generation) == ("b", 2)
    assert np.array_equal(newest["w"], state["w"].numpy())
    assert torch.equal(newest["b"].torch(), state["b"])
    with FastCheckManager(tmp_path / "c", local_dir=tmp_path / "shm", encoders=1) as manager:
        assert manager.load("a")["step"] == 4


def test_import_of_nothing_or_of_code_is_refused(run, tmp_path):
    run("import", tmp_path / "no", "--to", tmp_path / "c", "--tag", "a", status=2)
    (tmp_path / "x.pt").write_bytes(b"\x80\x04junk")
    assert "x.pt" in run("import", tmp_path / "x.pt", "--to", tmp_path / "c", "--tag", "a", status=1).stderr
    run("import", tmp_path / "x.pt", "--to", tmp_path / "c", "--tag", "no/slash", status=2)
    assert not (tmp_path / "c").exists()


def test_export_of_a_rank(tmp_path, run, answer):
    states = [{"w": np.full(500, rank, np.float32)} for rank in range(2)]
    write_joint(str(tmp_path / "c"), states, "t1", number=1)
    file = tmp_path / "x.safetensors"
    assert "--rank 0" in run("export", tmp_path / "c", "--to", file, status=1).stderr
    assert answer("export", tmp_path / "c", "--rank", 1, "--to", file)["tensors"] == 1
