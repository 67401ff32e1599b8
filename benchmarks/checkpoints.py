"""Checkpoints of networks that are really trained: what the codecs are measured on.

``python -m benchmarks.checkpoints`` makes them. Each run trains for 300 steps on data that installed packages
ship and keeps snapshots early (inside the warm-up) and late (after the learning rate has decayed), each with
what follows 1, 10 and 100 steps later. They are cached outside the repository. A run whose loss does not fall
is not evidence, and is refused.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shutil
import statistics
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional

from benchmarks import codec_models
from benchmarks.machine import console, table

Bits = npt.NDArray[Any]

CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "fastcheck-benchmarks"

STEPS, WARM_UP = 300, 30
PHASES = {"early": 15, "late": 200}
INTERVALS = (1, 10, 100)
_KEPT = {first + after: (phase, after) for phase, first in PHASES.items() for after in (0, *INTERVALS)}

#: Losses averaged at either end of the curve.
_ENDS = 20
#: The end of the curve has to be below these shares of its start and of a uniform guess.
_FALLEN, _LEARNED = 0.8, 0.7


@dataclass(frozen=True)
class Recipe:
    """What is trained, and how; a changed recipe is another entry of the cache."""

    network: str
    optimizer: str
    rate: float
    #: Weights and gradients are rounded to bfloat16, the optimizer works on an fp32 master copy.
    bf16: bool = False
    version: int = 1

    @property
    def is_text(self) -> bool:
        """Whether it is a language model: AdamW's usual betas, cosine decay, clipped gradients."""
        return self.network == "gpt"

    @property
    def key(self) -> str:
        """Short digest that tells recipes apart."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:8]


RUNS = {
    "vgg_sgd": Recipe("vgg", "sgd", 0.01),
    "gpt_fp32": Recipe("gpt", "adamw", 6e-4),
    "gpt_bf16": Recipe("gpt", "adamw", 6e-4, bf16=True),
    "resnet_adam": Recipe("resnet", "adam", 1e-3),
    "vgg_adam": Recipe("vgg", "adam", 3e-4),
    "resnet_sgd": Recipe("resnet", "sgd", 0.05),
}


class NotLearnedError(RuntimeError):
    """A run whose loss did not fall."""


def learned(losses: list[float], uniform: float) -> bool:
    """Say whether a loss curve fell, against its own start and against guessing (`uniform`)."""
    first, last = statistics.mean(losses[:_ENDS]), statistics.mean(losses[-_ENDS:])
    return last <= _FALLEN * first and last <= _LEARNED * uniform


def rate_at(recipe: Recipe, step: int) -> float:
    """Return the learning rate of a step, counted from 1."""
    if step < WARM_UP:
        return recipe.rate * step / WARM_UP
    if recipe.is_text:
        done = min(1.0, (step - WARM_UP) / (STEPS - 50 - WARM_UP))
        return recipe.rate * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
    return recipe.rate * (1 if step < 120 else 0.1 if step < 190 else 0.01)


class Run:
    """One training; `snapshot` gives its state by class."""

    def __init__(self, recipe: Recipe) -> None:
        torch.manual_seed(0)
        self._recipe = recipe
        self._generator = torch.Generator().manual_seed(0)
        self._draw = codec_models.program_text() if recipe.is_text else codec_models.digits()
        self.model: nn.Module = getattr(codec_models, recipe.network)()
        self._weights = list(self.model.parameters())
        self._trained = (
            [nn.Parameter(p.detach().clone()) for p in self._weights] if recipe.bf16 else self._weights
        )
        self._optimizer = self._make_optimizer()

    def _make_optimizer(self) -> torch.optim.Optimizer:
        recipe = self._recipe
        if recipe.optimizer == "sgd":
            return torch.optim.SGD(self._trained, lr=recipe.rate, momentum=0.9, weight_decay=5e-4)
        if recipe.optimizer == "adam":
            return torch.optim.Adam(self._trained, lr=recipe.rate)
        groups = [
            {"params": [p for p in self._trained if (p.dim() >= 2) is decays], "weight_decay": decay}
            for decays, decay in ((True, 0.1), (False, 0.0))
        ]
        return torch.optim.AdamW(groups, lr=recipe.rate, betas=(0.9, 0.95))

    def step(self, number: int) -> float:
        """Train for one step and return the loss."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate_at(self._recipe, number)
        if self._recipe.bf16:
            with torch.no_grad():
                for weight, master in zip(self._weights, self._trained, strict=True):
                    weight.copy_(master.bfloat16())
        inputs, targets = self._draw(self._generator)
        loss = functional.cross_entropy(self.model(inputs), targets)
        self.model.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        if self._recipe.bf16:
            for weight, master in zip(self._weights, self._trained, strict=True):
                assert weight.grad is not None
                master.grad = weight.grad.bfloat16().float()
        if self._recipe.is_text:
            nn.utils.clip_grad_norm_(self._trained, 1.0)
        self._optimizer.step()
        return loss.item()

    def snapshot(self) -> dict[str, Bits]:
        """Return one flat array for each class of state; bfloat16 as uint16."""
        state = {"weights": _flat(self._trained)}
        if self._recipe.bf16:
            rounded = _flat([p.detach().bfloat16().view(torch.int16) for p in self._trained])
            state["weights_bf16"] = rounded.view(np.uint16)
        names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "momentum_buffer": "momentum"}
        for name, kind in names.items():
            held = [self._optimizer.state[p].get(name) for p in self._trained]
            if held[0] is not None:
                state[kind] = _flat(held)
        return state


