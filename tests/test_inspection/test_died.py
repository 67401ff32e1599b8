"""Writers that are killed at any object: what they leave is recognised, shown, and removable."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastcheck_dask import open_checkpoint
from fastcheck_dask.inspection.garbage import collect
from fastcheck_dask.inspection.leftovers import Kind
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify, verify_rest

_WRITER = """
import os, signal, sys
import numpy as np
from fastcheck_dask.testing.checkpoints import write_checkpoint
location, call, count = sys.argv[1], sys.argv[2], int(sys.argv[3])
real = getattr(os, call)
def dies(*args, **options):
    global count
    count -= 1
    if count < 0:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)
setattr(os, call, dies)
write_checkpoint(location, {"w": np.arange(1500.0), "s": np.ones(3)}, "t2", generation=2)
"""

#: The write of the root group's document is the last but one rename; the marker is the one hard link.
POINTS = [("replace", 0), ("replace", 2), ("replace", 5), ("fsync", 4), ("link", 0)]


@pytest.mark.parametrize(("call", "count"), POINTS)
def test_killed_writer_leaves_nothing_that_is_taken_for_a_checkpoint(folder, checkpoints, call, count):
    checkpoints.save(folder)
    done = subprocess.run([sys.executable, "-c", _WRITER, folder, call, str(count)], check=False)
    assert done.returncode == -signal.SIGKILL
    opened, _ = open_folder(folder)
    found = overview(opened)
    assert [c.tag for c in found.checkpoints] == ["t1"]
    kinds = {leftover.kind for leftover in found.leftovers}
    assert kinds
    assert kinds <= {Kind.UNFINISHED, Kind.TEMPORARY, Kind.UNMARKED}
    assert (call == "link") == (Kind.UNMARKED in kinds) == bool(verify_rest(opened))
    assert open_checkpoint(folder).tag == "t1"
    for path in Path(folder).rglob("*"):
        os.utime(path, (1.0, 1.0))
    collect(opened)
    left = {leftover.kind for leftover in overview(opened).leftovers}
    assert left == ({Kind.UNMARKED} if call == "link" else set())
    assert verify(opened, opened.committed()[0]).intact
    opened.clear_uncommitted("00000002-t2")
    checkpoints.save(folder, "t2", generation=2)
    assert np.array_equal(open_checkpoint(folder)["model/w"], checkpoints.state(2)["model"]["w"])
