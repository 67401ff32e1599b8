"""What the codecs are measured on, what can be fed to a coder, and how small order-0 coding can get."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.checkpoints import INTERVALS, PHASES, Checkpoints

Words = npt.NDArray[Any]

SAMPLE_NBYTES = 16 << 20
_PART_NBYTES = 1 << 20
#: Bits per word that stand for none, where nothing changed.
_NO_BITS = 1e-3

#: What the codecs may be tuned on; every other case is held out. Fixed before any tuning.
_TUNED = {("vgg_sgd", "early"), ("vgg_sgd", "late"), ("gpt_fp32", "late")}


class Kind(Enum):
    """The classes of state that are reported apart."""

    WEIGHTS = "fp32 weights"
    WEIGHTS_BF16 = "bf16 weights"
    SECOND_MOMENT = "exp_avg_sq"
    MOMENTUM = "momentum"


_KINDS = {
    "weights": Kind.WEIGHTS,
    "weights_bf16": Kind.WEIGHTS_BF16,
    "exp_avg_sq": Kind.SECOND_MOMENT,
    "exp_avg": Kind.MOMENTUM,
    "momentum": Kind.MOMENTUM,
}


@dataclass(frozen=True)
class Case:
    """One class of state of one run, and the same some steps earlier.

    Attributes
    ----------
    run, phase : str
    field : str
        As the cache calls it: ``weights``, ``exp_avg``, ...
    interval : int
        Steps between the two.
    """

    run: str
    field: str
    phase: str
    interval: int

    @property
    def name(self) -> str:
        """How it is chosen on the command line."""
        return f"{self.run}/{self.field}/{self.phase}/{self.interval}"

    @property
    def kind(self) -> Kind:
        """The class it is reported in."""
        return _KINDS[self.field]

    @property
    def is_tuned(self) -> bool:
        """Whether the codecs may have been tuned on it."""
        return (self.run, self.phase) in _TUNED

    @property
    def dtype(self) -> str:
        """True dtype of the values."""
        return "bfloat16" if self.kind is Kind.WEIGHTS_BF16 else "float32"


@dataclass(frozen=True)
class Pair:
    """The bits of a case, as unsigned words of the same shape (n,)."""

    current: Words
    base: Words


def of_run(checkpoints: Checkpoints) -> Iterator[Case]:
    """Give all cases of one run."""
    for field in checkpoints.kinds:
        for phase in PHASES:
            for interval in INTERVALS:
                case = Case(checkpoints.name, field, phase, interval)
                # After 100 steps nothing of a momentum is left: a third look at it by itself tells nothing.
                if case.kind is not Kind.MOMENTUM or interval < max(INTERVALS):
                    yield case


def load(case: Case, checkpoints: Checkpoints) -> Pair:
    """Return a sample of at most 16 MiB: 1 MiB parts, evenly spread over the state."""
    return Pair(
        _sample(checkpoints.load(case.phase, case.interval, case.field)),
        _sample(checkpoints.load(case.phase, 0, case.field)),
    )


def _sample(values: Words) -> Words:
    # A plain array: slices of a mapped file are slower, for ours and theirs.
    words = np.asarray(values.view(np.dtype(f"u{values.itemsize}")))
    part = _PART_NBYTES // words.itemsize
    if words.nbytes <= SAMPLE_NBYTES:
        return words.copy()
    starts = np.linspace(0, words.size - part, SAMPLE_NBYTES // _PART_NBYTES).astype(np.int64)
    return np.concatenate([words[start : start + part] for start in starts])


class Feed(Enum):
    """What a general coder is given instead of the values."""

    RAW = "raw"
    XOR = "xor"
    #: Zigzag code of the difference: small numbers of either sign have zeros on top.
    DIFFERENCE = "difference"
    #: The difference itself, for coders that know signed numbers.
    SIGNED = "signed difference"


def residual(feed: Feed, pair: Pair, *, out: Words) -> Words:
    """Compute what is fed to a coder, in cache-sized parts; `out` is not touched for `Feed.RAW`."""
    if feed is Feed.RAW:
        return pair.current
    for part in _parts(out):
        if feed is Feed.XOR:
            np.bitwise_xor(pair.current[part], pair.base[part], out=out[part])
            continue
        np.subtract(pair.current[part], pair.base[part], out=out[part])
        if feed is Feed.DIFFERENCE:
            signed = out[part].view(f"i{out.itemsize}")
            sign = signed >> (8 * out.itemsize - 1)
            signed <<= 1
            signed ^= sign
    return out


def restore(feed: Feed, stored: Words, base: Words, *, out: Words) -> Words:
    """Undo `residual`."""
    if feed is Feed.RAW:
        return stored
    for part in _parts(out):
        if feed is Feed.XOR:
            np.bitwise_xor(stored[part], base[part], out=out[part])
        elif feed is Feed.SIGNED:
            np.add(stored[part], base[part], out=out[part])
        else:
            sign = -(stored[part] & out.dtype.type(1)).view(f"i{out.itemsize}")
            np.right_shift(stored[part], 1, out=out[part])
            out[part] ^= sign.view(out.dtype)
            out[part] += base[part]
    return out


def _parts(words: Words) -> Iterable[slice]:
    step = (1 << 18) // words.itemsize
    return (slice(start, start + step) for start in range(0, words.size, step))


def bound(pair: Pair) -> float:
    """Return the best ratio that an order-0 code of the byte planes can have.

    The best of the values, the values with the sign moved beside the mantissa, XOR and difference. Codes that
    adapt within the sample can pass it slightly.
    """
    room = np.empty_like(pair.current)
    top = room.dtype.type(8 * room.itemsize - 1)
    turned = (pair.current << room.dtype.type(1)) | (pair.current >> top)
    bits = [_entropy(pair.current), _entropy(turned)]
    bits += [_entropy(residual(feed, pair, out=room)) for feed in (Feed.XOR, Feed.DIFFERENCE)]
    return 8 * room.itemsize / max(min(bits), _NO_BITS)


def _entropy(words: Words) -> float:
    """Return bits per word."""
    total = 0.0
    for plane in words.view(np.uint8).reshape(-1, words.itemsize).T:
        counts = np.bincount(plane, minlength=256)
        shares = counts[counts > 0] / plane.size
        total -= float(shares @ np.log2(shares))
    return total
