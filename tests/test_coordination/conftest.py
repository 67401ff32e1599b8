"""Coordinators under test, records for them, and processes that use them."""

from __future__ import annotations

import contextlib
import json
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kazoo.client import KazooClient

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination import CommitRecord, Coordinator, NodeInfo, connect
from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.errors import CoordinationError
from fastcheck_dask.ids import new_token
from fastcheck_dask.testing.fakes import FakeCoordinator
from fastcheck_dask.testing.stopping import stop_process

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

    def pause(self, coordinator: Coordinator) -> None:
        """Stop it, but not within a transaction, which would lock a file for the coordinator, too."""
        while True:
            stop_process(self.process.pid)
            try:
                coordinator.entries.apply(Create(f"paused/n{new_token()}", b""))
            except CoordinationError:
                self.resume()
            else:
                return

    def resume(self) -> None:
        self.process.send_signal(signal.SIGCONT)

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

        def start(url: str, **settings: Any) -> Coordinator:
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


@pytest.fixture
def expire() -> Callable[[Any], None]:
    """End the session of a coordinator, as others do with one that was silent for too long."""

    def end(coordinator: Any) -> None:
        if isinstance(coordinator, EmbeddedCoordinator):
            name = coordinator.entries.session
            with contextlib.closing(sqlite3.connect(coordinator.path)) as connection, connection:
                connection.execute("UPDATE sessions SET beat = beat - seconds - 1 WHERE session = ?", (name,))
        elif isinstance(coordinator, FakeCoordinator):
            coordinator.entries.expire()
        else:
            # Somebody who knows its password takes it over and closes it.
            session = coordinator._session
            thief = KazooClient(session.hosts, client_id=session._client.client_id, timeout=2.0)
            thief.start()
            thief.stop()
            thief.close()

    return end


@pytest.fixture(params=["embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Return the URL of each kind of coordinator in turn."""
    if request.param == "zookeeper":
        return str(request.getfixturevalue("zookeeper_url"))
    return f"sqlite://{tmp_path}/coordinator/c.db"


@pytest.fixture
def coordinator(url: str, open_coordinator: Callable[..., Coordinator]) -> Coordinator:
    return open_coordinator(url)


@pytest.fixture
def other(url: str, open_coordinator: Callable[..., Coordinator]) -> Coordinator:
    """Return another session with the same coordinator."""
    return open_coordinator(url)


@pytest.fixture(params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def kind(request: pytest.FixtureRequest) -> str:
    """Return each kind of entries in turn."""
    return str(request.param)


@pytest.fixture
def entries_url(kind: str, request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if kind == "zookeeper":
        return str(request.getfixturevalue("zookeeper_url"))
    return f"sqlite://{tmp_path}/c.db" if kind == "embedded" else "memory"


@pytest.fixture
def opened(entries_url: str, open_coordinator: Callable[..., Coordinator]) -> Callable[[], Any]:
    """Open one session after another with the same coordinator."""
    first = FakeCoordinator() if entries_url == "memory" else None

    def start() -> Any:
        return first.another() if first else open_coordinator(entries_url)

    return start


@pytest.fixture
def holder(opened: Callable[[], Any]) -> Any:
    """Return the coordinator that `entries` are of."""
    return opened()


@pytest.fixture
def entries(holder: Any) -> Any:
    return holder.entries


@pytest.fixture
def others(opened: Callable[[], Any]) -> Any:
    """Return the entries as another session sees them."""
    return opened().entries
