from __future__ import annotations

import collections
import logging
import os
import random
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import fastcheck_dask.integrations.training_state as training_state
from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import CheckpointNotFoundError, ClosedError, ConfigError, LayoutError
from fastcheck_dask.integrations.pytorch import FastCheckWrapper


@pytest.fixture(scope="module")
def manager(tmp_path_factory: pytest.TempPathFactory) -> Iterator[FastCheckManager]:
    """Return a manager that the tests share: each loads the newest checkpoint, or a tag that it saved."""
    folder = tmp_path_factory.mktemp("shared")
    with FastCheckManager(folder / "ckpt", local_dir=folder / "shm", encoders=1) as manager:
        yield manager


@pytest.fixture
def wrap(manager: FastCheckManager) -> Callable[..., FastCheckWrapper]:
    def make(
        model: nn.Module, optimizer: torch.optim.Optimizer | None = None, **options: Any
    ) -> FastCheckWrapper:
        return FastCheckWrapper(model, optimizer, None, manager=manager, **options)

    return make


def stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.randn(4, 3)).sum().backward()
    optimizer.step()


@pytest.mark.parametrize("recipe", ["adamw", "sgd"])
def test_load_into_fresh_training_restores_every_part(
    recipe: str, manager: FastCheckManager, trainer: ModuleType
) -> None:
    training = trainer.Training(recipe)
    for _ in range(4):
        training.step()
    training.wrapper(Path(manager.checkpoint_dir), manager=manager).save_checkpoint(1, 4)
    at_save = training.digests()
    for _ in range(2):
        training.step()
    fresh = trainer.Training(recipe, seed=5)
    wrapper = fresh.wrapper(Path(manager.checkpoint_dir), manager=manager)
    assert wrapper.load_checkpoint() == (1, 4)
    assert wrapper.position == (1, 4)
    assert fresh.digests() | {"losses": []} == at_save | {"losses": []}
    if recipe == "sgd":
        assert type(fresh.lr_scheduler.milestones) is collections.Counter
        assert fresh.lr_scheduler.milestones == collections.Counter({6: 2, 3: 1, 8: 1})


def test_load_while_gradients_were_alive_at_save_has_all_moments(
    wrap: Callable[..., FastCheckWrapper],
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters())
    stepped(model, optimizer)
    assert model.weight.grad is not None
    wrap(model, optimizer).save_checkpoint(0, 1)
    fresh = nn.Linear(3, 2)
    other = torch.optim.AdamW(fresh.parameters())
    wrap(fresh, other).load_checkpoint()
    for parameter, restored in zip(model.parameters(), fresh.parameters(), strict=True):
        want, got = optimizer.state[parameter], other.state[restored]
        assert want.keys() == got.keys() == {"step", "exp_avg", "exp_avg_sq"}
        assert all(torch.equal(want[key], got[key]) for key in want)


