"""A network that is really trained, for states that look like those of users."""

from __future__ import annotations

from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn


class Training:
    """An MLP on scikit-learn's digits with AdamW; `width` sets the size of the state.

    The state (weights and both moments, fp32) has about ``3 * 4 * (2 * width**2)`` bytes.
    """

    def __init__(self, width: int = 1024, seed: int = 0) -> None:
        torch.manual_seed(seed)
        digits = load_digits()
        self._x = torch.tensor(digits.data, dtype=torch.float32) / 16
        self._y = torch.tensor(digits.target)
        self.model = nn.Sequential(
            nn.Linear(64, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, width),
            nn.ReLU(),
            nn.Linear(width, 10),
        )
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.losses: list[float] = []

    def steps(self, count: int) -> None:
        """Train for `count` steps of 64 samples."""
        for _ in range(count):
            batch = torch.randint(len(self._x), (64,))
            loss = nn.functional.cross_entropy(self.model(self._x[batch]), self._y[batch])
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.losses.append(loss.item())

    def state(self) -> dict[str, Any]:
        """Return what a training script would save."""
        return {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "step": len(self.losses),
        }


def nbytes(tree: Any) -> int:
    """Return the bytes of all tensors in a state."""
    if isinstance(tree, torch.Tensor):
        return tree.nbytes
    if isinstance(tree, dict):
        return sum(map(nbytes, tree.values()))
    if isinstance(tree, list | tuple):
        return sum(map(nbytes, tree))
    return 0
