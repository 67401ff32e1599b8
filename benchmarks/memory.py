"""What memory does FastCheck take on the training host and on the storage nodes, and does it grow?

The host's is the two slots in shared memory, all of the agent and its encoders, their arena, and what the
trainer has beyond what it had before the first save. A node's is what its process has beyond what it had when
it was empty. Aims: the host at most 2.5 times the state; the nodes together at most (N+1)/N x 1.3 of the
encoded state and one job's chunks (16 MiB) per node; flat within 5 % between save 10 and save 30.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

import psutil
import torch

from benchmarks.machine import resident_bytes, table
from benchmarks.training import Training, nbytes
from fastcheck_dask import FastCheckManager
from fastcheck_dask.engine.sending import JOB_BYTES
from fastcheck_dask.testing.cluster import StorageCluster

SAVES = 30
NODES = 4


def _host_bytes(agent: psutil.Process, local: Path) -> int:
    """Return slots, arena (a memory file of the agent), agent, encoders and trainer."""
    processes = [agent, *agent.children(recursive=True)]
    slots = sum(f.stat().st_blocks * 512 for f in local.rglob("*") if f.is_file())
    arena = sum(
        os.stat(fd).st_blocks * 512
        for fd in Path(f"/proc/{agent.pid}/fd").iterdir()
        if "fastcheck-arena" in os.readlink(fd)
    )
    private = sum(resident_bytes(p.pid) for p in processes) + resident_bytes(os.getpid())
    return slots + arena + private


def _agent() -> psutil.Process:
    for child in psutil.Process().children():
        if "fastcheck_dask.agent.process" in child.cmdline():
            return child
    raise RuntimeError("the manager has no agent process")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    training = Training(4096)
    training.steps(6)
    state_bytes = nbytes(training.state())
    rows = []
    with (
        tempfile.TemporaryDirectory() as name,
        StorageCluster(Path(name) / "nodes", NODES, ring=0) as cluster,
    ):
        pids = [cluster.pid(f"n{i}") for i in range(NODES)]
        empty = [resident_bytes(pid) for pid in pids]
        local = Path("/dev/shm") / f"fastcheck-bench-{os.getpid()}"
        with FastCheckManager(
            f"{name}/ckpts",
            coordinator=cluster.coordinator,
            local_dir=local,
            num_shards=NODES - 1,
            compression="always",
        ) as manager:
            agent = _agent()
            trainer_before = resident_bytes(os.getpid())
            encoded = 0
            for number in range(1, SAVES + 1):
                training.steps(1)
                handle = manager.save_async(training.state(), f"step{number}")
                handle.wait("object")
                encoded = max(encoded, handle.stats["persisted_bytes"])
                if number in (1, 2, 5, 10, 20, 30):
                    host = _host_bytes(agent, local) - trainer_before
                    nodes = sum(resident_bytes(p) for p in pids) - sum(empty)
                    bound = NODES / (NODES - 1) * 1.3 * encoded + NODES * JOB_BYTES
                    rows.append(
                        [
                            str(number),
                            f"{host / 1e6:.0f} MB",
                            f"{host / state_bytes:.2f}",
                            f"{nodes / 1e6:.0f} MB",
                            f"{nodes / bound:.2f}",
                            f"{resident_bytes(agent.pid) / 1e6:.0f} MB",
                        ]
                    )
    table(
        f"Memory; state {state_bytes / 1e6:.0f} MB, encoded {encoded / 1e6:.0f} MB",
        ["save", "host", "host / state", "nodes", "nodes / bound", "of it the agent"],
        rows,
    )


if __name__ == "__main__":
    main()
