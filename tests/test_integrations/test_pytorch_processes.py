"""Whole trainings, in processes of their own."""

from __future__ import annotations

import importlib.util
import json
import re
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import dask
import pytest
import torch

import fastcheck_dask.integrations.training_state as training_state
from fastcheck_dask.errors import ClosedError
from fastcheck_dask.integrations.pytorch import FastCheckWrapper

SCRIPT = Path(__file__).with_name("trainer_process.py")
GUIDE = Path(__file__).parents[2] / "docs" / "guides" / "pytorch.md"


@pytest.mark.slow
def test_training_killed_after_durable_save_goes_on_bit_for_bit(tmp_path: Path, trainer: ModuleType) -> None:
    straight = {}
    for recipe in trainer.RECIPES:
        training = trainer.Training(recipe)
        for _ in range(trainer.TOTAL):
            training.step()
        straight[recipe] = training.digests()
    command = [sys.executable, "-W", "error", str(SCRIPT)]
    with subprocess.Popen(
        [*command, "first", str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "durable\n"
        finally:
            process.kill()
    assert process.returncode == -signal.SIGKILL
    resumed = subprocess.run(
        [*command, "resume", str(tmp_path)], check=True, capture_output=True, text=True, timeout=100
    )
    assert json.loads(resumed.stdout) == straight


def test_training_with_saves_draws_the_same_numbers_as_without(tmp_path: Path, trainer: ModuleType) -> None:
    plain = trainer.Training("adamw")
    for _ in range(4):
        plain.step()
    want = plain.digests()
    saved = trainer.Training("adamw")
    with saved.wrapper(tmp_path / "ckpt") as wrapper:
        assert wrapper.load_checkpoint() == (0, 0)
        for step in range(1, 5):
            saved.step()
            wrapper.save_checkpoint(0, step)
        assert saved.digests() == want


class SavingInWorkers(torch.utils.data.Dataset[int]):
    """Each item tells what a save in the process that makes it ends with: 1 for ClosedError."""

    def __init__(self, wrapper: FastCheckWrapper) -> None:
        self.wrapper = wrapper

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> int:
        try:
            self.wrapper.save_checkpoint(0, 1000 + index)
        except ClosedError:
            # Closing, as an exit handler would, must not reach what belongs to the parent.
            self.wrapper.close()
            return 1
        return 0


def test_save_while_forked_dataloader_lives_is_the_parents_alone(tmp_path: Path, trainer: ModuleType) -> None:
    training = trainer.Training("sgd")
    with training.wrapper(tmp_path / "ckpt") as wrapper:
        loader = torch.utils.data.DataLoader(
            SavingInWorkers(wrapper), batch_size=1, num_workers=2, multiprocessing_context="fork"
        )
        refused = 0
        for step, batch in enumerate(loader, 1):
            training.step()
            wrapper.save_checkpoint(0, step).wait("object")
            refused += int(batch.sum())
        assert refused == 4
        assert wrapper.manager.tags() == [f"epoch0_step{step}" for step in range(1, 5)]
        at_save = training.digests()["model"]
        training.step()
        assert wrapper.load_checkpoint() == (0, 4)
        assert training.digests()["model"] == at_save


def test_import_fastcheck_alone_imports_no_torch() -> None:
    code = "import sys, fastcheck_dask, fastcheck_dask.integrations; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60, check=False).returncode == 0


def test_import_without_torch_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    spec = importlib.util.spec_from_file_location("without_torch", training_state.__file__)
    assert spec is not None
    assert spec.loader is not None
    with pytest.raises(ImportError, match=r"pip install 'fastcheck-dask\[torch\]'"):
        spec.loader.exec_module(importlib.util.module_from_spec(spec))


def test_guide_example_runs_as_printed_and_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    blocks = re.findall(r"```python\n(.*?)```", GUIDE.read_text(encoding="utf-8"), re.DOTALL)
    example = next(block for block in blocks if "load_checkpoint()" in block)
    monkeypatch.chdir(tmp_path)
    with dask.config.set({"fastcheck.local-dir": str(tmp_path / "shm")}):
        exec(compile(example, str(GUIDE), "exec"), {})
        first = capsys.readouterr().out
        exec(compile(example, str(GUIDE), "exec"), {})
    assert "from epoch 0, step 0" in first
    assert "from epoch 4, step 80" in capsys.readouterr().out
