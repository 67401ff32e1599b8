from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from fastcheck_dask.demo.processes import Child, DemoFailedError, no_orphans

#: Starts a process in another session, as a trainer does with its agent, and tells its pid.
WITH_CHILD = """
import subprocess, sys, signal
child = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], start_new_session=True)
print(child.pid, flush=True)
"""
FOREVER = WITH_CHILD + "signal.pause()"


def start(tmp_path: Path, code: str) -> Child:
    return Child("child", ["-c", code], logs=tmp_path, environment={"MARK": "made by the test"})


def test_child_killed_takes_all_that_descend_from_it(tmp_path):
    child = start(tmp_path, FOREVER)
    try:
        below = int(child.line(30) or 0)
        assert psutil.pid_exists(below)
    finally:
        with no_orphans():
            killed = child.kill_with_all()
    assert set(killed) == {child.pid, below}
    assert not child.running()
    assert child.line(1) is None
    assert child.kill_with_all() == []


def test_no_orphans_ends_what_outlives_its_parent(tmp_path):
    with no_orphans():
        child = start(tmp_path, WITH_CHILD)
        below = psutil.Process(int(child.line(30) or 0))
        assert child.status() == 0
        assert below.is_running()
    assert not below.is_running()
    child.kill_with_all()


def test_no_orphans_leaves_what_was_there_before(tmp_path):
    before = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        with no_orphans():
            pass
        assert before.poll() is None
    finally:
        before.kill()
        before.wait()


def test_child_environment_and_log_are_its_own(tmp_path):
    code = "import os, sys; print(os.environ['MARK']); sys.stderr.write('what went wrong\\n'); sys.exit(3)"
    child = start(tmp_path, code)
    try:
        assert (child.line(30), child.line(30)) == ("made by the test", None)
        assert "status 3: what went wrong" in str(child.failed())
    finally:
        child.kill_with_all()


def test_child_silent_too_long_is_an_error(tmp_path):
    child = start(tmp_path, "import signal; signal.pause()")
    try:
        with pytest.raises(DemoFailedError, match="said nothing"):
            child.line(0.01)
    finally:
        child.kill_with_all()