def test_load_disabled_scaler_here_or_there_is_reported(
    wrap: Callable[..., FastCheckWrapper], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    on, off = torch.amp.GradScaler("cpu", init_scale=8.0), torch.amp.GradScaler("cpu", enabled=False)
    wrap(model, scaler=on).save_checkpoint(0, 1)
    wrap(model, scaler=off).save_checkpoint(0, 2)
    other = torch.amp.GradScaler("cpu", init_scale=4.0)
    wrap(model, scaler=other).load_checkpoint()
    assert other.get_scale() == 4.0
    assert "not in the checkpoint, and left as it is: scaler" in caplog.text
    caplog.clear()
    wrap(model, scaler=off).load_checkpoint("epoch0_step1")
    assert "nobody here takes it: scaler" in caplog.text
    wrap(model, scaler=other).load_checkpoint("epoch0_step1")
    assert other.get_scale() == 8.0


def test_load_names_what_is_absent_and_what_nobody_takes(
    wrap: Callable[..., FastCheckWrapper], caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    wrap(model, optimizer, lr_scheduler=schedule).save_checkpoint(0, 1)
    wrap(model, rng=False).save_checkpoint(0, 2)
    before = torch.get_rng_state()
    wrap(model, optimizer, lr_scheduler=schedule, extra={"a": 1}).load_checkpoint()
    assert torch.equal(torch.get_rng_state(), before)
    assert "not in the checkpoint, and left as it is: optimizer, rng, lr_scheduler, extra" in caplog.text
    caplog.clear()
    wrap(model, rng=False).load_checkpoint("epoch0_step1")
    assert "nobody here takes it: optimizer, rng, lr_scheduler" in caplog.text


def test_load_matching_parts_logs_no_warning(
    manager: FastCheckManager, trainer: ModuleType, caplog: pytest.LogCaptureFixture
) -> None:
    wrapper = trainer.Training("sgd").wrapper(Path(manager.checkpoint_dir), manager=manager, extra={"a": 1})
    wrapper.save_checkpoint(0, 1)
    wrapper.load_checkpoint()
    assert [r for r in caplog.records if r.levelno >= logging.WARNING] == []


# dtypes.


class MixedMomentum(torch.optim.Optimizer):
    """Momentum of another dtype than the parameters'."""

    def __init__(self, parameters: Any, moment_dtype: torch.dtype) -> None:
        super().__init__(parameters, {"lr": 0.05})
        self.moment_dtype = moment_dtype

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for parameter in self.param_groups[0]["params"]:
            state = self.state[parameter]
            if not state:
                state["step"] = torch.zeros((), dtype=torch.float32)
                state["moment"] = torch.zeros_like(parameter, dtype=self.moment_dtype)
                state["history"] = [torch.zeros_like(parameter, dtype=self.moment_dtype)]
            state["step"] += 1
            state["moment"].mul_(0.9).add_(parameter.grad.to(self.moment_dtype), alpha=0.3)
            state["history"][0].copy_(state["moment"])
            parameter.sub_((0.05 * state["moment"]).to(parameter.dtype))


@pytest.mark.parametrize(
    ("weights", "moments"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)]
)
def test_load_moments_of_other_dtype_come_back_exact(
    weights: torch.dtype, moments: torch.dtype, wrap: Callable[..., FastCheckWrapper]
) -> None:
    def make() -> tuple[nn.Module, MixedMomentum]:
        model = nn.Linear(3, 2).to(weights)
        return model, MixedMomentum(model.parameters(), moments)

    def train(model: nn.Module, optimizer: MixedMomentum, steps: range) -> None:
        for step in steps:
            optimizer.zero_grad()
            model(torch.full((4, 3), 0.1 * (step + 1), dtype=weights)).float().square().sum().backward()
            optimizer.step()

    model, optimizer = make()
    train(model, optimizer, range(3))
    wrap(model, optimizer).save_checkpoint(0, 3)
    train(model, optimizer, range(3, 6))
    for exact in (True, False):
        fresh, other = make()
        wrap(fresh, other, exact_dtypes=exact).load_checkpoint()
        state = other.state[fresh.weight]
        assert state["moment"].dtype == state["history"][0].dtype == (moments if exact else weights)
        assert state["step"].dtype == torch.float32
        if exact:
            train(fresh, other, range(3, 6))
            assert torch.equal(fresh.weight, model.weight)
            assert torch.equal(state["moment"], optimizer.state[model.weight]["moment"])


def test_load_weights_of_other_dtype_refused_unless_casts_are_allowed(
    wrap: Callable[..., FastCheckWrapper], caplog: pytest.LogCaptureFixture
) -> None:
    wrap(nn.Linear(3, 2)).save_checkpoint(0, 1)
    model = nn.Linear(3, 2).to(torch.bfloat16)
    before = model.weight.detach().clone()
    with pytest.raises(LayoutError, match=r"weight \(saved torch.float32, model torch.bfloat16\)"):
        wrap(model).load_checkpoint()
    assert torch.equal(model.weight, before)
    assert wrap(model, exact_dtypes=False).load_checkpoint() == (0, 1)
    assert "weights are cast" in caplog.text


# What does not fit.


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (nn.Sequential(nn.Linear(3, 5)), r"other shapes: 0.weight \(saved \(2, 3\), model \(5, 3\)\)"),
        (
            nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)),
            r"missing from the checkpoint: 1.weight, 1.bias, 1.running_mean and 2 more",
        ),
        (nn.Sequential(nn.Linear(3, 2, bias=False)), r"unexpected, not in the model: 0.bias"),
        (nn.Sequential(nn.Linear(3, 2, device="meta")), r"without memory .*: 0.weight, 0.bias"),
    ],
)
def test_load_other_model_raises_and_loads_nothing(
    other: nn.Module, message: str, wrap: Callable[..., FastCheckWrapper]
) -> None:
    wrap(nn.Sequential(nn.Linear(3, 2))).save_checkpoint(0, 1)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    wrapper = wrap(other)
    with pytest.raises(LayoutError, match=message):
        wrapper.load_checkpoint()
    after = other.state_dict()
    assert all(value.is_meta or torch.equal(value, after[name]) for name, value in before.items())
    assert wrapper.position is None


