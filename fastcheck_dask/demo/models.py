"""The two networks of the demonstration: convolutions as in VGG, and a decoder as in GPT."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.nn import functional


def vgg(width: int, *, hidden: int) -> nn.Module:
    """Return a VGG-like network for 8 x 8 images of ten classes.

    Parameters
    ----------
    width : int
        Channels of the first of three stages; each further stage has twice as many.
    hidden : int
        Units of the two hidden fully connected layers.
    """

    def stages() -> Iterator[nn.Module]:
        before = 1
        for channels in (width, 2 * width, 4 * width):
            for _ in range(2):
                yield nn.Conv2d(before, channels, 3, padding=1, bias=False)
                yield nn.BatchNorm2d(channels)
                yield nn.ReLU()
                before = channels
            yield nn.MaxPool2d(2)

    return nn.Sequential(
        nn.Sequential(*stages()),
        nn.Flatten(),
        nn.Linear(4 * width, hidden),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(hidden, hidden),
        nn.ReLU(),
        nn.Dropout(0.3),
        nn.Linear(hidden, 10),
    )


class _Block(nn.Module):
    """Causal self-attention and a feed-forward part, each added to what came in."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self._heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.project = nn.Linear(width, width)
        self.feed_forward = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(0.1)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, context, width) to the same shape."""
        batch, context, width = x.shape
        parts = self.query_key_value(self.norm1(x)).view(batch, context, 3, self._heads, -1)
        query, key, value = parts.permute(2, 0, 3, 1, 4)
        seen = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.project(seen.transpose(1, 2).reshape(batch, context, width))
        out: torch.Tensor = x + self.feed_forward(self.norm2(x))
        return out


class Gpt(nn.Module):
    """A GPT-like network over characters; the embedding is also the output layer.

    Parameters
    ----------
    alphabet : int
        Number of characters.
    context : int
        Longest piece of text.
    width, layers, heads : int
        Size of the network.
    """

    def __init__(self, alphabet: int, *, context: int, width: int, layers: int, heads: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(alphabet, width)
        self.position = nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(_Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)
        self.output = nn.Linear(width, alphabet, bias=False)
        nn.init.normal_(self.embedding.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.output.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map int64 (batch, context) to logits, float32 (batch, alphabet, context)."""
        places = torch.arange(tokens.shape[1])
        x = self.blocks(self.embedding(tokens) + self.position(places))
        logits: torch.Tensor = self.output(self.norm(x))
        return logits.transpose(1, 2)
