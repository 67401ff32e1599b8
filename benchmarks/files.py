"""Are plain files as fast as those of torch, and is compression faster where the store is slow?

First: ``compression="never"`` without storage nodes, a folder on the disk and one in memory (where fsync is
free), beside torch.save, torch.save with fsync of file and folder, and torch.distributed.checkpoint, each
under a new name while the one before is removed, and after a sync; then the loads, from a warm cache.
FastCheck's figures are those of the whole way, ``save_async(...).wait("object")`` and ``load()``; its files
are durable when it says so, as those of torch.distributed.checkpoint are, and torch.save's are not unless
that is said. Second: the same state through a store that passes a number of bytes in a second, with one
encoder process that is as nice as torch.

Quotients are those of the same round, of which the median is given: what else the machine does changes from
round to round, and slows what stands side by side in one round about alike. Memory is got, and encoders are
started, in a round before those that count.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from benchmarks.machine import spread, table
from benchmarks.training import Training, nbytes
from fastcheck_dask import FastCheckManager
from fastcheck_dask.agent.encoder_pool import EncoderPool
from fastcheck_dask.engine.compression import CompressionPolicy
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.recover import Into, Recovery
from fastcheck_dask.engine.save_objects import save_to_objects
from fastcheck_dask.engine.snapshot import parse
from fastcheck_dask.layout.state import flatten
from fastcheck_dask.manager.snapshots import take_snapshot
from fastcheck_dask.testing.slow_store import SlowStore, Throttle
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store

WIDTH = 3400
ROUNDS = 8
SLOW_ROUNDS = 3
RATES = (200e6, 50e6)
#: Most stored bytes for each raw one, of fp32 weights and Adam moments.
LARGEST_SHARE = 0.85

#: In the order of the columns.
SAVES = ("torch.save", "torch.save + fsync", "DCP save", "FastCheck")
LOADS = ("torch.load", "load()", "DCP load", "load(into=)")

Times = dict[str, list[float]]


def _timed(times: Times, name: str, call: Callable[[], Any]) -> None:
    # What others have written and not stored yet must not be stored at this one's expense.
    os.sync()
    started = time.perf_counter()
    call()
    times.setdefault(name, []).append(time.perf_counter() - started)


def _quotient(times: Times, name: str, other: str) -> str:
    """Return how many times as long as another one took something, and the range."""
    found = [mine / theirs for mine, theirs in zip(times[name], times[other], strict=True)]
    return f"{statistics.median(found):.2f} [{min(found):.2f}..{max(found):.2f}]"


def _fsync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _zeros_like(tree: Any) -> Any:
    """Return a state of the same tensors with other contents."""
    if isinstance(tree, torch.Tensor):
        return torch.zeros_like(tree)
    if isinstance(tree, dict):
        return {key: _zeros_like(value) for key, value in tree.items()}
    return [_zeros_like(value) for value in tree] if isinstance(tree, list) else tree


def _in_turn(times: Times, number: int, calls: dict[str, Callable[[], Any]]) -> None:
    """Time each; another one is first in each round: what it frees, or has written, matters to the next."""
    names = list(calls)
    for name in names[number % len(names) :] + names[: number % len(names)]:
        _timed(times, name, calls[name])


def _save_rounds(folder: Path, manager: FastCheckManager, training: Training) -> Times:
    """Save in turn with each; one checkpoint of each is left."""
    times: Times = {name: [] for name in SAVES}
    for number in range(ROUNDS + 2):
        training.steps(1)
        state, into = training.state(), times if number >= 2 else {}
        new, old = folder / f"{number}", folder / f"{number - 1}"
        shutil.rmtree(old, ignore_errors=True)
        new.mkdir()

        def durable(state: Any = state, new: Path = new) -> None:
            torch.save(state, new / "fsynced.pt")
            _fsync(new / "fsynced.pt")
            _fsync(new)

        calls: tuple[Callable[[], Any], ...] = (
            partial(torch.save, state, new / "plain.pt"),
            durable,
            partial(dcp.save, state, checkpoint_id=new / "dcp", no_dist=True),
            lambda state=state, number=number: manager.save_async(state, f"step{number}").wait("object"),
        )
        _in_turn(into, number, dict(zip(SAVES, calls, strict=True)))
        markers = manager._folder.committed()
        for marker in markers[:-1]:
            manager._folder.remove(marker.directory)
    return times


def _load_rounds(folder: Path, manager: FastCheckManager, state: Any) -> Times:
    times: Times = {name: [] for name in LOADS}
    files = folder / f"{ROUNDS + 1}"
    for number in range(ROUNDS + 1):
        target = _zeros_like(state)
        calls: tuple[Callable[[], Any], ...] = (
            partial(torch.load, files / "plain.pt", weights_only=True),
            manager.load,
            partial(dcp.load, target, checkpoint_id=files / "dcp", no_dist=True),
            partial(manager.load, into=target),
        )
        _in_turn(times if number else {}, number, dict(zip(LOADS, calls, strict=True)))
        assert torch.equal(target["model"]["0.weight"], state["model"]["0.weight"])
    return times


def plain(root: str | None, training: Training) -> tuple[list[str], list[str]]:
    """Return one row of each table of plain files: saves and loads."""
    with tempfile.TemporaryDirectory(dir=root) as name, tempfile.TemporaryDirectory(dir="/dev/shm") as local:
        options: dict[str, Any] = {"compression": "never", "local_dir": local}
        folder = Path(name)
        with FastCheckManager(folder / "ckpts", **options) as manager:
            saves = _save_rounds(folder, manager, training)
        with FastCheckManager(folder / "ckpts", **options) as manager:
            loads = _load_rounds(folder, manager, training.state())
    where = "disk" if root is None else "memory"
    return [
        where,
        *(spread(v, "ms", 1e3) for v in saves.values()),
        *(_quotient(saves, "FastCheck", other) for other in SAVES[:-1]),
    ], [
        where,
        *(spread(v, "ms", 1e3) for v in loads.values()),
        _quotient(loads, "load()", "torch.load"),
        _quotient(loads, "load(into=)", "DCP load"),
    ]


class _ThrottledFile:
    """A file whose bytes pass a throttle, for torch."""

    def __init__(self, path: Path, mode: str, throttle: Throttle) -> None:
        self._file, self._throttle = open(path, mode), throttle  # noqa: SIM115

    def write(self, data: Any) -> int:
        self._throttle.take(memoryview(data).nbytes)
        return self._file.write(data)

    def read(self, size: int = -1) -> bytes:
        data: bytes = self._file.read(size)
        self._throttle.take(len(data))
        return data

    def readinto(self, buffer: Any) -> int:
        count: int = self._file.readinto(buffer)  # type: ignore[attr-defined]
        self._throttle.take(count)
        return count

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)


async def slow(rate: float, training: Training) -> list[str]:
    """Return one row of the table of slow stores."""
    times: Times = {}
    state = training.state()
    pool = EncoderPool(1, nice=0)
    await pool.start()
    with (
        tempfile.TemporaryDirectory(dir="/dev/shm") as name,
        tempfile.TemporaryDirectory(dir="/dev/shm") as local,
        contextlib.closing(LocalTier("run", Path(local))) as tier,
    ):
        throttle = Throttle(rate)
        folder = CheckpointFolder(SlowStore(open_store(f"{name}/ckpts"), throttle))
        persister = Persister(name, folder, pool, None, None)  # type: ignore[arg-type]
        policy = CompressionPolicy("auto", 1)
        recovery = Recovery(LocalTier("none", Path(local) / "none"), folder, None)  # type: ignore[arg-type]
        file = Path(name) / "torch.pt"
        for number in range(SLOW_ROUNDS + 1):
            into = times if number else {}
            with contextlib.closing(_ThrottledFile(file, "wb", throttle)) as out:
                _timed(into, "torch.save", lambda: torch.save(state, out))
            slot = tier.slots[0]
            started = time.perf_counter()
            take_snapshot(slot, flatten(state), f"step{number}")
            snapshot = parse(slot.path, slot.read_draft())
            saved = await save_to_objects(
                "run",
                snapshot,
                generation=number + 1,
                persister=persister,
                compression=policy,
                seal=slot.seal,
                degraded=None,
            )
            into.setdefault("FastCheck", []).append(time.perf_counter() - started)
            share = saved.stats.sent_bytes / saved.stats.raw_bytes
            assert share <= LARGEST_SHARE, share
            slot.clear()
            with contextlib.closing(_ThrottledFile(file, "rb", throttle)) as source:
                _timed(into, "torch.load", lambda: torch.load(source, weights_only=True))
            target = _zeros_like(state)
            started = time.perf_counter()
            await recovery.load((), into=Into(target))
            into.setdefault("FastCheck into", []).append(time.perf_counter() - started)
            assert torch.equal(target["model"]["0.weight"], state["model"]["0.weight"])
            for marker in folder.committed()[:-1]:
                folder.remove(marker.directory)
    await pool.close()
    return [
        f"{rate / 1e6:.0f} MB/s",
        f"{share:.2f}",
        *(spread(v, "s") for v in times.values()),
        _quotient(times, "FastCheck", "torch.save"),
        _quotient(times, "FastCheck into", "torch.load"),
    ]


def main() -> None:
    """Print the tables."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    # That checkpoints were removed is not news here.
    logging.getLogger("fastcheck_dask").setLevel(logging.ERROR)
    training = Training(WIDTH)
    training.steps(3)
    size = f"{nbytes(training.state()) / 1e6:.0f} MB, fp32 weights and Adam moments"
    rows = [plain(root, training) for root in (None, "/dev/shm")]
    table(
        f"Saves without compression; {size}",
        [
            "folder on",
            "torch.save",
            "torch.save + fsync",
            "DCP save",
            "FastCheck",
            "/ save",
            "/ fsync",
            "/ DCP",
        ],
        [saves for saves, _ in rows],
    )
    table(
        "Loads, warm cache",
        ["folder on", *LOADS, "load() / torch", "into / DCP"],
        [loads for _, loads in rows],
    )
    table(
        'Through a slow store, compression="auto"',
        [
            "store",
            "bytes",
            "torch.save",
            "FastCheck",
            "torch.load",
            "load(into=)",
            "save / torch",
            "into / torch",
        ],
        [asyncio.run(slow(rate, training)) for rate in RATES],
    )


if __name__ == "__main__":
    main()
