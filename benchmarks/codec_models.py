"""The networks and the data whose checkpoints the codecs are measured on."""

from __future__ import annotations

import re
import sysconfig
from collections import Counter
from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from pydoc_data import topics

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional

from fastcheck_dask.demo.data import Draw, text_windows
from fastcheck_dask.demo.models import Gpt

#: Channels of VGG-16's convolutions in units of the narrowest; None is a pooling.
_VGG_16 = (1, 1, None, 2, 2, None, 4, 4, 4, None, 8, 8, 8, None, 8, 8, 8, None)
_RESNET_18 = ((1, 1), (1, 1), (2, 2), (2, 1), (4, 2), (4, 1), (8, 2), (8, 1))

ALPHABET = 4096
CONTEXT = 96
CLASSES = 10


def vgg(width: int = 32, hidden: int = 1024) -> nn.Module:
    """Return VGG-16 with batch norm for 32 x 32 images; 64 and 4096 are the original sizes."""

    def layers() -> Iterator[nn.Module]:
        before = 3
        for factor in _VGG_16:
            if factor is None:
                yield nn.MaxPool2d(2)
                continue
            yield nn.Conv2d(before, factor * width, 3, padding=1)
            yield nn.BatchNorm2d(factor * width)
            yield nn.ReLU()
            before = factor * width

    sizes = [8 * width, hidden, hidden]
    head = [part for pair in pairwise(sizes) for part in (nn.Linear(*pair), nn.ReLU(), nn.Dropout(0.5))]
    return _start(nn.Sequential(*layers(), nn.Flatten(), *head, nn.Linear(hidden, CLASSES)))


class _Residual(nn.Module):
    """Two convolutions, and what came in added to what they give."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(before, after, 3, stride, 1, bias=False),
            nn.BatchNorm2d(after),
            nn.ReLU(),
            nn.Conv2d(after, after, 3, 1, 1, bias=False),
            nn.BatchNorm2d(after),
        )
        self.short: nn.Module = nn.Identity()
        if stride != 1 or before != after:
            self.short = nn.Sequential(nn.Conv2d(before, after, 1, stride, bias=False), nn.BatchNorm2d(after))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, before, side, side) to (batch, after, side / stride, side / stride)."""
        return functional.relu(self.body(x) + self.short(x))


def resnet(width: int = 48) -> nn.Module:
    """Return ResNet-18 for 32 x 32 images; 64 is the original width."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 2, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    before = width
    for factor, stride in _RESNET_18:
        layers.append(_Residual(before, factor * width, stride))
        before = factor * width
    return _start(nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(before, CLASSES)))


def gpt(width: int = 256, layers: int = 8) -> nn.Module:
    """Return a GPT over `ALPHABET` pieces of program text."""
    return Gpt(ALPHABET, context=CONTEXT, width=width, layers=layers, heads=width // 64)


def _start(model: nn.Module) -> nn.Module:
    for part in model.modules():
        if isinstance(part, nn.Conv2d):
            nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu")
    return model


def digits(batch: int = 16) -> Draw:
    """Return what draws handwritten digits at 32 x 32 in three channels, shifted and with noise."""
    images, labels = load_digits(return_X_y=True)
    small = torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8)
    inputs = functional.interpolate(small, size=32, mode="bilinear", align_corners=False).repeat(1, 3, 1, 1)
    inputs = (inputs - inputs.mean()) / inputs.std()
    targets = torch.tensor(labels, dtype=torch.int64)

    def draw(generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        chosen = torch.randint(len(inputs), (batch,), generator=generator)
        right, down = torch.randint(-3, 4, (2,), generator=generator).tolist()
        shifted = torch.roll(inputs[chosen], (right, down), (2, 3))
        return shifted + 0.1 * torch.randn(shifted.shape, generator=generator), targets[chosen]

    return draw


def program_text(batch: int = 4) -> Draw:
    """Return what draws pieces of the standard library's source and of Python's help."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join([*topics.topics.values(), *(f.read_text("utf-8", errors="ignore") for f in files)])
    words = re.findall(r" *[A-Za-z_]+|\d|\n *|[^\sA-Za-z_\d]|\s", text)
    # A word that is not among the most frequent is spelled in bytes, so that nothing is unknown.
    common = (word for word, _ in Counter(words).most_common(ALPHABET - 256))
    codes = {word: 256 + number for number, word in enumerate(islice(common, ALPHABET - 256))}
    tokens = [code for word in words for code in ([codes[word]] if word in codes else word.encode())]
    return text_windows(torch.tensor(tokens), batch, context=CONTEXT)
