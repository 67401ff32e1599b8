"""What is drawn is what nodes told."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.monitoring.dashboard_data import (
    SILENT_SECONDS,
    Told,
    node_columns,
    save_columns,
    shard_columns,
)

MIB = 2**20


def node(generation: int | None = 3, **fields: Any) -> dict[str, Any]:
    return {
        "rack": "r",
        "master": False,
        "used_bytes": 2 * MIB,
        "reserved_bytes": MIB,
        "limit_bytes": 4 * MIB,
        "pending": 7,
        "damaged": 0,
        "runs": {"run": {"generation": generation, "bytes": MIB, "damaged": 0, "persisted": 2}},
        "saves": [{"run": "run", "generation": 3, "unix": 90.0, "bytes": MIB}],
        **fields,
    }


def test_a_row_for_each_node_shard_and_save() -> None:
    nodes = {"n1": Told(node(), 100.0), "n0": Told(node(master=True), 100.0)}
    rows = node_columns(nodes, 100.0)
    assert (rows["name"], rows["master"]) == (["n0", "n1"], ["yes", ""])
    assert (rows["used_mib"], rows["used"], rows["reserved"]) == ([2.0] * 2, [0.5] * 2, [0.75] * 2)
    assert rows["health"] == ["well", "well"]
    shards = shard_columns(nodes)
    assert (shards["node"], shards["generation"], shards["mib"]) == (["n0", "n1"], [3, 3], [1.0, 1.0])
    saves = save_columns(nodes, 100.0)
    assert (saves["seconds"], saves["run"]) == ([-10.0, -10.0], ["run", "run"])


@pytest.mark.parametrize(
    ("metrics", "heard", "health"),
    [
        (node(), 100.0 - SILENT_SECONDS, "well"),
        (node(), 99.0 - SILENT_SECONDS, "silent"),
        (node(damaged=1), 100.0, "damaged"),
        (node(2), 100.0, "behind"),
        (node(None), 100.0, "well"),
    ],
)
def test_health_is_the_worst_that_is_known(metrics: dict[str, Any], heard: float, health: str) -> None:
    nodes = {"a": Told(metrics, heard), "b": Told(node(), 100.0)}
    assert node_columns(nodes, 100.0)["health"][0] == health


def test_run_that_was_never_committed_is_no_shard() -> None:
    assert shard_columns({"a": Told(node(None), 0.0)})["node"] == []


def test_no_node_is_no_row() -> None:
    assert set(map(len, node_columns({}, 0.0).values())) == {0}
