"""Storage nodes as processes, with a real scheduler: what survives what."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import queue
import signal
import sqlite3
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import dask
import pytest
from distributed import Client
from fastcheck_codecs import PrefixIndex

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.lives import read_lives
from fastcheck_dask.coordination.zookeeper.server import free_ports
from fastcheck_dask.errors import CoordinationError, NodeUnavailableError
from fastcheck_dask.manager.scheduler import coordinator_of
from fastcheck_dask.node import process as node_process
from fastcheck_dask.node.process import storage
from fastcheck_dask.tiers.peer import PeerClient
from fastcheck_dask.tiers.wire_tls import DataTls

_SECONDS = 60.0
_NODE = """
import json, sys
from fastcheck_dask.node.process import storage
sys.exit(storage(**json.loads(sys.argv[1])))
"""


class Process:
    """A child process whose output is read as it comes, and which does not outlive the test."""

    def __init__(self, *arguments: str, cwd: Path) -> None:
        self.lines: queue.Queue[str | None] = queue.Queue()
        self.seen: list[str] = []
        self.child = subprocess.Popen(
            [sys.executable, *arguments],
            cwd=cwd,
            env={**os.environ, "TMPDIR": str(cwd), "DASK_TEMPORARY_DIRECTORY": str(cwd)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.child.stdout is not None
        for line in self.child.stdout:
            self.lines.put(line)
        self.lines.put(None)

    def wait_for(self, text: str) -> str:
        """Return the next line that contains `text`."""
        deadline = Deadline.after(_SECONDS)
        while not deadline.passed:
            line = self.lines.get(timeout=deadline.left())
            assert line is not None, f"ended before {text!r}: {self.seen}"
            self.seen.append(line)
            if text in line:
                return line
        raise AssertionError(f"no {text!r} in {self.seen}")

    def output(self) -> str:
        self.child.wait(_SECONDS)
        self._reader.join(_SECONDS)
        while (line := self.lines.get(timeout=1)) is not None:
            self.seen.append(line)
        return "".join(self.seen)

    def close(self) -> None:
        if self.child.poll() is None:
            self.child.send_signal(signal.SIGCONT)
            self.child.kill()
        self.child.wait(_SECONDS)
        self._reader.join(_SECONDS)
        assert self.child.stdout is not None
        self.child.stdout.close()


class Node(Process):
    """A storage node."""

    def __init__(self, tmp_path: Path, **options: Any) -> None:
        settings = {
            "scheduler": None,
            "coordinator": f"sqlite:///{tmp_path}/coordinator.db",
            "memory_bytes": 64 * 2**20,
            "name": "node-1",
            "rack": "r1",
            **options,
        }
        super().__init__("-c", _NODE, json.dumps(settings), cwd=tmp_path)

    def address(self) -> str:
        return self.wait_for("data fcs").split()[-1]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Any]]:
    processes: list[Process] = []

    def start(kind: type[Process], *arguments: Any, **options: Any) -> Process:
        processes.append(kind(*arguments, **options))
        return processes[-1]

    yield start
    for process in processes:
        process.close()


@pytest.fixture
def start_node(start: Any, tmp_path: Path) -> Callable[..., Node]:
    return lambda **options: start(Node, tmp_path, **options)


@pytest.fixture
def start_scheduler(start: Any, tmp_path: Path) -> Callable[[int], Process]:
    def start_scheduler(port: int) -> Process:
        arguments = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--no-dashboard"]
        process: Process = start(Process, *arguments, "--port", str(port), cwd=tmp_path)
        process.wait_for("Scheduler at:")
        return process

    return start_scheduler


def with_client(address: str, use: Any, **options: Any) -> Any:
    async def main() -> Any:
        client = PeerClient("node-1", address, **{"grace_seconds": 20.0, **options})
        try:
            return await use(client)
        finally:
            await client.close()

    return asyncio.run(main())


def save(address: str, generation: int, chunks: list[Any], base: Any = None) -> str:
    token = f"token-{generation}"

    async def use(client: PeerClient) -> None:
        await client.begin(
            "run", generation, token, shard=0, base=base, keys=[d.key for d, _ in chunks], reserve_bytes=0
        )
        await client.put("run", token, chunks=[d for d, _ in chunks], frames=[p for _, p in chunks])
        digest = hashlib.sha256(b"{}").hexdigest()
        await client.prepare("run", token, digest=digest, manifest=b"{}")
        await client.commit("run", generation, token)

    with_client(address, use)
    return token


def read(address: str, generation: int, chunks: Any) -> bytes:
    async def use(client: PeerClient) -> bytes:
        got = await client.read("run", generation, f"token-{generation}", keys=["a"])
        assert got.missing == []
        decoded: bytes = PrefixIndex(dtype="float32").decode(got.chunks[0][1]).tobytes()
        return decoded

    return bytes(with_client(address, use))


def pending(address: str) -> int:
    return int(with_client(address, PeerClient.ping)["pending"])


def until(condition: Callable[[], Any]) -> Any:
    """Ask until it is so; each question waits for another process anyway."""
    deadline, tick = Deadline.after(_SECONDS), threading.Event()
    while not (found := condition()):
        assert not deadline.passed
        tick.wait(0.05)
    return found


def worker_of(client: Client) -> dict[str, Any] | None:
    """Return what the scheduler knows of the node's worker, once its metrics have come."""
    for worker in client.scheduler_info(n_workers=-1)["workers"].values():
        if worker["name"] == "node-1" and "fastcheck" in worker["metrics"]:
            found: dict[str, Any] = worker
            return found
    return None


