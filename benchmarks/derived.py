"""How many bytes does mixed-precision training spare when its bf16 weights are known by their fp32 masters?

``python -m benchmarks.derived``. The states are those of a GPT that was really trained in bf16 (see
`benchmarks.checkpoints`): weights, masters and both moments, at four steps. They are saved one after the
other to real storage nodes, as they are and, as the baseline, with the last bit of the last bf16 weight
flipped: the weights are no cast then, and are sent like everything else. What is loaded is compared bit for
bit.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import checkpoints
from benchmarks.machine import console, describe, table
from fastcheck_dask import FastCheckManager
from fastcheck_dask.testing.cluster import StorageCluster

RUN = "gpt_bf16"
SHARDS = 3

State = dict[str, torch.Tensor]


def state_of(run: checkpoints.Checkpoints, after: int, *, derivable: bool) -> State:
    """Return the state of a step as tensors; unless `derivable`, its bf16 weights are one bit off."""
    state = {kind: torch.from_numpy(np.array(run.load("late", after, kind))) for kind in run.kinds}
    if not derivable:
        state["weights_bf16"].view(torch.int16)[-1] ^= 1
    return state | {"weights_bf16": state["weights_bf16"].view(torch.bfloat16)}


def same(left: State, right: State) -> bool:
    """Say whether two states have the same bits."""
    return left.keys() == right.keys() and all(
        left[kind].dtype == right[kind].dtype
        and torch.equal(left[kind].view(torch.uint8), right[kind].view(torch.uint8))
        for kind in left
    )


def save_all(states: list[State]) -> list[dict[str, Any]]:
    """Save states one after the other, load the last one from the nodes; return the stats of the saves."""
    with tempfile.TemporaryDirectory() as name, StorageCluster(Path(name) / "nodes", SHARDS + 1) as cluster:
        options: dict[str, Any] = {
            "coordinator": cluster.coordinator,
            "num_shards": SHARDS,
            "compression": "always",
            "persist_every": 0,
        }
        found = []
        with FastCheckManager(f"{name}/ckpts", **options, local_dir=f"{name}/local") as manager:
            for number, state in enumerate(states):
                found.append(manager.save_async(state, f"t{number}").wait("peers").stats)
        with FastCheckManager(f"{name}/ckpts", **options, local_dir=f"{name}/elsewhere") as manager:
            loaded = manager.load()
            assert manager.last_load is not None
            assert manager.last_load.source == "peers"
        assert same(states[-1], loaded), "what was loaded differs"
    return found


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cache", type=Path, default=checkpoints.CACHE)
    cache = parser.parse_args().cache
    console.print(describe())
    (run,) = checkpoints.every(cache, [RUN])
    steps = (0, *checkpoints.INTERVALS)
    derived, sent = (
        save_all([state_of(run, step, derivable=derivable) for step in steps]) for derivable in (True, False)
    )
    rows = []
    for after, with_it, without in zip(steps, derived, sent, strict=True):
        assert with_it["derived_bytes"] > 0
        assert without["derived_bytes"] == 0
        rows.append(
            [
                f"delta, {after} steps on" if after else "whole",
                f"{with_it['raw_bytes'] / 1e6:.1f}",
                f"{with_it['derived_bytes'] / 1e6:.1f}",
                f"{with_it['sent_bytes'] / 1e6:.2f}",
                f"{without['sent_bytes'] / 1e6:.2f}",
                f"{with_it['sent_bytes'] / without['sent_bytes']:.3f}",
            ]
        )
    table(
        f"Bytes sent to {SHARDS} data shards and parity, MB",
        ["save", "raw", "derived", "sent", "sent, nothing derived", "ratio"],
        rows,
    )


if __name__ == "__main__":
    main()
