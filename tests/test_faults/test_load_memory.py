"""What memory a load takes at its height: the state's, and a window."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.ids import run_id_for
from fastcheck_dask.testing.cluster import StorageCluster

PROCESS = Path(__file__).with_name("loading_process.py")
STATE_BYTES = 300 * 2**20
#: Some messages on their way, and what is rebuilt from parity at a time. About 120 MiB, more if all of it
#: meets on a busy machine, and less than a shard and its parity.
WINDOW_BYTES = 200 * 2**20


class Loader:
    """A process that loads when it is told to."""

    def __init__(self, *arguments: object) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(PROCESS), *map(str, arguments)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def wait_ready(self) -> None:
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == "ready\n"

    def go(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write("\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        found: dict[str, Any] = json.loads(self.process.stdout.readline())
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Loader]]:
    """Return a function that starts processes, which are killed after the test."""
    with contextlib.ExitStack() as stack:

        def start(into: str, *, nbytes: int, local: str = "nothing", coordinator: str = "") -> Loader:
            loader = Loader(into, tmp_path / "ckpts", tmp_path / local, nbytes, coordinator)
            stack.callback(loader.close)
            return loader

        yield start


def state_of(nbytes: int) -> dict[str, Any]:
    return {f"w{n}": np.arange(nbytes // 5 // 4, dtype=np.int32) * (2 * n + 1) for n in range(5)}


@pytest.mark.slow
def test_load_into_a_state_takes_a_window_besides_from_every_tier(tmp_path, start):
    with StorageCluster(tmp_path / "nodes", 3) as cluster:
        options: dict[str, Any] = {"coordinator": cluster.coordinator, "compression": "never"}
        manager = FastCheckManager(tmp_path / "ckpts", local_dir=tmp_path / "local", num_shards=2, **options)
        with contextlib.closing(manager):
            manager.save_async(state_of(STATE_BYTES), "t1").wait("object")
            manager.close(keep_local=True)
        with contextlib.closing(connect(cluster.coordinator)) as connection:
            nodes = connection.commits(run_id_for(str(tmp_path / "ckpts")))[-1].nodes
        loader = start("into", nbytes=STATE_BYTES, local="local", coordinator=cluster.coordinator)
        loader.wait_ready()

        def load_from(source: str) -> None:
            loader.go()
            found = loader.result()
            assert found["good"]
            assert source in found["source"]
            assert found["taken"] < WINDOW_BYTES, source

        load_from("local")
        for file in (tmp_path / "local").rglob("slot*"):
            file.unlink()
        load_from("peers")
        # The first two have the data, the third one their parity.
        first, *others = nodes
        cluster.kill(first)
        load_from("parity")
        for name in others:
            cluster.kill(name)
        load_from("object")


@pytest.mark.slow
def test_four_processes_that_load_at_once_take_a_state_each_and_a_window(tmp_path, start):
    nbytes = STATE_BYTES // 2
    with FastCheckManager(tmp_path / "ckpts", local_dir=tmp_path / "local", compression="never") as manager:
        manager.save_async(state_of(nbytes), "t1").wait("object")
    ways = ["into", "into", "fresh", "fresh"]
    loaders = [start(into, nbytes=nbytes) for into in ways]
    for loader in loaders:
        loader.wait_ready()
    for loader in loaders:
        loader.go()
    for into, loader in zip(ways, loaders, strict=True):
        found = loader.result()
        assert found["good"]
        assert found["source"] == "object"
        assert found["taken"] < nbytes // 2 + (nbytes if into == "fresh" else 0)
        # Its own: a process that is forked must not see what becomes of the state.
        assert into == "into" or found["taken"] > nbytes // 2