def test_node_without_scheduler_serves_registers_and_merges(
    start_node: Any, tmp_path: Path, chunks: Any
) -> None:
    node = start_node(scheduler=f"tcp://127.0.0.1:{free_ports(1)[0]}")
    address = node.address()
    coordinator = connect(f"sqlite:///{tmp_path}/coordinator.db")
    assert coordinator.nodes() == (NodeInfo("node-1", address, "r1", "127.0.0.1", 64 * 2**20),)
    first, second = chunks.bits(1), chunks.nudged(chunks.bits(1), 1)
    token = save(address, 1, [chunks.whole("a", first)])
    save(address, 2, [chunks.delta("a", second, first)], base=(1, token))
    until(lambda: pending(address) == 0)
    assert read(address, 2, chunks) == second.tobytes()
    node.child.send_signal(signal.SIGTERM)
    assert node.child.wait(20) == 0
    assert coordinator.nodes() == ()
    coordinator.close()
    assert not list(tmp_path.glob("fastcheck-node-*"))


@pytest.mark.slow
def test_scheduler_killed_and_restarted_costs_no_data(
    start_node: Any, start_scheduler: Any, chunks: Any
) -> None:
    (port,) = free_ports(1)
    scheduler = start_scheduler(port)
    node = start_node(scheduler=f"tcp://127.0.0.1:{port}")
    address = node.address()
    state = chunks.bits(1)
    token = save(address, 1, [chunks.whole("a", state)])
    with Client(f"tcp://127.0.0.1:{port}") as client:
        metrics = until(lambda: worker_of(client))["metrics"]["fastcheck"]
        assert metrics["data_addr"] == address
        assert metrics["limit_bytes"] == 64 * 2**20

    scheduler.child.kill()
    scheduler.child.wait(_SECONDS)
    for generation in (2, 3):
        old, state = state, chunks.nudged(state, generation)
        token = save(address, generation, [chunks.delta("a", state, old)], base=(generation - 1, token))
        assert read(address, generation, chunks) == state.tobytes()

    start_scheduler(port)
    with Client(f"tcp://127.0.0.1:{port}") as client:
        worker = until(lambda: worker_of(client))
        assert worker["metrics"]["fastcheck"]["data_addr"] == address
        assert read(address, 3, chunks) == state.tobytes()
        # Stock ways to end a worker do not end the node.
        client.retire_workers(names=["node-1"])
        here = "local_directory"  # each worker has one of its own
        until(lambda: (worker_of(client) or worker)[here] != worker[here])
        assert read(address, 3, chunks) == state.tobytes()
    assert node.child.poll() is None


@pytest.mark.slow
def test_merge_runs_as_a_task_that_the_scheduler_shows(
    start_node: Any, start_scheduler: Any, chunks: Any
) -> None:
    (port,) = free_ports(1)
    start_scheduler(port)
    node = start_node(scheduler=f"tcp://127.0.0.1:{port}")
    address = node.address()
    with Client(f"tcp://127.0.0.1:{port}") as client:
        until(lambda: worker_of(client))

        def prefixes(dask_scheduler: Any) -> list[str]:
            return [name for name in dask_scheduler.task_prefixes if "fastcheck" in name]

        state, token = chunks.bits(1), save(address, 1, [chunks.whole("a", chunks.bits(1))])
        old, state = state, chunks.nudged(state, 2)
        save(address, 2, [chunks.delta("a", state, old)], base=(1, token))
        assert until(lambda: client.run_on_scheduler(prefixes)) == ["fastcheck-merge"]
        until(lambda: pending(address) == 0)
        assert read(address, 2, chunks) == state.tobytes()
        node.child.send_signal(signal.SIGTERM)
        assert node.child.wait(10) == 0
        until(lambda: worker_of(client) is None)


