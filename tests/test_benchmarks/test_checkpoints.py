import dataclasses
import json

import numpy as np
import pytest
import torch

from benchmarks import checkpoints, codec_models


@pytest.mark.parametrize(
    ("losses", "fell"),
    [
        ([2.3] * 150 + [0.3] * 150, True),
        ([2.3] * 300, False),
        ([4.0] * 20 + [2.2] * 280, False),  # below its start, no better than a guess
        ([0.3] * 300, False),
    ],
)
def test_learned_curve_is_judged_by_its_start_and_a_guess(losses, fell):
    assert checkpoints.learned(losses, 2.3) is fell


def test_find_run_that_is_not_cached_returns_none(tmp_path):
    assert checkpoints.find("vgg_sgd", tmp_path) is None


def test_find_run_that_did_not_learn_is_refused(cached_run):
    with pytest.raises(checkpoints.NotLearnedError, match="did not fall"):
        checkpoints.find("vgg_sgd", cached_run(last=1.9))


def test_find_run_that_learned_gives_its_snapshots(cached_run):
    found = checkpoints.find("vgg_sgd", cached_run())
    assert found.kinds == ["weights"]
    before, after = (found.load("late", k, "weights").view(np.uint32) for k in (0, 10))
    assert set(before ^ after) == {10}


def test_recipe_changed_gets_another_key():
    recipe = checkpoints.RUNS["vgg_sgd"]
    assert recipe.key != dataclasses.replace(recipe, rate=0.02).key


@pytest.mark.parametrize("name", checkpoints.RUNS)
def test_rate_rises_then_decays(name):
    recipe = checkpoints.RUNS[name]
    first, peak, last = (checkpoints.rate_at(recipe, step) for step in (1, checkpoints.WARM_UP, 300))
    assert first < peak == pytest.approx(recipe.rate)
    assert last <= 0.1 * peak * 1.001


@pytest.fixture
def short_training(monkeypatch):
    """Two steps of a net with 30 values, snapshots at both."""
    monkeypatch.setattr(checkpoints, "STEPS", 2)
    monkeypatch.setattr(checkpoints, "_KEPT", {1: ("late", 0), 2: ("late", 1)})
    tiny = torch.nn.Sequential(torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten(), torch.nn.Linear(3, 10))
    monkeypatch.setattr(codec_models, "resnet", lambda: tiny)
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("short_training")
def test_train_keeps_each_class_of_state_and_leaves_no_partial_folder(tmp_path):
    folder = checkpoints.train("resnet_adam", tmp_path)
    assert list(tmp_path.iterdir()) == [folder]
    assert len(json.loads((folder / "run.json").read_text())["losses"]) == 2
    for kind in ("weights", "exp_avg", "exp_avg_sq"):
        before, after = (np.load(folder / f"late_{k}_{kind}.npy") for k in (0, 1))
        assert before.dtype == np.float32
        assert before.size == 40
        assert not np.array_equal(before, after)


@pytest.mark.usefixtures("short_training")
def test_train_that_fails_leaves_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoints.Run, "step", lambda self, number: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        checkpoints.train("resnet_adam", tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("short_training")
def test_bf16_snapshot_is_the_rounded_master():
    run = checkpoints.Run(checkpoints.Recipe("resnet", "adam", 1e-3, bf16=True))
    run.step(1)
    state = run.snapshot()
    rounded = torch.tensor(state["weights"]).bfloat16().view(torch.int16).numpy()
    assert np.array_equal(rounded.view(np.uint16), state["weights_bf16"])
