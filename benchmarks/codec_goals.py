"""What the codecs have to reach, and whether they do: on held-out cases, against peers in the same run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.codec_cases import Kind
from benchmarks.codec_measures import Measures, Scaling, Spread


@dataclass(frozen=True)
class _Aim:
    kind: Kind
    ours: str
    #: Several: the one with the better ratio, case by case.
    peers: tuple[str, ...]
    ratio: float
    encode: float
    decode: float | None = None


_BLOSC2 = "Blosc2 zstd-1 shuffle"
_AIMS = (
    _Aim(Kind.WEIGHTS, "delta", ("ZipNN / xor",), 1.06, 1.5, 1.0),
    _Aim(Kind.WEIGHTS, "delta", (f"{_BLOSC2} / difference",), 1.01, 1.2),
    _Aim(Kind.WEIGHTS, "delta", ("pcodec-8",), 0.985, 4.0),
    _Aim(Kind.SECOND_MOMENT, "delta", ("ZipNN / xor", f"{_BLOSC2} / xor"), 1.05, 1.3),
    _Aim(Kind.MOMENTUM, "index", ("ZipNN / raw",), 1.0, 2.3),
    _Aim(Kind.WEIGHTS_BF16, "delta", ("ZipNN / xor",), 1.1, 1.0),
)
#: Bytes more than the order-0 bound.
_BOUND_MARGIN = 0.03
#: Bytes more than raw, whatever it is.
_RAW_MARGIN = 0.001
_PROCESSES = 1.5


@dataclass(frozen=True)
class Goal:
    """One figure that has to hold.

    Attributes
    ----------
    kind, against, figure : str
    wanted : float
        At least this.
    got : Spread
        Of all held-out cases.
    cases : int
    in_every_case : bool
        Every case has to reach it; else the mean counts.
    """

    kind: str
    against: str
    figure: str
    wanted: float
    got: Spread
    cases: int
    in_every_case: bool = False

    @property
    def reached(self) -> bool:
        """Whether it holds."""
        return (self.got.low if self.in_every_case else self.got.mean) >= self.wanted


def goals(taken: Sequence[Measures], scaling: Scaling | None) -> list[Goal]:
    """Compare what was measured with the aims; aims without a held-out case are left out."""
    held_out = [measures for measures in taken if not measures.case.is_tuned]
    found = [goal for aim in _AIMS for goal in _compare(aim, held_out)]
    weights = [m for m in held_out if m.case.kind in (Kind.WEIGHTS, Kind.WEIGHTS_BF16)]
    if weights:
        shares = [m.by_name["delta"].ratio / m.bound for m in weights]
        found.append(_for_every_case("all weights", "order-0 bound", shares, margin=_BOUND_MARGIN))
    if taken:
        sizes = [m.by_name[name].ratio for m in taken for name in ("delta", "index")]
        found.append(_for_every_case("everything", "raw", sizes, margin=_RAW_MARGIN))
    if scaling is not None:
        found.append(Goal("weights", "one process", "two", _PROCESSES, scaling.gain, 1))
    return found


def _for_every_case(kind: str, against: str, ratios: list[float], *, margin: float) -> Goal:
    got = Spread.of(ratios)
    return Goal(kind, against, "ratio, each case", 1 / (1 + margin), got, len(ratios), in_every_case=True)


def _compare(aim: _Aim, held_out: Sequence[Measures]) -> list[Goal]:
    cases = [measures for measures in held_out if measures.case.kind is aim.kind]
    if not cases:
        return []
    pairs = [(m.by_name[aim.ours], m.best(*aim.peers)[1]) for m in cases]
    found = []
    for figure in ("ratio", "encode", "decode"):
        wanted = getattr(aim, figure)
        if wanted is not None:
            got = Spread.of([getattr(ours, figure) / getattr(peer, figure) for ours, peer in pairs])
            against = " or ".join(aim.peers)
            found.append(Goal(aim.kind.value, against, figure, wanted, got, len(cases)))
    return found
