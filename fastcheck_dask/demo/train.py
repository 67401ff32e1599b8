"""The training process: ``python -m fastcheck_dask.demo.train --model vgg ...``.

It writes one JSON object per line to stdout: ``loaded`` or ``fresh``, a ``step`` for each step, a ``saved``
for each level that a save reaches, and ``done``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NoReturn

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from fastcheck_dask.demo import data, models
from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.manager import FastCheckManager, SaveHandle

_SAVE_SECONDS = 120.0
_LOOK_SECONDS = 0.02


def tell(event: str, **values: Any) -> None:
    """Write one event."""
    sys.stdout.write(json.dumps({"event": event, **values}) + "\n")
    sys.stdout.flush()


@dataclass
class Training:
    """Everything that decides how a training goes on: all of it is in the checkpoint."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    draw: data.Draw
    #: Decides the order of the data; dropout has torch's own generator.
    order: torch.Generator
    losses: list[float] = field(default_factory=list)

    def step(self) -> float:
        """Do one step; return its loss."""
        inputs, targets = self.draw(self.order)
        self.optimizer.zero_grad(set_to_none=True)
        loss = functional.cross_entropy(self.model(inputs), targets)
        loss.backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self.losses.append(loss.item())
        return self.losses[-1]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint holds."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "dropout": torch.get_rng_state(),
            "order": self.order.get_state(),
            "losses": self.losses,
        }

    def restore(self, state: dict[str, Any]) -> None:
        """Go back to a checkpoint."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        torch.set_rng_state(state["dropout"])
        self.order.set_state(state["order"])
        self.losses = state["losses"]

    def digests(self) -> dict[str, str]:
        """Return the sha256 of the weights, the optimizer's state and the losses, hex."""
        state = self.state()
        return {
            "weights": digest_of(state["model"]),
            "optimizer": digest_of(state["optimizer"]),
            "losses": digest_of(state["losses"]),
        }


