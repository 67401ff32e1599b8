from __future__ import annotations

import os
import signal
import subprocess
import sys

import psutil

from fastcheck_dask import leash


def test_leash_parent_killed_takes_the_child_along():
    code = f"""
import os, subprocess, sys
command = [sys.executable, {leash.__file__!r}, str(os.getpid()), sys.executable, "-c",
           "import os, signal; print(os.getpid(), flush=True); signal.pause()"]
subprocess.Popen(command).wait()
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    try:
        assert parent.stdout is not None
        leashed = int(parent.stdout.readline())
        assert psutil.pid_exists(leashed)
        parent.send_signal(signal.SIGKILL)
        # The pipe ends when the last process that holds it has.
        assert parent.stdout.read() == ""
    finally:
        parent.kill()
        parent.communicate()


def test_leash_parent_gone_already_runs_nothing(tmp_path):
    command = [sys.executable, leash.__file__, str(os.getpid() + 1), sys.executable, "-c", "print('ran')"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
