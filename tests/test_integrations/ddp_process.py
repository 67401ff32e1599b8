"""One rank of a DDP training: goes on where all were, saves every second step, prints what it ends with."""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist

from fastcheck_dask import FastCheckManager

STEPS = 8


def batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 16, generator=torch.Generator().manual_seed(1000 * step + rank))


def main(folder: str, rendezvous: str, die_after: str) -> None:
    rank = int(os.environ["RANK"])
    torch.manual_seed(0)
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=2)
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(16, 8))
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with FastCheckManager(
        f"{folder}/objects", local_dir=f"{folder}/shm", encoders=1, rank="auto", session_timeout="5 s"
    ) as manager:
        state: dict[str, Any] | None = manager.load()
        begin = 0
        if state is not None:
            model.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            begin = state["step"]
        print("begin", begin, flush=True)  # noqa: T201
        for step in range(begin + 1, STEPS + 1):
            optimizer.zero_grad()
            model(batch(rank, step)).square().mean().backward()
            optimizer.step()
            if step % 2 == 0:
                saved = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                manager.save_async(saved, f"step{step}").wait()
            if step == int(die_after):
                os.kill(os.getpid(), signal.SIGKILL)
    digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
    for moments in optimizer.state.values():
        digest.update(moments["exp_avg"].numpy().tobytes() + moments["exp_avg_sq"].numpy().tobytes())
    print("end", digest.hexdigest(), flush=True)  # noqa: T201
    dist.destroy_process_group()


if __name__ == "__main__":
    main(*sys.argv[1:])
