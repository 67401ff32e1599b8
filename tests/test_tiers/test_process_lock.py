"""Process locks: real processes, killed and forked."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from fastcheck_dask.errors import TierError
from fastcheck_dask.tiers.process_lock import ProcessLock, process_alive, process_start_time

#: Locks, says so, and holds until it is told to go on or killed.
_HOLD = """
import sys
from pathlib import Path
from fastcheck_dask.tiers.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), "trainer")
print(lock.acquire(), flush=True)
sys.stdin.readline()
lock.release()
print("released", flush=True)
sys.stdin.readline()
"""
_TRY = """
import sys
from pathlib import Path
from fastcheck_dask.tiers.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]))
print(lock.acquire(), lock.holder().pid)
"""
#: Locks, and does not say who it is.
_LOCK_ONLY = """
import fcntl, sys
file = open(sys.argv[1], "r+")
fcntl.lockf(file, fcntl.LOCK_EX)
print("locked", flush=True)
sys.stdin.read()
"""
#: Locks and forks a child, as a DataLoader does; the child lives until standard input closes.
_FORK = """
import os, sys
from pathlib import Path
from fastcheck_dask.tiers.process_lock import ProcessLock
lock = ProcessLock(Path(sys.argv[1]), "trainer")
assert lock.acquire()
child = os.fork()
if child:
    print(child, flush=True)
