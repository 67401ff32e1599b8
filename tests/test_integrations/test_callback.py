from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from fastcheck_dask import FastCheckManager, SaveHandle
from fastcheck_dask.errors import (
    ClosedError,
    ConfigError,
    FencedError,
    SaveBusyError,
    SaveFailedError,
    TierFullError,
    TierTimeoutError,
)
from fastcheck_dask.integrations.callback import FastCheckCallback, Position
from fastcheck_dask.integrations.pytorch import FastCheckWrapper
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.object_store import open_store

SCRIPT = Path(__file__).with_name("trainer_process.py")
FULL = TierFullError("shared memory", 2, 1, "make it larger")


class FakeTraining:
    """Notes what is asked of it; each save reaches the levels in `reaches`."""

    def __init__(self, *, peers: bool = False) -> None:
        self.optimizer: Any = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=0.1)
        self.position: Position | None = None
        self.last_handle: SaveHandle | None = None
        self.saved: list[tuple[int, int]] = []
        self.tags: list[str | None] = []
        self.metrics: list[Any] = []
        self.error: Exception | None = None
        self.levels: tuple[Any, ...] = ("local", "peers", "object") if peers else ("local", "object")
        self.reaches: tuple[Any, ...] = self.levels
        self.closed: list[float | None] = []

    def save_checkpoint(
        self, epoch: int, step: int, *, tag: str | None = None, metrics: Any = None
    ) -> SaveHandle:
        if self.error is not None:
            raise self.error
        handle = SaveHandle(tag or f"epoch{epoch}_step{step}", self.levels)
        for level in self.levels:
            if level in self.reaches:
                handle._reach(level)
            elif self.reaches != ("local",):
                handle._fall_short(level, error=SaveFailedError(f"no {level}"))
        self.saved.append((epoch, step))
        self.tags.append(tag)
        self.metrics.append(metrics)
        self.position, self.last_handle = (epoch, step), handle
        return handle

    def close(self, *, timeout: float | None = None) -> None:
        self.closed.append(timeout)


def run(callback: FastCheckCallback, *, per_epoch: int, epochs: int, start: Position = (0, 0)) -> None:
    epoch, step = start
    while epoch < epochs:
        for _ in range(step - epoch * per_epoch, per_epoch):
            step += 1
            callback.on_step_end(epoch, step)
        callback.on_epoch_end(epoch, step)
        epoch += 1
    callback.on_train_end()


@pytest.fixture
def default_sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


# When it saves.


@pytest.mark.parametrize(
    ("intervals", "want"),
    [
        ({"every_n_steps": 2}, [(0, 2), (1, 4), (1, 6), (2, 6)]),
        ({"every_n_steps": 4}, [(1, 4), (2, 6)]),
        ({"every_n_epochs": 1}, [(1, 3), (2, 6)]),
        ({"every_n_epochs": 2}, [(2, 6)]),
        ({"every_n_steps": 3, "every_n_epochs": 1}, [(0, 3), (1, 3), (1, 6), (2, 6)]),
    ],
)
def test_callback_intervals_save_at_their_multiples_and_at_the_end(
    intervals: dict[str, int], want: list[Position]
) -> None:
    training = FakeTraining()
    run(FastCheckCallback(training, **intervals), per_epoch=3, epochs=2)
    assert training.saved == want


def test_callback_resumed_anywhere_saves_what_the_uninterrupted_run_saves_after() -> None:
    whole = FakeTraining()
    run(FastCheckCallback(whole, every_n_steps=2, every_n_epochs=1), per_epoch=3, epochs=3)
    for number, loaded in enumerate(whole.saved):
        resumed = FakeTraining()
        resumed.position = loaded
        callback = FastCheckCallback(resumed, every_n_steps=2, every_n_epochs=1)
        run(callback, per_epoch=3, epochs=3, start=loaded)
        assert resumed.saved == whole.saved[number + 1 :], loaded


def test_on_train_end_without_a_step_saves_nothing() -> None:
    training = FakeTraining()
    training.position = (2, 6)
    assert FastCheckCallback(training, every_n_steps=2).on_train_end() is False
    assert training.saved == []


def test_on_train_end_after_failed_save_of_the_last_step_saves_again() -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2)
    training.reaches = ()
    callback.on_step_end(0, 2)
    training.reaches = ("local", "object")
    callback.on_train_end()
    assert training.saved == [(0, 2), (0, 2)]


