"""Small trainings that a test runs in its own process, and in others that it kills.

As a script: ``trainer_process.py first|resume|preempt FOLDER``. It prints what it has reached, a line each.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from fastcheck_dask.integrations.pytorch import FastCheckCallback, FastCheckWrapper

torch.set_num_threads(1)
TOTAL = 10
RECIPES = ("adamw", "sgd")


class Training:
    """A small MLP with everything that has a state, and a loop of which each step draws random numbers."""

    def __init__(self, recipe: str, seed: int = 7) -> None:
        random.seed(seed)
        np.random.seed(seed)
        torch.manual_seed(seed)
        self.model = nn.Sequential(
            nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.25), nn.Linear(32, 4)
        )
        parameters = self.model.parameters()
        if recipe == "adamw":
            self.optimizer = torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True)
            self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
                self.optimizer, max_lr=0.05, total_steps=TOTAL + 1
            )
        else:
            self.optimizer = torch.optim.SGD(parameters, lr=0.1, momentum=0.9, nesterov=True)
            self.lr_scheduler = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [3, 6, 6, 8], gamma=0.3)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
        self.losses: list[str] = []

    def wrapper(self, folder: Path, **options: object) -> FastCheckWrapper:
        parts = {"lr_scheduler": self.lr_scheduler, "scaler": self.scaler}
        if "manager" not in options:
            parts |= {"local_dir": folder.parent / "shm", "encoders": 1}
        return FastCheckWrapper(self.model, self.optimizer, folder, **(parts | options))

    def step(self) -> None:
        noise = random.random() + np.random.standard_normal()
        inputs = torch.randn(16, 12) + noise
        targets = torch.randint(0, 4, (16,))
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = nn.functional.cross_entropy(self.model(inputs), targets)
        self.optimizer.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.lr_scheduler.step()
        self.losses.append(loss.item().hex())

    def digests(self) -> dict[str, object]:
        """Every bit that the training consists of."""
        moments = {
            f"{number}/{name}": value
            for number, state in self.optimizer.state_dict()["state"].items()
            for name, value in state.items()
        }
        return {
            "model": {name: _digest(value) for name, value in self.model.state_dict().items()},
            "moments": {name: _digest(value) for name, value in moments.items()},
            "groups": repr(self.optimizer.state_dict()["param_groups"]),
            "lr_scheduler": repr(self.lr_scheduler.state_dict()),
            "scaler": repr(self.scaler.state_dict()),
            "losses": self.losses[-5:],
            "draws": [random.random().hex(), np.random.random().hex(), torch.rand(1).item().hex()],
        }


def _digest(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return repr(value)
    bits = value.contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{value.dtype} {tuple(value.shape)} {hashlib.sha256(bits).hexdigest()}"


def say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def first(folder: Path) -> None:
    """Train half of the steps, say when each is saved durably, and wait to be killed."""
    for recipe in RECIPES:
        training = Training(recipe)
        wrapper = training.wrapper(folder / recipe / "ckpt")
        for step in range(1, TOTAL // 2 + 1):
            training.step()
            handle = wrapper.save_checkpoint(0, step)
        handle.wait("object")
    say("durable")
    # What is not saved is lost: the steps after the last save must not be in what is loaded.
    training.step()
    sys.stdin.read()


def resume(folder: Path) -> None:
    """Train the other half from what was saved, with other seeds."""
    found = {}
    for recipe in RECIPES:
        training = Training(recipe, seed=99)
        with training.wrapper(folder / recipe / "ckpt") as wrapper:
            epoch, step = wrapper.load_checkpoint()
            assert (epoch, step) == (0, TOTAL // 2)
            for _ in range(step, TOTAL):
                training.step()
            found[recipe] = training.digests()
    say(json.dumps(found))


def preempt(folder: Path) -> None:
    """Train for ever; the test sends signals."""
    training = Training("sgd")
    with training.wrapper(folder / "ckpt") as wrapper:
        callback = FastCheckCallback(wrapper, every_n_steps=2)
        callback.install_signal_handler(grace_seconds=30.0)
        step = 0
        while True:
            training.step()
            step += 1
            callback.on_step_end(0, step)
            say(str(step))
            # The test decides when the next step begins.
            sys.stdin.readline()


if __name__ == "__main__":
    {"first": first, "resume": resume, "preempt": preempt}[sys.argv[1]](Path(sys.argv[2]))
