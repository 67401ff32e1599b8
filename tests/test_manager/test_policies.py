"""Policies of the object tier, with a real agent: what stays, deltas, and what is flagged."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from fastcheck_dask.errors import ConfigError, UnrecoverableError
from fastcheck_dask.testing.faults import wait_until


def state_of(step, *, poison=False):
    weights = np.random.default_rng(1).normal(size=20_000).astype(np.float32)
    drift = np.random.default_rng(step).integers(0, 2, weights.size, np.uint32)
    weights = (weights.view(np.uint32) ^ drift).view(np.float32)
    if poison:
        weights[5] = np.nan
    return {"weights": weights, "frozen": np.ones(30_000, np.float32), "step": step}


def same(left, right):
    return all(np.asarray(left[k]).tobytes() == np.asarray(right[k]).tobytes() for k in right)


def committed(manager):
    return [marker.generation for marker in manager._folder.committed()]


def test_keep_last_and_best_remove_the_others_and_tags_say_so(make):
    manager = make(keep_last=2, keep_best=("loss", "min", 1))
    for step, loss in enumerate([3.0, 1.0, 2.0, 5.0, 4.0]):
        manager.save_async(state_of(step), f"s{step}", metrics={"loss": loss}).wait()
    wait_until(lambda: committed(manager) == [2, 4, 5], "the others to be removed", seconds=30)
    assert manager.tags() == ["s1", "s3", "s4"]
    for step in (1, 3, 4):
        assert same(manager.load(f"s{step}"), state_of(step))
    with pytest.raises(UnrecoverableError, match="no commit marker"):
        manager.load("s0")


def test_keep_zero_is_refused_before_anything_is_made(make, tmp_path):
    for name in ("keep_last", "keep_every", "keep_hours"):
        with pytest.raises(ConfigError, match=rf"{name}.*cannot be 0"):
            make(**{name: 0})
    assert not (tmp_path / "objects").exists()


def test_incremental_with_retention_loads_after_a_restart(make):
    options = {"persist": "incremental", "max_deltas": 2, "keep_last": 1, "chunk_bytes": "32 KiB"}
    with make(max_references=0, **options) as manager:
        sizes = []
        for step in range(5):
            handle = manager.save_async(state_of(step), f"s{step}").wait()
            sizes.append(handle.stats["sent_bytes"])
        # 1 whole, 2, 3 deltas, 4 whole, 5 a delta.
        assert sizes[1] < sizes[0] / 2
        assert sizes[4] < sizes[3] / 2
        wait_until(lambda: committed(manager) == [4, 5], "the first chain to be removed", seconds=30)
    again = make(max_references=0, **options)
    assert same(again.load(), state_of(4))
    assert again.last_load.source == "object"
    # The load filled a slot: it goes on with deltas.
    assert again.save_async(state_of(5), "s5").wait().stats["deltas"]
    assert again._folder.committed()[-1].base.directory == "00000005-s4"


def test_incremental_never_writes_again_what_does_not_change(make):
    options = {"persist": "incremental", "max_deltas": 1, "keep_last": 1, "chunk_bytes": "32 KiB"}
    with make(**options) as manager:
        for step in range(3):
            manager.save_async(state_of(step), f"s{step}").wait()
        # The third has no deltas, and refers to the first for what is frozen.
        wait_until(lambda: committed(manager) == [1, 3], "the second to be removed", seconds=60)
        assert [m.refs != () for m in manager._folder.committed()] == [False, True]
        chunks = [path for path in manager._folder.store.list("") if "/frozen/c/" in path]
        assert {path.split("-")[0] for path in chunks} == {"00000001"}
    again = make(**options)
    assert same(again.load(), state_of(2))


def test_flagged_checkpoints_are_told_and_skipped_if_asked(make, caplog):
    manager = make()
    flags = []
    with caplog.at_level(logging.WARNING):
        for step, poison in enumerate([False, True, True]):
            handle = manager.save_async(state_of(step, poison=poison), f"s{step}").wait()
            flags.append(handle.stats["flags"])
        flags.append(manager.save_async(state_of(2, poison=True), "s3").wait().stats["flags"])
        wait_until(lambda: "generation 2 (s1) is flagged" in caplog.text, "the warning", seconds=30)
    assert flags == [[], ["nonfinite"], ["nonfinite"], ["nonfinite", "unchanged"]]
    assert [m.flags for m in manager._folder.committed()] == list(map(tuple, flags))
    assert same(manager.load(), state_of(2, poison=True))
    assert same(manager.load(fallback="healthy"), state_of(0))
    assert [text.split(":")[0] for text in manager.last_load.skipped] == [
        "generation 4 (s3)",
        "generation 3 (s2)",
        "generation 2 (s1)",
    ]
    assert "NaN or infinity in weights" in manager.last_load.skipped[0]
    with pytest.raises(ConfigError, match="healthy"):
        manager.load("s1", fallback="healthy")
    with pytest.raises(ConfigError, match="sane"):
        manager.load(fallback="sane")


def test_metrics_that_are_no_numbers_are_refused_and_nothing_is_saved(make):
    manager = make()
    with pytest.raises(ConfigError, match="metric 'loss'"):
        manager.save_async(state_of(0), "s0", metrics={"loss": "low"})
    assert manager.tags() == []