def prepare(model: str, *, seed: int, quick: bool) -> Training:
    """Make a training at its beginning, the same for the same arguments."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    torch.manual_seed(seed)
    order = torch.Generator().manual_seed(seed + 1)
    if model == "vgg":
        network = models.vgg(8, hidden=96) if quick else models.vgg(48, hidden=1408)
        sgd = torch.optim.SGD(network.parameters(), lr=0.02, momentum=0.9, weight_decay=5e-4)
        return Training(network, sgd, data.digits(64), order)
    tokens, alphabet = data.help_text()
    width, layers, context = (48, 2, 32) if quick else (256, 4, 64)
    gpt = models.Gpt(alphabet, context=context, width=width, layers=layers, heads=4)
    adamw = torch.optim.AdamW(gpt.parameters(), lr=3e-3 if quick else 1e-3)
    return Training(gpt, adamw, data.text_windows(tokens, 8 if quick else 16, context=context), order)


def digest_of(value: Any) -> str:
    """Return the sha256 of every bit in nested dicts, lists, tensors and plain values, hex.

    >>> digest_of([0.0]) == digest_of([-0.0])
    False
    """
    found = hashlib.sha256()
    for piece in _pieces(value):
        found.update(len(piece).to_bytes(8, "little"))
        found.update(piece)
    return found.hexdigest()


def _pieces(value: Any) -> Iterator[bytes]:
    if isinstance(value, dict):
        yield f"dict {len(value)}".encode()
        for key, inner in value.items():
            yield repr(key).encode()
            yield from _pieces(inner)
    elif isinstance(value, list | tuple):
        yield f"{type(value).__name__} {len(value)}".encode()
        for inner in value:
            yield from _pieces(inner)
    elif isinstance(value, torch.Tensor):
        yield f"{value.dtype} {tuple(value.shape)}".encode()
        flat = value.detach().clone(memory_format=torch.contiguous_format).view(-1)
        yield flat.view(torch.uint8).numpy().tobytes()
    elif isinstance(value, float):
        yield np.float64(value).tobytes()
    else:
        yield repr(value).encode()


class Saves:
    """Saves of which it is told how far they have come."""

    def __init__(self, manager: FastCheckManager) -> None:
        self._manager = manager
        #: With the levels that are still to be told.
        self._open: dict[SaveHandle, list[str]] = {}

    def save(self, training: Training) -> None:
        """Save the state after this step."""
        tag = f"step{len(training.losses):04d}"
        handle = self._manager.save_async(training.state(), tag)
        tell("saved", tag=tag, level="local", stats=handle.stats.copy())
        self._open[handle] = ["peers", "object"]

    def report(self, *, wait: bool = False) -> None:
        """Tell which levels were reached since the last time."""
        for handle, levels in list(self._open.items()):
            error = handle.exception(_SAVE_SECONDS) if wait else None
            reached = handle.level
            while levels and (reached == "object" or levels[0] == reached):
                level = levels.pop(0)
                # Without a living storage node a save is in the object tier alone.
                if level == "object" or handle.stats.get("nodes"):
                    tell("saved", tag=handle.tag, level=level, stats=handle.stats.copy())
            if error is not None:
                tell("short", tag=handle.tag, why=str(error))
            if not levels or error is not None:
                del self._open[handle]


def resume(manager: FastCheckManager, training: Training) -> None:
    """Go on from the newest checkpoint, if there is any, and tell where it came from."""
    started = time.monotonic()
    state = manager.load()
    report = manager.last_load
    if state is None or report is None:
        tell("fresh")
        return
    training.restore(state)
    tell(
        "loaded",
        step=len(training.losses),
        tag=report.tag,
        generation=report.generation,
        source=report.source,
        raw_bytes=report.raw_bytes,
        received_bytes=report.received_bytes,
        rebuilt=sum(line.endswith("rebuilt from parity") for line in report.rebuilt),
        skipped=report.skipped,
        load_seconds=report.seconds,
        seconds=time.monotonic() - started,
    )


def train(
    training: Training,
    steps: int,
    *,
    manager: FastCheckManager | None,
    save_every: int,
    stay_at: int | None = None,
) -> None:
    """Train up to a step, telling and saving on the way; at the step `stay_at` wait to be killed."""
    saves = None if manager is None else Saves(manager)
    while len(training.losses) < steps:
        started = time.monotonic()
        loss = training.step()
        tell("step", step=len(training.losses), loss=loss, seconds=time.monotonic() - started)
        if saves is not None:
            if len(training.losses) % save_every == 0:
                saves.save(training)
            saves.report()
            if len(training.losses) == stay_at:
                _stay(saves)
    if saves is not None:
        saves.report(wait=True)
    tell("done", digests=training.digests(), losses=training.losses)


def _stay(saves: Saves) -> NoReturn:
    """Train no further, and go on telling how far saves have come.

    Who kills this process on a busy machine may be late: meanwhile steps would be done, and saved, that are
    to be lost.
    """
    pause = threading.Event()
    while True:
        pause.wait(_LOOK_SECONDS)
        saves.report()


def main() -> int:
    """Train as the arguments say; 1 after an error of FastCheck, which is on stderr."""
    parser = argparse.ArgumentParser(prog="python -m fastcheck_dask.demo.train")
    parser.add_argument("--model", choices=("vgg", "gpt"), required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--checkpoint-dir", help="without it nothing is saved")
    parser.add_argument("--scheduler")
    parser.add_argument("--coordinator")
    parser.add_argument("--local-dir")
    parser.add_argument("--save-every", type=int, default=1)
    parser.add_argument("--stay-at", type=int, help="train no further than this, and wait to be killed")
    asked = parser.parse_args()
    training = prepare(asked.model, seed=asked.seed, quick=asked.quick)
    try:
        with (
            nullcontext()
            if asked.checkpoint_dir is None
            else FastCheckManager(
                asked.checkpoint_dir,
                scheduler=asked.scheduler,
                coordinator=asked.coordinator,
                local_dir=asked.local_dir,
                # The small networks shall be spread over the storage nodes, too.
                chunk_bytes="16 KiB" if asked.quick else None,
            )
        ) as manager:
            if manager is not None:
                resume(manager, training)
            train(
                training,
                asked.steps,
                manager=manager,
                save_every=asked.save_every,
                stay_at=asked.stay_at,
            )
    except FastCheckError as error:
        sys.stderr.write(f"{type(error).__name__}: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