sys.stdin.read()
"""


def _tried_elsewhere(path: Path) -> tuple[bool, int]:
    command = [sys.executable, "-c", _TRY, str(path)]
    got, pid = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.split()
    return got == "True", int(pid)


class SteppingClock:
    """A clock that goes on by a second each time it is asked."""

    def __init__(self) -> None:
        self.at = 0.0

    def now(self) -> float:
        self.at += 1.0
        return self.at


@pytest.fixture
def path(tmp_path):
    return tmp_path / "lock"


@pytest.fixture
def lock(path):
    lock = ProcessLock(path, "trainer")
    yield lock
    lock.release()


def test_lock_free_is_taken_and_given_back(lock, path):
    assert lock.holder() is None
    assert lock.acquire()
    assert lock.held
    assert ProcessLock(path).holder() == lock.holder()
    lock.release()
    lock.release()
    assert not lock.held
    assert lock.holder() is None
    assert _tried_elsewhere(path)[0]
    assert lock.acquire()


def test_lock_held_here_describes_this_process(lock):
    lock.acquire()
    holder = lock.holder()
    assert (holder.pid, holder.role, holder.host) == (os.getpid(), "trainer", socket.gethostname())
    assert process_alive(holder.pid, holder.start_time)
    assert str(holder).startswith(f"process {os.getpid()} (trainer) on {socket.gethostname()} since 20")


def test_lock_held_in_this_process_refuses_a_second_holder(lock, path, tmp_path):
    assert lock.acquire()
    (tmp_path / "elsewhere").symlink_to(tmp_path)
    os.link(path, tmp_path / "hard_link")
    others = [
        ProcessLock(path),
        ProcessLock(tmp_path / "elsewhere" / "lock"),
        ProcessLock(tmp_path / "hard_link"),
    ]
    for other in [lock, *others]:
        assert not other.acquire()
        assert other.holder().pid == os.getpid()
    for other in others:
        other.release()
    # None of these may have dropped the lock.
    assert lock.held
    assert _tried_elsewhere(path) == (False, os.getpid())


def test_lock_many_threads_at_once_has_one_winner(path):
    locks = [ProcessLock(path) for _ in range(8)]
    barrier = threading.Barrier(len(locks))
    won = []

    def compete(lock: ProcessLock) -> None:
        barrier.wait()
        lock.holder()
        if lock.acquire():
            won.append(lock)
        lock.holder()

    threads = [threading.Thread(target=compete, args=(lock,)) for lock in locks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) == 1
    assert _tried_elsewhere(path) == (False, os.getpid())
    won[0].release()


def test_lock_held_by_another_process_is_refused_and_named(lock, path, running):
    with running(_HOLD, path) as process:
        assert process.stdout.readline() == "True\n"
        assert not lock.acquire()
        holder = lock.holder()
        assert (holder.pid, holder.role) == (process.pid, "trainer")
        assert process_alive(process.pid, holder.start_time)


def test_lock_holder_killed_is_free_whatever_its_file_says(lock, path, running):
    with running(_HOLD, path) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGKILL)
        process.wait()
        assert b"trainer" in path.read_bytes()
        assert lock.holder() is None
        assert lock.acquire()


def test_lock_waiter_gets_it_when_the_holder_releases(lock, path, running):
    with running(_HOLD, path) as process:
        process.stdout.readline()
        got = []
        waiter = threading.Thread(target=lambda: got.append(lock.acquire(wait_seconds=60.0)))
        waiter.start()
        process.stdin.write("go on\n")
        process.stdin.flush()
        waiter.join()
        assert got == [True]
        assert process.stdout.readline() == "released\n"


def test_lock_wait_over_returns_false(lock, path):
    other = ProcessLock(path)
    other.acquire()
    clock = SteppingClock()
    assert not lock.acquire(3.0, clock)
    assert 4.0 <= clock.at <= 6.0
    other.release()


def _in_forked_child(lock: ProcessLock, answers) -> None:
    held, again, other = lock.held, lock.acquire(), ProcessLock(lock.path)
    answers.put((held, again, other.acquire(), other.holder().pid))
    lock.release()


def test_lock_survives_forked_children(lock, path):
    lock.acquire()
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    child = context.Process(target=_in_forked_child, args=(lock, answers))
    child.start()
    assert answers.get() == (False, False, False, os.getpid())
    child.join()
    assert child.exitcode == 0
    assert lock.held
    assert _tried_elsewhere(path) == (False, os.getpid())


def test_lock_holder_killed_while_its_forked_child_lives_is_free(lock, path, running):
    with running(_FORK, path) as process:
        child = int(process.stdout.readline())
        try:
            assert not lock.acquire()
            process.send_signal(signal.SIGKILL)
            process.wait()
            assert process_alive(child)
            assert lock.acquire()
        finally:
            os.kill(child, signal.SIGKILL)


def test_lock_file_replaced_between_open_and_lock_locks_the_new_one(lock, path, monkeypatch):
    lockf, calls = fcntl.lockf, []

    def after_a_replacement(descriptor, operation):
        if not calls:
            path.unlink()
            path.touch()
        calls.append(descriptor)
        lockf(descriptor, operation)

    monkeypatch.setattr(fcntl, "lockf", after_a_replacement)
    assert lock.acquire()
    assert len(calls) == 2
    assert _tried_elsewhere(path) == (False, os.getpid())


def test_lock_file_that_becomes_a_held_one_while_it_is_opened_is_refused(lock, path, monkeypatch):
    lock.acquire()
    late, opening = ProcessLock(path.with_name("late")), os.open

    def after_a_link(name, *arguments):
        os.link(path, name)
        return opening(name, *arguments)

    monkeypatch.setattr(os, "open", after_a_link)
    assert not late.acquire()
    monkeypatch.undo()
    assert _tried_elsewhere(path) == (False, os.getpid())


def test_lock_held_without_description_is_named_by_the_kernel(lock, path, running):
    for content in ("", "[]", '{"pid": 1, "start_time": 5, "host": "h", "role": "r", "since_unix": 1.0}'):
        path.write_text(content)
        with running(_LOCK_ONLY, path) as process:
            process.stdout.readline()
            holder = lock.holder()
            assert holder.pid == process.pid
            assert holder.start_time == process_start_time(process.pid)
            assert not lock.acquire()


def test_lock_path_of_another_kind_raises_and_is_left_alone(tmp_path):
    victim = tmp_path / "victim"
    victim.write_text("mine")
    (tmp_path / "link").symlink_to(victim)
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "fifo")
    for name in ("link", "folder", "fifo", "missing/lock"):
        with pytest.raises(TierError, match=name):
            ProcessLock(tmp_path / name).acquire()
    assert victim.read_text() == "mine"


def test_lock_taken_and_given_back_often_opens_no_more_files(lock):
    lock.acquire()
    lock.release()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        assert lock.acquire()
        assert not ProcessLock(lock.path).acquire()
        lock.holder()
        lock.release()
        lock.holder()
    assert len(os.listdir("/proc/self/fd")) == before


def test_process_alive_tells_zombies_and_reused_pids():
    me = os.getpid()
    started = process_start_time(me)
    assert process_alive(me)
    assert process_alive(me, started)
    assert not process_alive(me, started + 1)
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert Path(f"/proc/{child.pid}").exists()
    assert not process_alive(child.pid)
    child.wait()
    assert not process_alive(child.pid)


def test_process_start_time_with_an_odd_command_name_is_read():
    me = os.getpid()
    started, name = process_start_time(me), Path("/proc/self/comm").read_text()
    try:
        Path("/proc/self/comm").write_text("a) Z 1 (b")
        assert process_start_time(me) == started
    finally:
        Path("/proc/self/comm").write_text(name)
