from __future__ import annotations

import contextlib
import sqlite3
import subprocess
import sys
import time

import pytest

from fastcheck_dask.coordination.embedded import EmbeddedCoordinator
from fastcheck_dask.coordination.entries import Create
from fastcheck_dask.errors import ConfigError, CoordinationError, SessionLostError


@pytest.fixture
def path(tmp_path):
    return tmp_path / "c.db"


@pytest.fixture
def coordinator(path):
    with contextlib.closing(EmbeddedCoordinator(path, timeout_seconds=5.0)) as made:
        yield made


def execute(path, *statements):
    with contextlib.closing(sqlite3.connect(path)) as connection, connection:
        for statement in statements:
            connection.execute(statement)


@pytest.mark.parametrize("size", [2, 100, 5000])
def test_open_file_that_is_no_database_is_refused_and_kept(path, size):
    path.write_bytes(b"x" * size)
    with pytest.raises(ConfigError, match=r"c\.db"):
        EmbeddedCoordinator(path)
    assert path.read_bytes() == b"x" * size


def test_open_database_of_another_program_is_refused_and_kept(path):
    execute(path, "CREATE TABLE nodes (x)", "INSERT INTO nodes VALUES (7)")
    before = path.read_bytes()
    with pytest.raises(ConfigError, match=r"c\.db is another program's"):
        EmbeddedCoordinator(path)
    assert path.read_bytes() == before


@pytest.mark.parametrize("version", [1, 3])
def test_open_other_schema_is_refused(path, coordinator, version):
    execute(path, f"PRAGMA user_version={version}")
    with pytest.raises(ConfigError, match=rf"c\.db has schema version {version}"):
        EmbeddedCoordinator(path)
    with pytest.raises(CoordinationError, match=r"c\.db"):
        coordinator.nodes()
    execute(path, "PRAGMA user_version=2")


@pytest.mark.parametrize("below", ["file/c.db", "folder"])
def test_open_place_that_cannot_be_written_is_refused(tmp_path, below):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(ConfigError, match=below):
        EmbeddedCoordinator(tmp_path / below)


def test_call_file_deleted_meanwhile_fails(path, coordinator, node, record):
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "a")
    path.rename(path.with_name("elsewhere"))
    for call in (
        coordinator.nodes,
        lambda: coordinator.latest("run-1"),
        lambda: coordinator.commit(record(), claim),
    ):
        with pytest.raises(CoordinationError, match=r"c\.db"):
            call()
    assert not path.exists()
    EmbeddedCoordinator(path).close()
    with pytest.raises(SessionLostError):
        registration.update(node("a"))


def test_call_file_damaged_meanwhile_fails(path, coordinator, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    execute(path, "PRAGMA wal_checkpoint(TRUNCATE)")
    whole = path.read_bytes()
    path.write_bytes(whole[:100] + b"\x5a" * (len(whole) - 100))
    with pytest.raises(CoordinationError, match=r"c\.db"):
        coordinator.latest("run-1")
    path.write_bytes(whole)


def test_call_file_locked_by_another_process_fails_within_timeout(path, node):
    with contextlib.closing(EmbeddedCoordinator(path, timeout_seconds=0.3)) as coordinator:
        with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as stranger:
            stranger.execute("BEGIN IMMEDIATE")
            begin = time.monotonic()
            with pytest.raises(CoordinationError, match=r"c\.db was still locked"):
                coordinator.register(node("a"))
            assert time.monotonic() - begin < 8.0
            # Readers do not wait for writers.
            assert coordinator.nodes() == ()
            stranger.execute("ROLLBACK")
        coordinator.register(node("a"))


@pytest.fixture
def other(path):
    with contextlib.closing(EmbeddedCoordinator(path, timeout_seconds=5.0)) as made:
        yield made


@pytest.mark.parametrize(
    "column",
    ["boot = 'earlier'", "started = started + 1", "pid = 4194305", "session = 'x'", "beat = beat - 10.1"],
)
def test_rows_of_dead_processes_are_ignored_and_overwritten(path, coordinator, other, node, column):
    coordinator.register(node("a"))
    coordinator.entries.apply(Create("live/a", b"", ephemeral=True))
    first = coordinator.claim("run-1", "a")
    execute(path, f"UPDATE sessions SET {column}")
    assert other.nodes() == ()
    assert other.entries.get("live/a") is None
    assert other.entries.names("live") == ()
    other.register(node("a", rack="new"))
    assert other.nodes() == (node("a", rack="new"),)
    assert other.claim("run-1", "b").fencing_token == first.fencing_token + 1
    other.entries.apply(Create("live/a", b""))


def test_commit_transaction_that_fails_leaves_nothing(path, coordinator, record, monkeypatch):
    claim = coordinator.claim("run-1", "a")
    execute(path, "CREATE TRIGGER stop AFTER INSERT ON commits BEGIN SELECT RAISE(FAIL, 'no room'); END")
    with pytest.raises(CoordinationError, match="no room"):
        coordinator.commit(record(), claim)
    execute(path, "DROP TRIGGER stop")
    assert coordinator.commits("run-1") == ()


def test_open_many_processes_at_once_all_succeed(path):
    program = (
        "import sys; from fastcheck_dask.coordination.embedded import EmbeddedCoordinator as E\n"
        "input()\n"
        "for _ in range(20):\n"
        "    c = E(sys.argv[1]); c.nodes(); c.claim(sys.argv[2], 'me'); c.close()\n"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", program, path, f"run-{number}"], stdin=subprocess.PIPE)
        for number in range(4)
    ]
    try:
        for process in processes:
            process.stdin.write(b"\n")
            process.stdin.flush()
        assert [process.wait(60) for process in processes] == [0] * 4
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def test_claim_of_a_file_made_anew_has_a_higher_order(tmp_path):
    orders = []
    for _ in range(2):
        coordinator = EmbeddedCoordinator(tmp_path / "coord.db")
        orders.append(coordinator.claim("run-1", "a").order)
        coordinator.close()
        for file in tmp_path.glob("coord.db*"):
            file.unlink()
    assert orders[1] > orders[0]


def test_health_file_gone_says_so_and_is_connected_when_it_is_back(tmp_path):
    coordinator = EmbeddedCoordinator(tmp_path / "c.db")
    (tmp_path / "c.db").rename(tmp_path / "moved.db")
    lost = coordinator.health()
    assert (lost.state, lost.why) == ("lost", f"{tmp_path}/c.db is gone, or not ours to write")
    assert coordinator.health() == lost
    (tmp_path / "moved.db").rename(tmp_path / "c.db")
    assert coordinator.health().state == "connected"
    coordinator.close()


def test_registration_lost_is_restored_and_an_intact_one_writes_nothing(coordinator, node):
    registration = coordinator.register(node("a"))
    registration.update(node("a", state="draining"))
    with contextlib.closing(sqlite3.connect(coordinator.path)) as connection:
        version = connection.execute("PRAGMA data_version").fetchone()
        registration.restore()
        assert connection.execute("PRAGMA data_version").fetchone() == version
        connection.execute("DELETE FROM nodes")
        connection.commit()
    assert coordinator.nodes() == ()
    registration.restore()
    assert coordinator.nodes() == (node("a", state="draining"),)
    registration.close()
    registration.restore()
    assert coordinator.nodes() == ()
