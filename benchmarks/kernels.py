"""numpy or numexpr: which is faster for each bit kernel of the codecs and of parity, on this machine?

Every kernel runs on 8 MiB, as one chunk is; both sides write into memory that is there already and was
touched before, use one thread, and are measured in turns. What the project uses is marked; a kernel where
that is not the faster one by a clear margin is said to be worth a look.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numexpr
import numpy as np
import numpy.typing as npt

from benchmarks.machine import console, describe, table
from fastcheck_dask.layout.parity import combine

NBYTES = 8 << 20
_BLOCK = 1 << 18
_ROUNDS = 15
#: A difference up to this share is not told apart from chance.
_CLEAR = 0.1

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class Kernel:
    """One kernel in both forms; each writes to the array that comes with it."""

    name: str
    numpy: Callable[[], object]
    numexpr: Callable[[], object]
    numpy_out: Array
    numexpr_out: Array
    used: str = "numpy"


def _kernel(
    name: str, left: Callable[[Array], object], right: Callable[[Array], object], like: Array
) -> Kernel:
    outs = np.zeros_like(like), np.zeros_like(like)
    return Kernel(name, lambda: left(outs[0]), lambda: right(outs[1]), *outs)


def _fused(expression: str, views: dict[str, Array], out: Array) -> None:
    numexpr.evaluate(expression, local_dict=views, global_dict={}, out=out, casting="no")


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


def _parity(members: int, rng: np.random.Generator) -> Kernel:
    parts = [rng.integers(0, 256, NBYTES, dtype="u1") for _ in range(members)]
    views = {f"p{place}": part.view("i8") for place, part in enumerate(parts)}
    return _kernel(
        f"parity of {members} chunks",
        lambda out: combine(parts, out),
        lambda out: _fused(" ^ ".join(views), views, out.view("i8")),
        parts[0],
    )


def _xor(now: Array, before: Array) -> Kernel:
    views = {"a": now.view("i4"), "b": before.view("i4")}
    return _kernel(
        "xor residual",
        lambda out: np.bitwise_xor(now, before, out=out),
        lambda out: _fused("a ^ b", views, out.view("i4")),
        now,
    )


def _upper(now: Array, before: Array) -> Kernel:
    """Upper 16 bits of the difference, rounded: three operations that could be one pass."""

    def blocked(out: Array) -> None:
        for block in _blocks(now.size):
            np.subtract(now[block], before[block], out=out[block])
            np.add(out[block], np.uint32(0x8000), out=out[block])
            np.right_shift(out[block], np.uint32(16), out=out[block])

    views = {"a": now.view("i4"), "b": before.view("i4")}
    return _kernel(
        "upper half of the difference",
        blocked,
        lambda out: _fused("((a - b + 32768) >> 16) & 65535", views, out.view("i4")),
        now,
    )


def _join(now: Array, before: Array) -> Kernel:
    """Words from their halves and the base: what decoding a delta ends with."""
    low, high = now.astype("u2").astype("i2"), (before >> np.uint32(16)).astype("u2")
    # numexpr knows no 16-bit numbers, so it is spared the conversion.
    views = {"l": low.astype("i4"), "h": high.astype("i4"), "b": before.view("i4")}

    def blocked(out: Array) -> None:
        spare = np.empty(_BLOCK, "u4")
        for block in _blocks(now.size):
            np.copyto(out[block].view("i4"), low[block])
            np.copyto(spare[: out[block].size], high[block])
            np.left_shift(spare, np.uint32(16), out=spare)
            np.add(out[block], spare, out=out[block])
            np.add(out[block], before[block], out=out[block])

    return _kernel(
        "join halves, add base",
        blocked,
        lambda out: _fused("l + (h << 16) + b", views, out.view("i4")),
        now,
    )


def _fields(now: Array) -> Kernel:
    """Sign and mantissa of the top half of floats, side by side."""
    top = (now >> np.uint32(16)).astype("u2")
    wide = top.astype("i4")

    def blocked(out: Array) -> None:
        narrow = out.view("u2")[: top.size]
        for block in _blocks(top.size):
            np.bitwise_and(top[block], np.uint16(0x807F), out=narrow[block])

    def fused(out: Array) -> None:
        _fused("t & 32895", {"t": wide}, out)

    found = _kernel("sign and mantissa of floats", blocked, fused, wide)
    return Kernel(
        found.name, found.numpy, found.numexpr, found.numpy_out.view("u2")[: top.size], found.numexpr_out
    )


def kernels() -> list[Kernel]:
    """Make all kernels on their own data."""
    rng = np.random.default_rng(0)
    now, before = rng.integers(0, 1 << 32, (2, NBYTES // 4), dtype="u4")
    made = [_parity(members, rng) for members in (2, 3, 5)]
    return [*made, _xor(now, before), _upper(now, before), _join(now, before), _fields(now)]


def seconds(kernel: Kernel) -> tuple[float, float]:
    """Measure both forms in turns; the medians of CPU time."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, took in zip((kernel.numpy, kernel.numexpr), times, strict=True):
            start = time.process_time()
            run()
            took.append(time.process_time() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def verdict(kernel: Kernel, times: tuple[float, float]) -> str:
    """Say whether what is used is the faster one."""
    used, other = times if kernel.used == "numpy" else times[::-1]
    if used > other * (1 + _CLEAR):
        return f"{kernel.used}: WORTH A LOOK"
    return f"{kernel.used}: faster" if other > used * (1 + _CLEAR) else f"{kernel.used}: no clear difference"


def main() -> None:
    """Print which form each kernel uses, and what both cost."""
    numexpr.set_num_threads(1)
    rows = []
    for kernel in kernels():
        times = seconds(kernel)
        np.testing.assert_array_equal(kernel.numpy_out, kernel.numexpr_out)
        rates = [f"{NBYTES / took / 1e9:.1f}" for took in times]
        rows.append([kernel.name, *rates, verdict(kernel, times)])
    console.print(describe())
    table("Bit kernels, 8 MiB, one thread", ["kernel", "numpy GB/s", "numexpr GB/s", "used"], rows)


if __name__ == "__main__":
    main()