def test_load_other_optimizer_raises_before_the_model_is_touched(
    wrap: Callable[..., FastCheckWrapper],
) -> None:
    class Pair(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(3, 3), nn.Linear(3, 3)

    saved = Pair()
    wrap(saved, torch.optim.Adam([*saved.first.parameters(), *saved.second.parameters()])).save_checkpoint(
        0, 1
    )
    model = Pair()
    before = model.first.weight.detach().clone()
    swapped = torch.optim.Adam([*model.second.parameters(), *model.first.parameters()])
    with pytest.raises(LayoutError, match=r"first\.weight is now second\.weight"):
        wrap(model, swapped).load_checkpoint()
    fewer = torch.optim.Adam(model.first.parameters())
    with pytest.raises(LayoutError, match=r"saved \[4\], here \[2\]"):
        wrap(model, fewer).load_checkpoint()
    assert torch.equal(model.first.weight, before)


def test_load_checkpoint_of_other_shape_than_ours_raises(
    manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper]
) -> None:
    manager.save_async({"weights": torch.zeros(3)}, tag="other")
    with pytest.raises(LayoutError, match=r"not saved by FastCheckWrapper.*weights"):
        wrap(nn.Linear(3, 2)).load_checkpoint()


# resume_path.


def test_load_by_tag_and_by_path_return_that_checkpoint(
    manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = nn.Linear(3, 2)
    wrapper = wrap(model)
    weights = []
    for step in (1, 2):
        nn.init.normal_(model.weight)
        weights.append(model.weight.detach().clone())
        handle = wrapper.save_checkpoint(3, step)
    handle.wait("object")
    path = Path(manager.path("epoch3_step1"))
    monkeypatch.chdir(path.parent)
    for given in ("epoch3_step1", str(path), path, f"{path}/", f"file://{path}", f"./{path.name}", path.name):
        assert wrapper.load_checkpoint() == (3, 2)
        assert torch.equal(model.weight, weights[1])
        assert wrapper.load_checkpoint(given) == (3, 1)
        assert torch.equal(model.weight, weights[0])


def test_load_by_path_of_replaced_generation_raises_and_loads_nothing(
    manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper]
) -> None:
    model = nn.Linear(3, 2)
    wrapper = wrap(model)
    wrapper.save_checkpoint(0, 1, tag="best").wait("object")
    path = manager.path("best")
    wrapper.save_checkpoint(0, 2, tag="best").wait("object")
    nn.init.constant_(model.weight, 3.0)
    with pytest.raises(ConfigError, match="only the newest of a tag"):
        wrapper.load_checkpoint(path)
    assert model.weight.eq(3.0).all()
    assert wrapper.load_checkpoint("best") == (0, 2)


def test_load_by_what_names_no_checkpoint_raises(
    manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper], tmp_path: Path
) -> None:
    wrapper = wrap(nn.Linear(3, 2))
    with pytest.raises(CheckpointNotFoundError):
        wrapper.load_checkpoint("epoch0_step999")
    wrapper.save_checkpoint(0, 1)
    for wrong in (
        manager.checkpoint_dir,
        f"{tmp_path}/elsewhere/00000001-epoch0_step1",
        f"{manager.checkpoint_dir}/epoch0_step1",
        "s3://bucket/run/00000001-epoch0_step1",
        "no such tag!",
        "",
        7,
    ):
        with pytest.raises(ConfigError, match="resume_path"):
            wrapper.load_checkpoint(wrong)  # type: ignore[arg-type]
    with pytest.raises(CheckpointNotFoundError):
        wrapper.load_checkpoint(f"{manager.checkpoint_dir}/00000001-epoch9_step9")


# extra.


def test_extra_mapping_and_callable_are_read_at_each_save(wrap: Callable[..., FastCheckWrapper]) -> None:
    model = nn.Linear(3, 2)
    sampler = {"index": 1, "order": torch.arange(5)}
    live, called = wrap(model, extra=sampler), wrap(model, extra=lambda: {"index": sampler["index"] * 10})
    live.save_checkpoint(0, 1, tag="live")
    called.save_checkpoint(0, 1, tag="called")
    sampler["index"] = 2
    live.save_checkpoint(0, 2, tag="live2")
    reader = wrap(model, map_location="cpu")
    assert reader.extra is None
    got = []
    for tag in ("live", "called", "live2"):
        reader.load_checkpoint(tag)
        got.append(reader.extra["index"])
    assert got == [1, 10, 2]
    assert torch.equal(reader.extra["order"], torch.arange(5))


def test_extra_moves_to_map_location_at_every_depth() -> None:
    value = {"a": torch.zeros(2), "b": [torch.zeros(1), 3], "c": (torch.zeros(1), {"d": torch.ones(1)})}
    found = training_state.moved(value, "meta")
    assert found["a"].is_meta
    assert found["b"][0].is_meta
    assert found["b"][1] == 3
    assert found["c"][0].is_meta
    assert found["c"][1]["d"].is_meta


# Arguments.