def test_node_serves_its_metrics_without_a_scheduler_and_notes_its_life(
    start_node: Any, tmp_path: Path
) -> None:
    pytest.importorskip("prometheus_client")
    node = start_node(metrics_port=0)
    url = node.wait_for("metrics http").split()[-1]
    node.address()
    with urllib.request.urlopen(url, timeout=20) as reply:
        assert 'fastcheck_node_limit_bytes{node="node-1"} 6.7108864e+07' in reply.read().decode()
    with closing(connect(f"sqlite:///{tmp_path}/coordinator.db")) as coordinator:
        until(lambda: "node-1" in read_lives(coordinator.entries))
        node.child.send_signal(signal.SIGTERM)
        assert node.child.wait(20) == 0
        life, entry = read_lives(coordinator.entries)["node-1"]
        assert life.end is not None
        assert (life.end.cause, life.end.why, entry.version) == ("ended", "SIGTERM", 1)


def test_stopped_node_is_unavailable_in_time(start_node: Any, chunks: Any) -> None:
    node = start_node()
    address = node.address()
    data = bytes(8 * 2**20)
    descriptor, _ = chunks.whole("a", chunks.bits(1))

    async def use(client: PeerClient) -> float:
        await client.ping()
        node.child.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, node.child.pid, os.WSTOPPED)
        loop = asyncio.get_running_loop()
        began = loop.time()
        with pytest.raises(NodeUnavailableError):
            await client.ping()
        with pytest.raises(NodeUnavailableError):
            await client.put("run", "t", chunks=[descriptor], frames=[data])
        elapsed = loop.time() - began
        node.child.send_signal(signal.SIGCONT)
        assert (await client.ping())["name"] == "node-1"
        return elapsed

    elapsed = with_client(address, use, grace_seconds=2.0, connect_seconds=2.0, floor_bytes_per_second=1e7)
    assert elapsed < 20


def test_second_node_of_the_same_name_exits_with_the_reason(start_node: Any) -> None:
    first = start_node()
    first.address()
    second = start_node()
    assert "node-1" in second.output()
    assert second.child.returncode == 1
    assert first.child.poll() is None


def test_node_without_coordinator_exits_with_the_reason(start_node: Any, tmp_path: Path) -> None:
    node = start_node(coordinator="sqlite:///dev/null/none.db")
    output = node.output()
    assert "fastcheck storage node-1:" in output
    assert "Traceback" not in output
    assert node.child.returncode == 1


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"name": "no/name"}, "a storage node must be"),
        ({"rack": ""}, "a rack must be"),
        ({"host": "0.0.0.0"}, "insecure"),
        ({"memory_bytes": 0}, "at least 1 byte"),
        ({"memory_bytes": 2**60}, "1,152,921,504,606,846,976 bytes, and this machine or its container has"),
        ({"ring": -1}, "0 or more older generations, got -1"),
        ({"coordinator": "nonsense"}, "coordinator"),
    ],
)
def test_node_with_wrong_setting_exits_with_the_reason(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, options: dict[str, Any], reason: str
) -> None:
    settings = {"coordinator": f"sqlite:///{tmp_path}/c.db", "memory_bytes": 1, "name": "node-1", **options}
    assert storage(None, settings.pop("coordinator"), **settings) == 1
    assert reason in capfd.readouterr().err


def test_node_takes_the_times_of_the_coordinator_from_the_settings(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: str, *, timeout_seconds: float, session_seconds: float) -> None:
        raise CoordinationError(f"asked for {timeout_seconds:g} and {session_seconds:g} s")

    monkeypatch.setattr(node_process, "connect", refuse)
    with dask.config.set({"fastcheck.coordinator.timeout": "3 s", "fastcheck.coordinator.session": "4 s"}):
        assert storage(None, "sqlite:c.db", memory_bytes=1, name="node-1") == 1
    assert "asked for 3 and 4 s" in capfd.readouterr().err


