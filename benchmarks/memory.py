"""What memory does FastCheck take on the training host and on the storage nodes, and does it grow?

The host's is the two slots in shared memory, and what the agent, its encoders (their arena) and the trainer
have beyond what they had before the first save. A node's is what its process has beyond what it had when it
was empty. Aims: the host at most 2.5 times the state; the nodes together at most (N+1)/N x 1.3 of the encoded
state; flat within 5 % between save 10 and save 30.
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
from fastcheck_dask.testing.cluster import StorageCluster

SAVES = 30
NODES = 4


def _host_bytes(agent: psutil.Process, local: Path) -> int:
    processes = [agent, *agent.children(recursive=True)]
    shared = sum(f.stat().st_blocks * 512 for f in local.rglob("*") if f.is_file())
    return sum(resident_bytes(p.pid) for p in processes) + resident_bytes(os.getpid()) + shared


def _agent() -> psutil.Process:
    for child in psutil.Process().children():
        if "fastcheck_dask.agent.process" in child.cmdline():
            return child
    raise RuntimeError("the manager has no agent process")


def main() -> None:
    """Print the table."""
    torch.set_num_threads(1)
    training = Training(2048)
    training.steps(3)
    state_bytes = nbytes(training.state())
    rows = []
    with tempfile.TemporaryDirectory() as name, StorageCluster(Path(name) / "nodes", NODES) as cluster:
        pids = [cluster.pid(f"n{i}") for i in range(NODES)]
        empty = [resident_bytes(pid) for pid in pids]
        local = Path("/dev/shm") / f"fastcheck-bench-{os.getpid()}"  # noqa: S108
        with FastCheckManager(
            f"{name}/ckpts", coordinator=cluster.coordinator, local_dir=local, num_shards=NODES - 1
        ) as manager:
            agent = _agent()
            before = _host_bytes(agent, local)
            encoded = 0
            for number in range(1, SAVES + 1):
                training.steps(1)
                handle = manager.save_async(training.state(), f"step{number}")
                handle.wait("object")
                encoded = max(encoded, handle.stats["persisted_bytes"])
                if number in (1, 2, 5, 10, 20, 30):
                    host = _host_bytes(agent, local) - before
                    nodes = sum(resident_bytes(p) for p in pids) - sum(empty)
                    bound = NODES / (NODES - 1) * 1.3 * encoded
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
        f"Memory beyond the empty processes; state {state_bytes / 1e6:.0f} MB, encoded {encoded / 1e6:.0f} MB",
        ["save", "host", "host / state", "nodes", "nodes / bound", "of it the agent"],
        rows,
    )


if __name__ == "__main__":
    main()