def _flat(tensors: list[Any]) -> Bits:
    flat: Bits = torch.cat([t.detach().reshape(-1) for t in tensors]).numpy()
    return flat


def train(name: str, cache: Path = CACHE) -> Path:
    """Train one run and keep its snapshots; return their folder."""
    recipe = RUNS[name]
    folder = cache / f"{name}-{recipe.key}"
    partial = cache / f"{name}-{recipe.key}.partial-{os.getpid()}"
    partial.mkdir(parents=True)
    torch.set_num_threads(1)
    try:
        run = Run(recipe)
        losses = []
        started = time.monotonic()
        for number in range(1, STEPS + 1):
            losses.append(run.step(number))
            if number in _KEPT:
                for kind, bits in run.snapshot().items():
                    np.save(partial / "{}_{}_{}.npy".format(*_KEPT[number], kind), bits)
        report = {
            "recipe": asdict(recipe),
            "parameters": sum(p.numel() for p in run.model.parameters()),
            "seconds": round(time.monotonic() - started),
            "uniform": math.log(codec_models.ALPHABET if recipe.is_text else codec_models.CLASSES),
            "losses": losses,
        }
        (partial / "run.json").write_text(json.dumps(report))
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return folder


@dataclass(frozen=True)
class Checkpoints:
    """The snapshots of one run in the cache."""

    name: str
    folder: Path
    report: dict[str, Any]

    @property
    def kinds(self) -> list[str]:
        """Classes of state that this run has: weights, exp_avg, ..."""
        return sorted(f.stem.removeprefix("late_0_") for f in self.folder.glob("late_0_*.npy"))

    def load(self, phase: str, after: int, kind: str) -> Bits:
        """Return the flat state of a class, `after` steps into a phase; float32, or bfloat16 as uint16."""
        bits: Bits = np.load(self.folder / f"{phase}_{after}_{kind}.npy", mmap_mode="r")
        return bits


def find(name: str, cache: Path = CACHE) -> Checkpoints | None:
    """Return the snapshots of a run if they are in the cache.

    Raises
    ------
    NotLearnedError
        If the loss of that run did not fall.
    """
    folder = cache / f"{name}-{RUNS[name].key}"
    if not (folder / "run.json").exists():
        return None
    report = json.loads((folder / "run.json").read_text())
    if not learned(report["losses"], report["uniform"]):
        raise NotLearnedError(f"{name}: the loss did not fall; its checkpoints show nothing ({folder})")
    return Checkpoints(name, folder, report)


def every(cache: Path = CACHE, names: list[str] | None = None) -> Iterator[Checkpoints]:
    """Give the snapshots of all runs, trained now where the cache lacks them."""
    for name in names or RUNS:
        found = find(name, cache)
        if found is None:
            console.print(f"training {name}: some minutes on one core, once")
            train(name, cache)
            found = find(name, cache)
            assert found is not None
        yield found


def _curve(checkpoints: Checkpoints) -> list[str]:
    losses = checkpoints.report["losses"]
    points = [
        losses[0],
        *(statistics.mean(losses[at : at + _ENDS]) for at in range(0, STEPS, 50)),
        losses[-1],
    ]
    last = statistics.mean(losses[-_ENDS:])
    size = f"{checkpoints.report['parameters'] / 1e6:.1f} M"
    return [
        checkpoints.name,
        size,
        " ".join(f"{p:.2f}" for p in points),
        f"{last:.2f}",
        f"{checkpoints.report['uniform']:.2f}",
    ]


def main() -> None:
    """Train what the cache lacks and print the loss curves."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="*", help=f"of {', '.join(RUNS)}; all by default")
    parser.add_argument("--cache", type=Path, default=CACHE)
    arguments = parser.parse_args()
    table(
        "Loss: first step, means of 20 steps from every 50th on, last step",
        ["run", "parameters", "curve", "mean of last 20", "uniform guess"],
        [_curve(checkpoints) for checkpoints in every(arguments.cache, arguments.runs or None)],
    )


if __name__ == "__main__":
    main()
