"""numpy or numexpr: which is faster for each bit kernel of the codecs and of parity, on this machine?

Every kernel runs on 1, 8 (as a chunk is by default) and 32 MiB. Both sides write into memory that is there
already and was touched before, and are measured in turns: in CPU time with one thread of numexpr, in wall
time with as many as there are cores, of which other work may take a part. What the project uses is numpy; a
kernel where that is slower by a clear margin in CPU time is said to be worth a look.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numexpr
import numpy as np
import numpy.typing as npt

from benchmarks.machine import console, describe, table
from fastcheck_dask.layout.parity import combine

SIZES = (1 << 20, 8 << 20, 32 << 20)
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


def _kernel(
    name: str, left: Callable[[Array], object], right: Callable[[Array], object], like: Array
) -> Kernel:
    outs = np.zeros_like(like), np.zeros_like(like)
    return Kernel(name, lambda: left(outs[0]), lambda: right(outs[1]), *outs)


def _fused(expression: str, views: dict[str, Array], out: Array) -> None:
    numexpr.evaluate(expression, local_dict=views, global_dict={}, out=out, casting="no")


def _blocks(count: int) -> Iterator[slice]:
    return (slice(start, start + _BLOCK) for start in range(0, count, _BLOCK))


def _parity(members: int, nbytes: int, rng: np.random.Generator) -> Kernel:
    parts = [rng.integers(0, 256, nbytes, dtype="u1") for _ in range(members)]
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


def _round(now: Array) -> Kernel:
    """float32 to bfloat16, to the nearest even."""

    def blocked(out: Array) -> None:
        spare, narrow = np.empty(_BLOCK, "u4"), out.view("u2")[: now.size]
        for block in _blocks(now.size):
            part = spare[: now[block].size]
            np.right_shift(now[block], np.uint32(16), out=part)
            np.bitwise_and(part, np.uint32(1), out=part)
            np.add(part, np.uint32(0x7FFF), out=part)
            np.add(part, now[block], out=part)
            np.right_shift(part, np.uint32(16), out=narrow[block], casting="unsafe")

    def fused(out: Array) -> None:
        _fused("((a + ((a >> 16) & 1) + 32767) >> 16) & 65535", {"a": now.view("i4")}, out.view("i4"))

    found = _kernel("float32 to bfloat16", blocked, fused, now)
    # numexpr has no 16-bit numbers: its result stays as wide as the input.
    return Kernel(
        found.name, found.numpy, found.numexpr, found.numpy_out.view("u2")[: now.size], found.numexpr_out
    )


def _compare(now: Array) -> Kernel:
    """Whether two generations are the same, which they are."""
    same = now.copy()
    views = {"a": now.view("i4"), "b": same.view("i4")}

    def plain(out: Array) -> None:
        out[0] = not np.array_equal(now, same)

    def fused(out: Array) -> None:
        out[0] = numexpr.evaluate("sum(where(a != b, 1, 0))", local_dict=views, global_dict={}) != 0

    return _kernel("are two chunks equal", plain, fused, now)


def kernels(nbytes: int) -> Iterator[Kernel]:
    """Make all kernels, on their own data of so many bytes."""
    rng = np.random.default_rng(0)
    for members in (2, 3, 5, 8):
        yield _parity(members, nbytes, rng)
    now, before = rng.integers(0, 1 << 32, (2, nbytes // 4), dtype="u4")
    yield from (_xor(now, before), _upper(now, before), _join(now, before), _fields(now))
    yield from (_round(now), _compare(now))


def seconds(kernel: Kernel, clock: Callable[[], float]) -> tuple[float, float]:
    """Measure both forms in turns; the medians."""
    times: tuple[list[float], list[float]] = ([], [])
    for _ in range(_ROUNDS):
        for run, took in zip((kernel.numpy, kernel.numexpr), times, strict=True):
            start = clock()
            run()
            took.append(clock() - start)
    return statistics.median(times[0]), statistics.median(times[1])


def verdict(times: tuple[float, float]) -> str:
    """Say whether what is used, numpy, is the faster one."""
    if times[0] > times[1] * (1 + _CLEAR):
        return "WORTH A LOOK"
    return "numpy" if times[1] > times[0] * (1 + _CLEAR) else "no clear difference"


def measure(kernel: Kernel, nbytes: int) -> list[str]:
    """Measure one kernel: the row of the table."""
    numexpr.set_num_threads(1)
    alone = seconds(kernel, time.process_time)
    np.testing.assert_array_equal(kernel.numpy_out, kernel.numexpr_out)
    numexpr.set_num_threads(os.cpu_count() or 1)
    together = seconds(kernel, time.perf_counter)
    rates = [f"{nbytes / took / 1e9:.1f}" for took in (*alone, *together)]
    return [kernel.name, str(nbytes >> 20), *rates, verdict(alone)]


_COLUMNS = ["kernel", "MiB", "numpy", "numexpr", "numpy, wall", "numexpr, all cores, wall", "faster"]


def _page(machine: str, rows: list[list[str]]) -> str:
    lines = [
        "# numpy or numexpr",
        "",
        "Written by `python -m benchmarks.kernels --write docs/benchmarks`.",
        "",
    ]
    lines += [f"{machine}.", "", *(__doc__ or "").split("\n\n", 1)[1].splitlines()]
    lines += ["", "GB/s are 10^9 bytes of the result, as wide as numexpr has to make it, per second.", ""]
    lines += ["| " + " | ".join(_COLUMNS) + " |", "|" + "---|" * len(_COLUMNS)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    won = [f"{row[0]}, {row[1]} MiB" for row in rows if row[-1] == "WORTH A LOOK"]
    lines += ["", f"numexpr is clearly faster in: {'; '.join(won) or 'none'}."]
    lines += ["Chunks have 8 MiB by default; the project uses numpy for every kernel."]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Print what both forms of each kernel cost."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", type=Path, help="folder that receives the table")
    arguments = parser.parse_args()
    machine = describe()
    rows = [measure(kernel, nbytes) for nbytes in SIZES for kernel in kernels(nbytes)]
    rows.sort(key=lambda row: row[0])
    console.print(machine)
    table("Bit kernels, GB/s", _COLUMNS, rows)
    if arguments.write is not None:
        (arguments.write / "kernels.md").write_text(_page(machine, rows))


if __name__ == "__main__":
    main()
