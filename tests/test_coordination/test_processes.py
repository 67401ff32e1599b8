from __future__ import annotations

import subprocess
import sys
from dataclasses import replace

import pytest

from fastcheck_dask.coordination.processes import ProcessIdentity, _state_and_start

ME = ProcessIdentity.of_this_process()


@pytest.fixture
def child():
    """Start a process whose name looks like the fields behind it, until it is told to end."""
    process = subprocess.Popen(
        [sys.executable, "-c", "open('/proc/self/comm', 'w').write(') Z 1 (x'); print(); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout.readline() == b"\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def test_alive_this_process_is():
    assert ME.alive()


@pytest.mark.parametrize("change", [{"started": ME.started + 1}, {"boot": "another"}, {"pid": 2**22 + 1}])
def test_alive_other_start_boot_or_pid_is_not(change):
    assert not replace(ME, **change).alive()


def test_alive_name_with_parentheses_is_read_right_and_zombie_is_dead(child):
    state, started = _state_and_start(child.pid)
    identity = replace(ME, pid=child.pid, started=started)
    assert state in "RS"
    assert started >= ME.started
    assert identity.alive()
    child.kill()
    # Ends when the pipe closes, which a zombie has done already; nobody has waited for it yet.
    assert child.stdout.read() == b""
    while _state_and_start(child.pid)[0] != "Z":
        pass
    assert not identity.alive()
