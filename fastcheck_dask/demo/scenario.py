"""What the demonstration does at which step. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Model = Literal["vgg", "gpt"]
MODELS: tuple[Model, ...] = ("vgg", "gpt")

TITLES: dict[Model, str] = {"vgg": "VGG-like", "gpt": "GPT-like"}


@dataclass(frozen=True)
class Scenario:
    """One training job and its failures, in steps."""

    model: Model
    steps: int
    save_every: int
    #: The trainer and one storage node are killed after this step.
    peer_kill_step: int
    #: The trainer and all storage nodes are killed after this step.
    object_kill_step: int

    def __post_init__(self) -> None:
        if not self.save_every <= self.peer_kill_step < self.object_kill_step < self.steps:
            raise ValueError(f"the steps of a scenario must be in order: {self}")


def scenario(model: Model, *, quick: bool) -> Scenario:
    """Return the scenario of a model.

    The kills are not at a step that saves, so that some steps are lost and done again.
    """
    if quick:
        return Scenario(model, steps=14, save_every=2, peer_kill_step=5, object_kill_step=9)
    if model == "vgg":
        return Scenario(model, steps=120, save_every=10, peer_kill_step=47, object_kill_step=84)
    return Scenario(model, steps=60, save_every=6, peer_kill_step=22, object_kill_step=45)
