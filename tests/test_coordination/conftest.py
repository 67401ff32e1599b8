"""Coordinators under test, records for them, and processes that use them."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination import CommitRecord, Coordinator, NodeInfo, connect

_ACTOR = Path(__file__).with_name("actor.py")
#: Short, and still long enough for a busy machine.
SESSION_SECONDS = 2.0

RECORD = CommitRecord(
    run="run-1",
    generation=1,
    tag="epoch1",
    token="token-1",
    manifest_digest="ab" * 32,
    nodes=("n0", "n1"),
    addresses=("fcs://h:1", "fcs://h:2"),
    shards=1,
    parity=True,
    raw_bytes=12,
    created_unix=1.5,
)


class Actor:
    """Another process that holds a coordinator and does what it is told, one JSON line after another."""

    def __init__(self, url: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_ACTOR), url, str(SESSION_SECONDS)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def tell(self, *command: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(command) + "\n")
        self.process.stdin.flush()

    def answer(self) -> object:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, "the other process ended"
        return json.loads(line)

    def ask(self, *command: object) -> object:
        self.tell(*command)
        return self.answer()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def close(self) -> None:
        self.kill()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()


@pytest.fixture
def actor_of() -> Iterator[Callable[[str], Actor]]:
    """Start processes, and end them whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(url: str) -> Actor:
            actor = Actor(url)
            stack.callback(actor.close)
            return actor

        yield start


@pytest.fixture
def open_coordinator() -> Iterator[Callable[..., Coordinator]]:
    """Connect, and close whatever happens."""
    with contextlib.ExitStack() as stack:

        def start(url: str, **settings: float) -> Coordinator:
            coordinator = connect(url, **{"session_seconds": SESSION_SECONDS, **settings})
            stack.callback(coordinator.close)
            return coordinator

        yield start


@pytest.fixture
def record() -> Callable[..., CommitRecord]:
    """Make a commit record that differs from the standard one in the fields given."""
    return lambda **fields: replace(RECORD, **fields)


@pytest.fixture
def node() -> Callable[..., NodeInfo]:
    """Make the description of a storage node."""
    return lambda name, **fields: replace(NodeInfo(name, "fcs://h:1", "r1", "h", 1 << 30), **fields)


@pytest.fixture
def eventually() -> Callable[..., None]:
    """Wait until a condition holds, by asking; fail after `seconds`."""

    def wait(condition: Callable[[], bool], seconds: float = 20.0) -> None:
        deadline, pause = Deadline.after(seconds), threading.Event()
        while not condition():
            assert not deadline.passed, f"did not come true within {seconds} s"
            pause.wait(0.02)

    return wait
