"""Numbers for monitoring as plain values, so that they are there without any monitoring library."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

#: A *summary* has two values in each sample: how many, and their sum.
Kind = Literal["counter", "gauge", "summary"]


@dataclass(frozen=True)
class Sample:
    """One value, or for a summary the sum of `count` values."""

    labels: Mapping[str, str]
    value: float
    count: int = 0


@dataclass
class Family:
    """The samples of one name.

    Attributes
    ----------
    name : str
        With its unit; without the ``_total`` that counters get.
    kind : {"counter", "gauge", "summary"}
    text : str
        What it is, one line.
    labels : tuple of str
        Names of the labels, which every sample has.
    """

    name: str
    kind: Kind
    text: str
    labels: tuple[str, ...]
    samples: list[Sample] = field(default_factory=list)

    def add(self, value: float, *labels: str, count: int = 0) -> None:
        """Add a sample with its labels in their order."""
        self.samples.append(Sample(dict(zip(self.labels, labels, strict=True)), value, count))


#: Returns the present numbers; called from the thread of whoever asks for them.
Read = Callable[[], Iterable[Family]]
