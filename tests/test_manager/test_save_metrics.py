"""What handles are told is what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.errors import ConfigError, SaveFailedError, TooFewNodesError
from fastcheck_dask.manager.handle import Level, SaveHandle
from fastcheck_dask.manager.save_metrics import SaveMetrics

LEVELS: tuple[Level, ...] = ("local", "peers", "object")


def record(*nodes: str, generation: int = 3) -> CommitRecord:
    return CommitRecord("run", generation, "t", "tok", "0" * 64, nodes, nodes, len(nodes), False, 1, 1.0)


def stats(**more: Any) -> dict[str, Any]:
    return {"raw_bytes": 1000, "sent_bytes": 250, "degraded": None, "save_seconds": 2.0, **more}


@pytest.fixture
def metrics() -> SaveMetrics:
    return SaveMetrics("run", unix_time=lambda: 1e9)


def values(metrics: SaveMetrics, name: str) -> dict[tuple[str, ...], float]:
    """Return the values of a family by its labels besides the run; of a summary also how many they are."""
    (family,) = (one for one in metrics.families() if one.name == f"fastcheck_{name}")
    assert all(sample.labels["run"] == "run" for sample in family.samples)
    found: dict[tuple[str, ...], float] = {}
    for sample in family.samples:
        labels = tuple(sample.labels[label] for label in family.labels[1:])
        found[labels] = sample.value
        if family.kind == "summary":
            found[(*labels, "count")] = sample.count
    return found


def test_save_through_all_levels_is_counted_once_each(metrics: SaveMetrics) -> None:
    handle = SaveHandle("t", LEVELS, metrics)
    handle.stats["stall_seconds"] = 0.25
    handle._reach("local")
    handle._committed(record("n0", "n1"), stats())
    handle._reach("object", {"persisted_bytes": 300, "persist_seconds": 4.0})
    handle._reach("object")
    assert values(metrics, "saves") == {("local",): 1, ("peers",): 1, ("object",): 1}
    assert values(metrics, "save_stall_seconds") == {(): 0.25, ("count",): 1}
    assert values(metrics, "save_seconds") == {
        ("local",): 0.25,
        ("local", "count"): 1,
        ("peers",): 2.0,
        ("peers", "count"): 1,
        ("object",): 4.0,
        ("object", "count"): 1,
    }
    bytes_of = [values(metrics, f"save_{what}_bytes")[()] for what in ("raw", "sent", "persisted")]
    assert bytes_of == [1000, 250, 300]
    gauges = ("generation", "save_ratio", "last_commit_timestamp_seconds")
    assert [values(metrics, name)[()] for name in gauges] == [3, 0.25, 1e9]
    assert values(metrics, "save_failures") == {}
    assert values(metrics, "saves_degraded") == {(): 0}


def test_degraded_save_and_failures_are_counted_by_level_and_kind(metrics: SaveMetrics) -> None:
    degraded = SaveHandle("t", LEVELS, metrics)
    degraded._committed(record(), stats(degraded="no node is alive"))
    degraded._fall_short("peers", error=TooFewNodesError(1, 0, "start some"))
    degraded._reach("object")
    for _ in range(2):
        SaveHandle("u", LEVELS, metrics)._fall_short("peers", "object", error=SaveFailedError("no"))
    SaveHandle("v", LEVELS, metrics)._fall_short("object", error=ConfigError("as set"), waived=True)
    assert values(metrics, "save_failures") == {
        ("peers", "TooFewNodesError"): 1,
        ("peers", "SaveFailedError"): 2,
        ("object", "SaveFailedError"): 2,
    }
    assert values(metrics, "saves_degraded") == {(): 1}
    # Without nodes the object tier got what was sent.
    assert values(metrics, "save_persisted_bytes") == {(): 250}


def test_nothing_saved_yet_has_no_generation(metrics: SaveMetrics) -> None:
    names = {family.name for family in metrics.families()}
    assert "fastcheck_saves" in names
    assert "fastcheck_generation" not in names


def test_empty_state_has_a_ratio(metrics: SaveMetrics) -> None:
    metrics.committed(1, stats(raw_bytes=0, sent_bytes=0))
    assert values(metrics, "save_ratio") == {(): 1.0}