def test_num_shards_without_storage_nodes_is_noted_and_saves(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with FastCheckWrapper(
        model, optimizer, tmp_path / "ckpt", num_shards=3, local_dir=tmp_path / "shm"
    ) as wrapper:
        assert "num_shards=3 has no effect without storage nodes" in caplog.text
        handle = wrapper.save_checkpoint(3, 1200)
        assert handle.tag == "epoch3_step1200"
        handle.wait("object")
    with pytest.raises(ClosedError):
        wrapper.save_checkpoint(3, 1201)
    assert list((tmp_path / "shm").glob("*/slot*")) == []


def test_wrapper_wrong_arguments_raise_config_error(
    tmp_path: Path, manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper]
) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(ConfigError, match="lr_scheduler="):
        FastCheckWrapper(
            model,
            optimizer,
            tmp_path / "other",
            scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),  # type: ignore[arg-type]
        )
    with pytest.raises(ConfigError, match="num_shards must be"):
        FastCheckWrapper(model, optimizer, tmp_path / "other", num_shards=0)
    with pytest.raises(ConfigError, match="checkpoint_dir is needed"):
        FastCheckWrapper(model, optimizer, None)
    with pytest.raises(ConfigError, match="num_shards, persist_every: give these to the manager"):
        wrap(model, optimizer, num_shards=3, persist_every=2)
    with pytest.raises(ConfigError, match="give None or the same"):
        FastCheckWrapper(model, optimizer, tmp_path / "other", manager=manager)
    assert not (tmp_path / "other").exists()


def test_close_leaves_given_manager_open(
    manager: FastCheckManager, wrap: Callable[..., FastCheckWrapper]
) -> None:
    with wrap(nn.Linear(3, 2)) as wrapper:
        pass
    wrapper.close()
    assert isinstance(manager.tags(), list)


def test_wrapped_models_save_under_the_names_of_the_inner_one(
    tmp_path: Path, wrap: Callable[..., FastCheckWrapper]
) -> None:
    inner = nn.Linear(3, 2)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        for number, model in enumerate(
            (
                nn.parallel.DistributedDataParallel(inner),
                torch.compile(inner, backend="eager"),
                torch.compile(nn.parallel.DistributedDataParallel(inner), backend="eager"),
                nn.DataParallel(inner),
            )
        ):
            wrapper = wrap(model, torch.optim.SGD(model.parameters(), lr=0.1))
            assert wrapper.model is inner
            wrapper.save_checkpoint(0, number)
            plain = nn.Linear(3, 2)
            wrap(plain, torch.optim.SGD(plain.parameters(), lr=0.1)).load_checkpoint(f"epoch0_step{number}")
            assert torch.equal(plain.weight, inner.weight)
    finally:
        torch.distributed.destroy_process_group()


# Random numbers.


def test_rng_states_restored_give_the_same_draws(wrap: Callable[..., FastCheckWrapper]) -> None:
    def draws() -> list[Any]:
        return [random.random(), random.gauss(0, 1), np.random.standard_normal(), torch.randn(3).tolist()]

    random.gauss(0, 1)
    np.random.standard_normal()
    wrapper = wrap(nn.Linear(3, 2))
    wrapper.save_checkpoint(0, 1)
    want = draws()
    draws()
    wrapper.load_checkpoint()
    assert draws() == want


def test_rng_states_of_missing_cuda_devices_are_reported(caplog: pytest.LogCaptureFixture) -> None:
    if torch.cuda.is_available():
        pytest.skip("there are CUDA devices")
    state = training_state.rng_state()
    assert "cuda" not in state
    training_state.set_rng_state(state)
    assert caplog.text == ""
    training_state.set_rng_state(state | {"cuda": [torch.zeros(16, dtype=torch.uint8)]})
    assert "1 CUDA devices were saved and there are 0" in caplog.text


@pytest.mark.parametrize("device_step", [{"fused": True}, {"capturable": True}])
def test_load_optimizer_keeps_dtype_of_step(device_step: dict[str, bool]) -> None:
    model = nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(model.parameters(), **device_step)
    saved = optimizer.state_dict()
    saved["state"] = {
        number: {"step": torch.tensor(5.0, dtype=torch.float64), "exp_avg": torch.ones(1)}
        for number in (0, 1)
    }
    training_state.load_optimizer(saved, optimizer, exact_dtypes=True)
    for state in optimizer.state.values():
        assert state["step"].dtype == torch.float64
        assert state["step"] == 5


def test_save_in_forked_process_raises_and_parent_goes_on(wrap: Callable[..., FastCheckWrapper]) -> None:
    wrapper = wrap(nn.Linear(3, 2))
    child = os.fork()
    if child == 0:
        try:
            wrapper.save_checkpoint(0, 1)
        except ClosedError:
            os._exit(7)
        finally:
            os._exit(8)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
    wrapper.save_checkpoint(0, 1).wait("object")
