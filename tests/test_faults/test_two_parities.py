"""Two parity shards on real nodes: two of them are killed at once, and come back without the trainer."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from fastcheck_dask import cli
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state

#: By shard: two of data, one of each kind, and the two of parity.
PAIRS = ((0, 1), (1, 2), (2, 3))


def status(cluster: StorageCluster, *options: str) -> Any:
    arguments = ["status", "--coordinator", cluster.coordinator, *options]
    return CliRunner().invoke(cli.main, arguments, env={"COLUMNS": "250"})


def wait_for_verdict(cluster: StorageCluster, level: str, may_die: int, missing: Sequence[str] = ()) -> None:
    """Wait until the status says so; a busy machine may show a node as silent meanwhile."""

    def so() -> bool:
        (run,) = json.loads(status(cluster, "--json").stdout)["runs"]
        found = run["verdict"]
        return (found["level"], found["may_die"], sorted(found["missing"])) == (
            level,
            may_die,
            sorted(missing),
        )

    wait_until(so, f"{level}, and {may_die} nodes may die", seconds=60)


def wait_for_repair(host: TrainingHost, cluster: StorageCluster, nodes: Sequence[str]) -> None:
    """Wait until the record leads to the processes that run now: that is where a load asks."""
    there = tuple(cluster.address(name) for name in nodes)
    wait_until(lambda: host.records()[-1].addresses == there, "both are repaired", seconds=60)


@pytest.mark.slow
def test_any_two_nodes_killed_load_is_exact_and_repair_restores_both(
    tmp_path: Path, restart: Callable[..., None]
) -> None:
    options = {"num_shards": 2, "parity": 2, "persist_every": 0}
    with (
        # No other node could take a shard of those that are killed.
        StorageCluster(tmp_path / "cluster", 4) as cluster,
        TrainingHost(tmp_path, cluster.coordinator, options) as host,
    ):
        manager = host.manager()
        host.save(manager, 1)
        nodes = host.save(manager, 2).stats["nodes"]
        assert len(set(nodes)) == 4
        host.lose_memory()
        for pair in PAIRS:
            for shard in pair:
                cluster.kill(nodes[shard])
            state, report = host.load_elsewhere(objects=False)
            assert_is_state(state, 2)
            assert (report.generation, report.skipped) == (2, [])
            assert ("parity" in report.raw_bytes) == (pair != (2, 3))
            wait_for_verdict(cluster, "degraded", 0, [nodes[shard] for shard in pair])
            for shard in pair:
                restart(cluster, nodes[shard])
            wait_for_repair(host, cluster, nodes)
        wait_for_verdict(cluster, "redundant", 2)
        assert "; 2 nodes may die" in status(cluster).stdout
        # Trained on from it, the next save is a delta, on the same nodes.
        manager = host.manager()
        assert_is_state(manager.load(), 2)
        handle = host.save(manager, 3)
        assert handle.stats["nodes"] == nodes
        assert handle.stats["deltas"] > 0


def test_number_of_parity_shards_changes_from_one_life_to_the_next(
    cluster: StorageCluster, on_cluster: Callable[..., TrainingHost]
) -> None:
    host = on_cluster(num_shards=2, persist_every=0)
    nodes: list[str] = []
    for step, parity in enumerate((1, 2, 1), 1):
        manager = host.manager(parity=parity)
        if step > 1:
            assert_is_state(manager.load(), step - 1)
        handle = host.save(manager, step)
        assert len(handle.stats["nodes"]) == 2 + parity
        assert handle.stats["nodes"][: len(nodes)][:3] == nodes[:3]
        assert (handle.stats["deltas"] > 0) == (step > 1)
        nodes = handle.stats["nodes"]
        state, report = host.load_elsewhere(objects=False)
        assert_is_state(state, step)
        assert report.generation == step
        host.lose_memory()
    assert [record.parity for record in host.records()] == [1, 2, 1]
