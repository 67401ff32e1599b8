"""Are our codecs smaller and faster than others on checkpoints of real training? ``make bench-codecs``.

Everything that is compared runs in turn in one process with one thread; times are medians of its CPU time.
Every round trip is compared bit for bit: a broken one is the only thing that makes this program fail.
"""

from __future__ import annotations

import argparse
import gc
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from statistics import median

import numpy as np
from fastcheck_codecs import kernels

from benchmarks import codec_cases, codec_processes, codec_report
from benchmarks.checkpoints import CACHE, RUNS, Checkpoints, every, find
from benchmarks.codec_cases import Case
from benchmarks.codec_coders import Coder, coders, keep_memory, one_thread
from benchmarks.codec_goals import goals
from benchmarks.codec_measures import Measures
from benchmarks.machine import console, describe

ROUNDS, SLOW_ROUNDS = 5, 2

_Work = tuple[Case, Checkpoints]


class BrokenRoundTripError(AssertionError):
    """What came back differs from what was encoded."""


@dataclass
class _Times:
    nbytes: int = 0
    encode: list[float] = field(default_factory=list)
    decode: list[float] = field(default_factory=list)


def _once(coder: Coder, case: Case, current: codec_cases.Words, times: _Times) -> None:
    coder.prepare()
    started = time.process_time()
    payload = coder.encode()
    encoded = time.process_time()
    words = coder.decode(payload)
    decoded = time.process_time()
    if not np.array_equal(words, current):
        raise BrokenRoundTripError(f"{coder.name} on {case.name}")
    times.nbytes = len(memoryview(payload).cast("B"))
    times.encode.append(encoded - started)
    times.decode.append(decoded - encoded)


def measure(case: Case, checkpoints: Checkpoints, rounds: int = ROUNDS) -> Measures:
    """Measure all coders on one case, in turn.

    Raises
    ------
    BrokenRoundTripError
        If a coder does not return the very bits.
    """
    pair = codec_cases.load(case, checkpoints)
    made = coders(pair, case.kind, case.dtype)
    times = {coder.name: _Times() for coder in made}
    gc.collect()
    gc.disable()
    try:
        for number in range(rounds + 1):
            for coder in made:
                if number == 0 and not coder.slow:  # warms up; the times are thrown away
                    _once(coder, case, pair.current, _Times())
                elif 0 < number <= (SLOW_ROUNDS if coder.slow else rounds):
                    _once(coder, case, pair.current, times[coder.name])
    finally:
        gc.enable()
    measures = Measures(case, pair.current.nbytes, codec_cases.bound(pair))
    for name, taken in times.items():
        measures.add(name, taken.nbytes, encode=median(taken.encode), decode=median(taken.decode))
    return measures


def _chosen(patterns: list[str], runs: Iterable[Checkpoints], *, quick: bool) -> Iterator[_Work]:
    for checkpoints in runs:
        for case in codec_cases.of_run(checkpoints):
            if quick and case.interval != 10:
                continue
            if not patterns or any(fnmatch(case.name, pattern) for pattern in patterns):
                yield case, checkpoints


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "cases", nargs="*", help="patterns of run/field/phase/interval, as in 'gpt_fp32/weights/late/*'"
    )
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the checkpoints")
    parser.add_argument("--no-training", action="store_true", help="use only what the cache has")
    parser.add_argument("--quick", action="store_true", help="interval 10 only")
    parser.add_argument(
        "--plain-malloc", action="store_true", help="let peers pay for page faults of fresh buffers"
    )
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--write", type=Path, help="folder that receives the tables and plots")
    return parser.parse_args()


def main() -> int:
    """Print all tables; return the exit status."""
    arguments = _arguments()
    one_thread()
    if not arguments.plain_malloc:
        keep_memory()
    machine = describe() + f", kernels: {kernels()}" + (", plain malloc" if arguments.plain_malloc else "")
    console.print(machine)
    if arguments.no_training:
        runs = [found for name in RUNS if (found := find(name, arguments.cache))]
    else:
        runs = list(every(arguments.cache))
    scaling = codec_processes.measure(runs)
    taken = []
    try:
        for case, checkpoints in _chosen(arguments.cases, runs, quick=arguments.quick):
            taken.append(measure(case, checkpoints, arguments.rounds))
            codec_report.progress(taken[-1])
    except BrokenRoundTripError as error:
        console.print(f"BROKEN ROUND TRIP: {error}", style="bold red")
        return 1
    report = codec_report.Report(machine, runs, taken, scaling, goals(taken, scaling), arguments.rounds)
    report.show()
    if arguments.write is not None:
        report.write(arguments.write, "codecs_plain_malloc" if arguments.plain_malloc else "codecs")
    return 0


if __name__ == "__main__":
    sys.exit(main())
