"""How much faster do two encoder processes encode one state in shared memory than one?

The processes are kept; each round the first encodes all chunks alone, then the two half each. With other work
on the machine the wall times say little: the load average stands beside them.
"""

from __future__ import annotations

import multiprocessing
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from fastcheck_codecs import XorDelta, max_encoded_nbytes

from benchmarks import codec_cases
from benchmarks.checkpoints import Checkpoints
from benchmarks.codec_cases import Kind
from benchmarks.codec_coders import one_thread
from benchmarks.codec_measures import Scaling, Spread

_CHUNK_NBYTES = 2 << 20
_ROUNDS = 15


def _map(folder: Path, name: str, mode: Any) -> codec_cases.Words:
    return np.asarray(np.memmap(folder / name, np.uint8, mode))


def _serve(channel: Connection, folder: Path, dtype: str, which: int) -> None:
    """Encode the chunks that are asked for until the other end closes."""
    one_thread()
    current, base = _map(folder, "current", "r"), _map(folder, "base", "r")
    arena = _map(folder, f"arena{which}", "r+")
    while (chunks := channel.recv()) is not None:
        started = time.process_time()
        for start in chunks:
            part = slice(start, start + _CHUNK_NBYTES)
            XorDelta(base=base[part], dtype=dtype).encode_into(current[part], arena)
        channel.send(time.process_time() - started)


@contextmanager
def _encoders(folder: Path, dtype: str, count: int) -> Iterator[list[Connection]]:
    context = multiprocessing.get_context("spawn")
    channels, processes = [], []
    try:
        for which in range(count):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, folder, dtype, which), daemon=True)
            process.start()
            theirs.close()
            channels.append(ours)
            processes.append(process)
        yield channels
        for channel in channels:
            channel.send(None)
        for process in processes:
            process.join(10)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _seconds(channels: Sequence[Connection], chunks: Sequence[int]) -> tuple[float, float]:
    """Encode all chunks; return wall time, and CPU time of all processes together."""
    started = time.perf_counter()
    for number, channel in enumerate(channels):
        channel.send(chunks[number :: len(channels)])
    spent = sum(channel.recv() for channel in channels)
    return time.perf_counter() - started, spent


def measure(runs: Sequence[Checkpoints]) -> Scaling | None:
    """Measure the first case of held-out weights that the runs have, else any weights; None without."""
    cases = [(case, run) for run in runs for case in codec_cases.of_run(run) if case.kind is Kind.WEIGHTS]
    if not cases:
        return None
    case, run = min(cases, key=lambda found: (found[0].is_tuned, found[0].interval != 10))
    pair = codec_cases.load(case, run)
    shared = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shared if shared.is_dir() else None) as name:
        folder = Path(name)
        pair.current.tofile(folder / "current")
        pair.base.tofile(folder / "base")
        for which in range(2):
            np.zeros(max_encoded_nbytes(_CHUNK_NBYTES), np.uint8).tofile(folder / f"arena{which}")
        chunks = list(range(0, pair.current.nbytes, _CHUNK_NBYTES))
        with _encoders(folder, case.dtype, 2) as channels:
            _seconds(channels, chunks * 2)
            times = [(_seconds(channels[:1], chunks), _seconds(channels, chunks)) for _ in range(_ROUNDS)]
    walls = [(alone[0], both[0]) for alone, both in times]
    gains = [alone / both for alone, both in walls]
    one, two = (pair.current.nbytes / median(column) for column in zip(*walls, strict=True))
    cpu_gain = median(2 * alone[1] / both[1] for alone, both in times)
    return Scaling(case, one, two, Spread(median(gains), min(gains), max(gains)), cpu_gain)
