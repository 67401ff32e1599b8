"""Stop another process (SIGSTOP) where it surely holds nothing that everybody else needs."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import threading
from pathlib import Path

_POLL_SECONDS = 0.002
#: Of a stopped, a traced, a dead thread and one that nobody waited for: none of them runs on.
_STANDS = frozenset("tTXZ")


def stop_process(pid: int, database: Path | None = None) -> None:
    """Stop a process, but not within a transaction, which would lock a SQLite file for everybody.

    Parameters
    ----------
    pid : int
        Of the process; SIGCONT lets it go on.
    database : Path, optional
        The file that it must not have locked.
    """
    while True:
        os.kill(pid, signal.SIGSTOP)
        _wait_until_all_threads_stand(pid)
        if database is None or _can_write(database):
            return
        os.kill(pid, signal.SIGCONT)


def _wait_until_all_threads_stand(pid: int) -> None:
    """Wait for the threads that are within a call of the system: they may come by a lock at its end."""
    pause = threading.Event()
    while not all(state in _STANDS for state in _states(pid)):
        pause.wait(_POLL_SECONDS)


def _states(pid: int) -> list[str]:
    found = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with contextlib.suppress(OSError):
            # What follows the name, which may have spaces and brackets.
            found.append((task / "stat").read_text().rpartition(")")[2].split()[0])
    return found


def _can_write(database: Path) -> bool:
    with contextlib.closing(sqlite3.connect(database, timeout=0.1, isolation_level=None)) as connection:
        try:
            connection.execute("BEGIN IMMEDIATE")
        except sqlite3.OperationalError:
            return False
        connection.execute("ROLLBACK")
        return True
