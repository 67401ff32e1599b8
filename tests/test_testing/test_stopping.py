"""A process that is stopped in a transaction would lock everybody out: `stop_process` never does that."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fastcheck_dask.testing.stopping import stop_process

BUSY_WRITER = """
import sqlite3, sys, threading
pause = threading.Event()
def write():
    while not pause.wait(0.01):
        connection = sqlite3.connect(sys.argv[1], timeout=60, isolation_level=None)
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("UPDATE numbers SET value = value + 1")
        connection.execute("COMMIT")
        connection.close()
threads = [threading.Thread(target=write, daemon=True) for _ in range(2)]
for thread in threads:
    thread.start()
print("writes", flush=True)
threads[0].join()
"""


def state_of(pid: int) -> set[str]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return {(task / "stat").read_text().rpartition(")")[2].split()[0] for task in tasks}


@pytest.fixture
def database(tmp_path: Path) -> Path:
    path = tmp_path / "numbers.db"
    with contextlib.closing(sqlite3.connect(path)) as connection:
        connection.execute("PRAGMA journal_mode=WAL")
        connection.execute("CREATE TABLE numbers (value INTEGER)")
        connection.execute("INSERT INTO numbers VALUES (0)")
        connection.commit()
    return path


@pytest.fixture
def writer(database: Path) -> Iterator[int]:
    child = subprocess.Popen([sys.executable, "-c", BUSY_WRITER, str(database)], stdout=subprocess.PIPE)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == b"writes\n"
        yield child.pid
    finally:
        child.kill()
        child.communicate()


def value(database: Path) -> int:
    """Return the number, as one who may write sees it; `sqlite3.OperationalError` if the file is locked."""
    with contextlib.closing(sqlite3.connect(database, timeout=0.5, isolation_level=None)) as connection:
        connection.execute("BEGIN IMMEDIATE")
        (found,) = connection.execute("SELECT value FROM numbers").fetchone()
        connection.execute("ROLLBACK")
        return int(found)


def test_stopped_writer_locks_nobody_out(database: Path, writer: int) -> None:
    before = -1
    for _ in range(10):
        stop_process(writer, database)
        assert state_of(writer) == {"T"}
        found = value(database)
        assert found == value(database) >= before
        before = found
        os.kill(writer, signal.SIGCONT)


def test_process_without_a_file_is_just_stopped(writer: int) -> None:
    stop_process(writer)
    assert state_of(writer) == {"T"}


def test_process_that_is_gone_is_an_error(writer: int) -> None:
    os.kill(writer, signal.SIGKILL)
    os.waitpid(writer, 0)
    with pytest.raises(ProcessLookupError):
        stop_process(writer)
