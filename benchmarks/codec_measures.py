"""What was measured on one case, and how cases are summed up."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from benchmarks.codec_cases import Case


@dataclass(frozen=True)
class Measure:
    """One coder on one case: raw size by encoded size, and raw bytes per second of CPU time."""

    ratio: float
    encode: float
    decode: float


@dataclass
class Measures:
    """All coders on one case.

    Attributes
    ----------
    case : Case
    nbytes : int
        Raw size of the sample.
    bound : float
        Best ratio of an order-0 code of byte planes.
    """

    case: Case
    nbytes: int
    bound: float
    by_name: dict[str, Measure] = field(default_factory=dict)

    def add(self, name: str, encoded_nbytes: int, *, encode: float, decode: float) -> None:
        """Add a coder: encoded size, and seconds."""
        self.by_name[name] = Measure(self.nbytes / encoded_nbytes, self.nbytes / encode, self.nbytes / decode)

    def best(self, *peers: str) -> tuple[str, Measure]:
        """Return name and measure of the smallest of some coders; a peer without a feed means any feed."""
        found = {
            name: measure
            for name, measure in self.by_name.items()
            if name in peers or name.split(" / ")[0] in peers
        }
        name = max(found, key=lambda name: found[name].ratio)
        return name, found[name]


@dataclass(frozen=True)
class Spread:
    """Geometric mean and range."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """Sum up at least one positive value."""
        return cls(math.exp(sum(map(math.log, values)) / len(values)), min(values), max(values))

    def __str__(self) -> str:
        return f"{self.mean:.4g} [{self.low:.4g}..{self.high:.4g}]"


@dataclass(frozen=True)
class Scaling:
    """Two processes against one.

    Attributes
    ----------
    case : Case
    one, two : float
        Raw bytes per second of wall time.
    gain : Spread
        Of two over one, round by round: median and range.
    cpu_gain : float
        The gain if each process had a core of its own: from the CPU time, which tells what they lose to each
        other's cache and memory traffic, but not what other work on the machine takes from them.
    """

    case: Case
    one: float
    two: float
    gain: Spread
    cpu_gain: float
