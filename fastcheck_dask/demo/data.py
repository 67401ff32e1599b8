"""Training data that is on every machine: scikit-learn's digits, and the text of Python's own help."""

from __future__ import annotations

from collections.abc import Callable
from pydoc_data import topics

import numpy as np
import torch
from sklearn.datasets import load_digits

Batch = tuple[torch.Tensor, torch.Tensor]
#: Draws the next batch: inputs and targets. The generator decides which, and nothing else does.
Draw = Callable[[torch.Generator], Batch]


def digits(batch: int) -> Draw:
    """Return what draws images of handwritten digits.

    Parameters
    ----------
    batch : int
        Images per batch.

    Returns
    -------
    callable
        Gives float32 of shape (batch, 1, 8, 8) within 0 to 1, and int64 of shape (batch,) within 0 to 9.
    """
    images, labels = load_digits(return_X_y=True)
    inputs = torch.from_numpy((images / 16.0).astype(np.float32)).reshape(-1, 1, 8, 8)
    targets = torch.from_numpy(labels.astype(np.int64))

    def draw(generator: torch.Generator) -> Batch:
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        return inputs[chosen], targets[chosen]

    return draw


def help_text() -> tuple[torch.Tensor, int]:
    """Return the text of Python's help topics and the size of its alphabet.

    Returns
    -------
    tokens : Tensor of int64, shape (n,)
        One per character.
    size : int
        Number of different characters.
    """
    text = "\n".join(topics.topics[name] for name in sorted(topics.topics))
    characters = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    alphabet, tokens = np.unique(characters, return_inverse=True)
    return torch.from_numpy(tokens.astype(np.int64).reshape(-1)), len(alphabet)


def text_windows(tokens: torch.Tensor, batch: int, *, context: int) -> Draw:
    """Return what draws pieces of a text, and the same pieces one character further.

    Parameters
    ----------
    tokens : Tensor of int64, shape (n,)
        The text.
    batch, context : int
        Pieces per batch, characters per piece.
    """
    window = torch.arange(context + 1)

    def draw(generator: torch.Generator) -> Batch:
        starts = torch.randint(len(tokens) - context, (batch, 1), generator=generator)
        pieces = tokens[starts + window]
        return pieces[:, :-1], pieces[:, 1:]

    return draw