def test_on_train_end_save_that_reaches_nothing_raises() -> None:
    training = FakeTraining()
    training.reaches = ()
    callback = FastCheckCallback(training, every_n_steps=5)
    callback.on_step_end(0, 1)
    with pytest.raises(SaveFailedError, match="no object"):
        callback.on_train_end()


@pytest.mark.parametrize(
    ("level", "reaches", "want"),
    [
        ("peers", ("local", "peers"), None),
        ("peers", ("local", "object"), "reached the object tier only: no peers"),
        ("object", ("local", "peers"), "reached the peers tier only: no object"),
        ("object", ("local", "peers", "object"), None),
        ("local", ("local",), None),
        (None, ("local",), None),
    ],
)
def test_on_train_end_waits_for_the_level_or_the_other_durable_one(
    level: Any, reaches: tuple[str, ...], want: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    training = FakeTraining(peers=True)
    training.reaches = reaches
    callback = FastCheckCallback(training, every_n_steps=5, wait_at_end=level)
    callback.on_step_end(0, 1)
    callback.on_train_end()
    assert (want in caplog.text) if want else caplog.text == ""


@pytest.mark.parametrize("error", [FencedError("newer"), SaveBusyError("busy"), ConfigError("tag")])
def test_on_step_end_error_that_must_be_seen_is_raised(error: Exception) -> None:
    training = FakeTraining()
    training.error = error
    with pytest.raises(type(error)):
        FastCheckCallback(training, every_n_steps=1).on_step_end(0, 1)


def test_on_step_end_save_that_fails_is_logged_and_made_up_for_at_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2)
    training.error = FULL
    assert callback.on_step_end(0, 2) is False
    assert "epoch 0 step 2 is not saved, training goes on" in caplog.text
    training.error = None
    callback.on_train_end()
    assert training.saved == [(0, 2)]


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"every_n_steps": 0},
        {"every_n_steps": True},
        {"every_n_epochs": 1.5},
        {"every_n_steps": 1, "wait_at_end": "disk"},
    ],
)
def test_callback_wrong_arguments_raise(arguments: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        FastCheckCallback(FakeTraining(), **arguments)


def test_on_step_end_step_counted_from_zero_raises() -> None:
    with pytest.raises(ConfigError, match="finished steps"):
        FastCheckCallback(FakeTraining(), every_n_steps=2).on_step_end(0, 0)


# Exceptions.


def test_on_exception_by_default_saves_nothing() -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2)
    callback.on_step_end(0, 1)
    callback.on_exception(RuntimeError("loss"))
    assert training.saved == []


def test_on_exception_told_to_saves_under_a_tag_of_its_own() -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2, save_on_exception=True)
    training.optimizer.step()
    callback.on_step_end(0, 1)
    callback.on_exception(RuntimeError("loss"))
    assert training.tags == ["epoch0_step1_exception"]
    assert not training.optimizer._optimizer_step_pre_hooks


def test_on_exception_within_optimizer_step_saves_nothing(caplog: pytest.LogCaptureFixture) -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2, save_on_exception=True)
    callback.on_step_end(0, 1)
    training.optimizer.step()
    callback.on_exception(RuntimeError("scheduler"))
    assert training.saved == []
    assert "within an optimizer step: nothing is saved" in caplog.text


def test_on_exception_save_that_fails_is_logged_only(caplog: pytest.LogCaptureFixture) -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2, save_on_exception=True)
    callback.on_step_end(0, 1)
    training.error = ClosedError("closed")
    callback.on_exception(RuntimeError("loss"))
    assert "the last save failed: closed" in caplog.text


# Signals.


def test_signal_stops_at_the_next_step_end_and_puts_the_handler_back(default_sigterm: None) -> None:
    seen: list[int] = []

    def former(number: int, _frame: Any) -> None:
        seen.append(number)

    signal.signal(signal.SIGTERM, former)
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=100)
    callback.install_signal_handler(exit_process=False)
    assert callback.on_step_end(0, 1) is False
    os.kill(os.getpid(), signal.SIGTERM)
    os.kill(os.getpid(), signal.SIGTERM)
    assert training.saved == []
    assert callback.on_step_end(0, 2) is True
    assert training.saved == [(0, 2)]
    assert signal.getsignal(signal.SIGTERM) is former
    assert callback.on_train_end() is True
    assert training.saved == [(0, 2)]
    assert training.closed == []
    assert seen == []


