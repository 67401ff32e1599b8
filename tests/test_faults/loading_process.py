"""A process that loads each time it is told to, and prints what memory that took at most, and what came.

Arguments: ``into`` a state that is there already or ``fresh``, the checkpoint directory, the folder of the
local tier, the bytes of the state, and the coordinator's URL, or nothing to go by the object tier alone.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
from pathlib import Path

import numpy as np

from fastcheck_dask.config import settings
from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.engine.recover import Into, Recovery
from fastcheck_dask.ids import run_id_for
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.local import LocalTier
from fastcheck_dask.tiers.object_store import open_store
from fastcheck_dask.tiers.peer import clients_for

ARRAYS = 5


def resident(*names: str) -> int:
    """Return kinds of memory of this process, in bytes."""
    lines = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return sum(int(lines[name].split()[0]) * 1024 for name in names)


def main(into: str, folder: str, local: str, nbytes: int, coordinator: str) -> None:
    """Load once for each line of the input."""
    count = nbytes // ARRAYS // 4
    state = {f"w{n}": np.zeros(count, np.int32) for n in range(ARRAYS)} if into == "into" else None
    wanted = np.arange(count, dtype=np.int32)
    scratch = np.empty_like(wanted)
    tier = LocalTier(run_id_for(folder), Path(local))
    recovery = Recovery(tier, CheckpointFolder(open_store(folder)), clients_for(settings()))
    print("ready", flush=True)  # noqa: T201
    for _ in sys.stdin:
        for array in (state or {}).values():
            array.fill(-1)
        records = ()
        if coordinator:
            with contextlib.closing(connect(coordinator)) as connection:
                records = connection.commits(run_id_for(folder))
        # The high-water mark begins anew; mappings are of memory that is there anyway.
        Path("/proc/self/clear_refs").write_text("5")
        before, mapped = resident("VmRSS"), resident("RssShmem", "RssFile")
        recovered = asyncio.run(recovery.load(records, into=None if state is None else Into(state)))
        taken = resident("VmHWM") - before - (resident("RssShmem", "RssFile") - mapped)
        assert recovered is not None
        good = state is None or all(recovered.state[key] is state[key] for key in state)
        for number in range(ARRAYS):
            np.multiply(wanted, 2 * number + 1, out=scratch)
            good = good and np.array_equal(recovered.state[f"w{number}"], scratch)
        said = {"source": recovered.report.source, "taken": taken, "good": good}
        print(json.dumps(said), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(*sys.argv[1:4], int(sys.argv[4]), sys.argv[5])