def test_terminated_node_publishes_that_it_drains_and_leaves(start_node: Any, tmp_path: Path) -> None:
    file = tmp_path / "coordinator.db"
    node = start_node()
    node.address()
    with closing(connect(f"sqlite://{file}")) as coordinator:
        until(lambda: coordinator.entries.get("states/node-1"))
        with closing(sqlite3.connect(file)) as database, database:
            # It goes with the process in a moment: the file itself writes down what is published.
            database.execute("CREATE TABLE published (state BLOB)")
            database.execute(
                "CREATE TRIGGER published AFTER UPDATE ON entries WHEN NEW.path = 'states/node-1' "
                "BEGIN INSERT INTO published VALUES (NEW.value); END"
            )
        node.child.send_signal(signal.SIGTERM)
        assert "Traceback" not in node.output()
        assert node.child.returncode == 0
        with closing(sqlite3.connect(file)) as database:
            found = [json.loads(state)["state"] for (state,) in database.execute("SELECT * FROM published")]
        assert found[-1:] == ["draining"]
        assert coordinator.nodes() == ()
        assert coordinator.entries.names("states") == coordinator.entries.names("candidates") == ()


def test_interrupted_node_exits_cleanly(start_node: Any) -> None:
    node = start_node()
    node.address()
    node.child.send_signal(signal.SIGINT)
    assert "Traceback" not in node.output()
    assert node.child.returncode == 0


# TLS


@pytest.fixture
def tls_config(member: DataTls) -> dict[str, Any]:
    """Return the configuration of a node with TLS of its data port and to its scheduler."""
    files = member.files
    roles = {f"distributed.comm.tls.{role}" for role in ("worker", "client")}
    return {
        "distributed.comm.tls.ca-file": files.ca,
        **{f"{role}.cert": files.cert for role in roles},
        **{f"{role}.key": files.key for role in roles},
        "fastcheck.data.tls-ca": files.ca,
        "fastcheck.data.tls-cert": files.cert,
        "fastcheck.data.tls-key": files.key,
    }


@pytest.fixture
def secure_scheduler(start: Any, tmp_path: Path, member: DataTls) -> str:
    """Return the address of a scheduler with TLS."""
    files = member.files
    options = ["--tls-ca-file", files.ca, "--tls-cert", files.cert, "--tls-key", files.key]
    arguments = ["-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--no-dashboard"]
    process = start(Process, *arguments, "--port", "0", *options, cwd=tmp_path)
    return str(process.wait_for("Scheduler at:").split()[-1])


def test_node_with_tls_registers_with_a_scheduler_with_tls(
    start_node: Any, secure_scheduler: str, tls_config: dict[str, Any]
) -> None:
    node = start_node(scheduler=secure_scheduler, config=tls_config, host="0.0.0.0")
    assert node.address().startswith("fcss://")
    with dask.config.set(tls_config):
        assert coordinator_of(secure_scheduler, 30.0)


@pytest.mark.parametrize("spoken", ["tcp", "tls"])
def test_node_with_the_wrong_scheme_of_its_scheduler_says_which_is_right_once(
    start_node: Any, start_scheduler: Any, secure_scheduler: str, tls_config: dict[str, Any], spoken: str
) -> None:
    if spoken == "tls":
        wrong, right = secure_scheduler.replace("tls://", "tcp://"), secure_scheduler
    else:
        (port,) = free_ports(1)
        start_scheduler(port)
        wrong, right = f"tls://127.0.0.1:{port}", f"tcp://127.0.0.1:{port}"
    node = start_node(scheduler=wrong, config=tls_config)
    node.address()
    assert f"its address is {right}, not " in node.wait_for("has no Dask worker")
    node.child.send_signal(signal.SIGTERM)
    assert node.output().count("has no Dask worker") == 1


def test_node_with_wrong_tls_files_exits_with_the_reason(
    capfd: pytest.CaptureFixture[str], tmp_path: Path, tls_config: dict[str, Any]
) -> None:
    url = f"sqlite:///{tmp_path}/c.db"
    for changed, scheduler, reason in (
        ({"fastcheck.data.tls-key": None}, None, "fastcheck.data.tls-key is not given"),
        ({"fastcheck.data.tls-cert": "/none.pem"}, None, "/none.pem (fastcheck.data.tls-cert) cannot be"),
        ({"distributed.comm.tls.worker.cert": None}, "tls://127.0.0.1:1", "--tls-ca-file"),
        ({}, "tcp://127.0.0.1:1", "the Dask worker would listen on 0.0.0.0 without TLS"),
    ):
        config, host = tls_config | changed, "127.0.0.1" if changed else "0.0.0.0"
        assert storage(scheduler, url, memory_bytes=1, name="node-1", host=host, config=config) == 1
        assert reason in capfd.readouterr().err