@pytest.mark.parametrize("hook", ["step", "epoch", "end"])
def test_signal_exit_closes_within_grace_and_exits_143(hook: str, default_sigterm: None) -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=100)
    callback.install_signal_handler(grace_seconds=9.0)
    callback.on_step_end(0, 1)
    os.kill(os.getpid(), signal.SIGTERM)
    calls: dict[str, Callable[[], bool]] = {
        "step": lambda: callback.on_step_end(0, 2),
        "epoch": lambda: callback.on_epoch_end(0, 1),
        "end": callback.on_train_end,
    }
    with pytest.raises(SystemExit) as caught:
        calls[hook]()
    assert caught.value.code == 143
    assert training.saved == [{"step": (0, 2), "epoch": (1, 1), "end": (0, 1)}[hook]]
    assert len(training.closed) == 1
    assert 2.0 <= training.closed[0] <= 9.0
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_signal_save_that_takes_too_long_is_given_up_and_exits(
    default_sigterm: None, caplog: pytest.LogCaptureFixture
) -> None:
    training = FakeTraining()
    training.reaches = ("local",)
    callback = FastCheckCallback(training, every_n_steps=100)
    callback.install_signal_handler(grace_seconds=0.01)
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        callback.on_step_end(0, 1)
    assert "not durable" in caplog.text
    assert training.closed == [2.0]


def test_signal_while_earlier_save_is_stuck_neither_waits_nor_saves(default_sigterm: None) -> None:
    training = FakeTraining()
    training.reaches = ("local",)
    callback = FastCheckCallback(training, every_n_steps=1)
    callback.on_step_end(0, 1)
    callback.install_signal_handler(grace_seconds=0.01, exit_process=False)
    os.kill(os.getpid(), signal.SIGTERM)
    assert callback.on_step_end(0, 2) is True
    assert training.saved == [(0, 1)]


def test_signal_save_that_fails_still_exits(default_sigterm: None, caplog: pytest.LogCaptureFixture) -> None:
    training = FakeTraining()
    training.error = FULL
    callback = FastCheckCallback(training, every_n_steps=1)
    callback.install_signal_handler()
    os.kill(os.getpid(), signal.SIGTERM)
    with pytest.raises(SystemExit):
        callback.on_step_end(0, 1)
    assert "shared memory is too small" in caplog.text


def test_signal_in_forked_child_ends_it_as_without_a_handler(default_sigterm: None) -> None:
    callback = FastCheckCallback(FakeTraining(), every_n_steps=1)
    callback.install_signal_handler()
    child = os.fork()
    if child == 0:
        os.kill(os.getpid(), signal.SIGTERM)
        os._exit(9)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGTERM
    assert callback.on_step_end(0, 1) is False
    callback.close()


def test_signal_during_on_exception_finds_the_former_handler(default_sigterm: None) -> None:
    callback = FastCheckCallback(FakeTraining(), every_n_steps=1)
    before = signal.getsignal(signal.SIGTERM)
    callback.install_signal_handler()
    callback.install_signal_handler()
    assert signal.getsignal(signal.SIGTERM) != before
    callback.on_exception(RuntimeError("loss"))
    assert signal.getsignal(signal.SIGTERM) == before


def test_deadline_over_while_waiting_raises_timeout() -> None:
    training = FakeTraining(peers=True)
    training.reaches = ("local",)
    handle = training.save_checkpoint(0, 1)
    with pytest.raises(TierTimeoutError):
        handle.wait("peers", 0.01)


# With a manager.


def train(trainer: ModuleType, manager: FastCheckManager, *, total: int, interrupt_at: int | None) -> Any:
    """Train to the end or to an interrupt, from what was saved; return the training."""
    training = trainer.Training("adamw")
    wrapper = training.wrapper(Path(manager.checkpoint_dir), manager=manager)
    callback = FastCheckCallback(wrapper, every_n_steps=2)
    epoch, step = wrapper.load_checkpoint()
    while step < total:
        training.step()
        step += 1
        callback.on_step_end(epoch, step)
        if step == interrupt_at:
            return training
    callback.on_train_end()
    return training


@pytest.fixture
def new_manager(tmp_path: Path) -> Callable[[str], FastCheckManager]:
    def make(name: str) -> FastCheckManager:
        return FastCheckManager(tmp_path / name, local_dir=tmp_path / f"{name}.shm", encoders=1)

    return make


@pytest.mark.slow
def test_training_interrupted_at_any_step_ends_with_same_tags_and_weights(
    trainer: ModuleType, new_manager: Callable[[str], FastCheckManager]
) -> None:
    with new_manager("straight") as manager:
        whole = train(trainer, manager, total=7, interrupt_at=8).digests()
        tags = manager.tags()
    assert tags == ["epoch0_step2", "epoch0_step4", "epoch0_step6", "epoch0_step7"]
    for step in range(1, 8):
        with new_manager(f"interrupted{step}") as manager:
            train(trainer, manager, total=7, interrupt_at=step)
            resumed = train(trainer, manager, total=7, interrupt_at=None).digests()
            assert manager.tags() == tags, step
            again = train(trainer, manager, total=7, interrupt_at=None)
            assert manager.tags() == tags, step
        for part in ("model", "moments", "groups", "lr_scheduler", "scaler", "draws"):
            assert resumed[part] == whole[part], (step, part)
        assert again.digests()["model"] == whole["model"]


def test_process_told_to_stop_twice_saves_exits_143_and_its_successor_goes_on(
    tmp_path: Path, trainer: ModuleType
) -> None:
    straight = trainer.Training("sgd")
    for _ in range(3):
        straight.step()
    with subprocess.Popen(
        [sys.executable, "-W", "error", str(SCRIPT), "preempt", str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            assert process.stdin is not None
            assert process.stdout is not None
            for step in (1, 2):
                assert process.stdout.readline() == f"{step}\n"
                if step == 2:
                    process.send_signal(signal.SIGTERM)
                    process.send_signal(signal.SIGTERM)
                process.stdin.write("\n")
                process.stdin.flush()
            assert process.wait(60) == 143
            assert process.stdout.read() == ""
        finally:
            process.kill()
    successor = trainer.Training("sgd", seed=99)
    with successor.wrapper(tmp_path / "ckpt") as wrapper:
        assert wrapper.load_checkpoint() == (0, 3)
        assert wrapper.manager.tags() == ["epoch0_step2", "epoch0_step3"]
        assert successor.digests()["model"] == straight.digests()["model"]


def test_metrics_go_with_the_save_of_their_step_or_epoch_and_with_no_other() -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=2, every_n_epochs=1)
    for step in (1, 2, 3):
        callback.on_step_end(0, step, metrics={"loss": 1 / step})
    callback.on_epoch_end(0, 3, metrics={"val": 0.5})
    callback.on_step_end(1, 4)
    callback.on_step_end(1, 5, metrics={"loss": 0.2})
    callback.on_train_end()
    assert training.saved == [(0, 2), (1, 3), (1, 4), (1, 5)]
    assert training.metrics == [{"loss": 0.5}, {"val": 0.5}, None, {"loss": 0.2}]


def test_metrics_go_with_the_save_of_an_exception() -> None:
    training = FakeTraining()
    callback = FastCheckCallback(training, every_n_steps=10, save_on_exception=True)
    callback.on_step_end(0, 1, metrics={"loss": 3.0})
    callback.on_exception(ValueError())
    assert training.metrics == [{"loss": 3.0}]


def test_best_by_a_metric_of_the_callback_stays(tmp_path: Path) -> None:
    model = torch.nn.Linear(30, 30)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    options = {"keep_last": 1, "keep_best": ("loss", "min", 1), "local_dir": str(tmp_path / "shm")}
    with FastCheckWrapper(model, optimizer, tmp_path / "c", encoders=1, **options) as wrapper:
        callback = FastCheckCallback(wrapper, every_n_steps=1, wait_at_end="object")
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0], 1):
            with torch.no_grad():
                model.weight.add_(1.0)
            callback.on_step_end(0, step, metrics={"loss": loss})
        callback.on_train_end()
        assert wrapper.last_handle is not None
        wrapper.last_handle.wait("object", timeout=60)
    assert [c.tag for c in CheckpointFolder(open_store(str(tmp_path / "c"))).committed()] == [
        "epoch0_step2",
        "epoch0_step4",
    ]
