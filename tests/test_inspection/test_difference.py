from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from fastcheck_dask import open_checkpoint
from fastcheck_dask.errors import ShardCorruptError
from fastcheck_dask.inspection.difference import compare
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.object_store import open_store


@pytest.fixture
def differ(folder, checkpoints):
    """Return a function that saves two states and compares them."""

    def compared(before, after, **options):
        checkpoints.save(folder, "a", generation=1, state=before)
        checkpoints.save(folder, "b", generation=2, state=after, **options)
        return compare(open_checkpoint(folder, "a"), open_checkpoint(folder, "b"))

    return compared


def test_equal_checkpoints_are_not_read(differ, checkpoints, monkeypatch):
    read = FolderStore.read
    asked = []
    monkeypatch.setattr(FolderStore, "read", lambda self, path: asked.append(path) or read(self, path))
    found = differ(checkpoints.state(1), checkpoints.state(1))
    assert found.equal
    assert len(found.unchanged) == 5
    assert not [path for path in asked if "/c/" in path]


def test_figures_are_those_of_the_values(differ):
    rng = np.random.default_rng(0)
    old = rng.normal(size=(50, 100))
    new = old.copy()
    new[3] += 0.5
    new[40, 7] -= 2
    found = differ({"w": old, "same": old * 2}, {"w": new, "same": old * 2})
    (change,) = found.changed
    assert (change.path, change.elements, change.changed_elements) == ("w", 5000, 101)
    assert change.changed_share == 101 / 5000
    assert change.max_abs == pytest.approx(2)
    assert change.relative_l2 == pytest.approx(np.linalg.norm(new - old) / np.linalg.norm(old))
    assert found.unchanged == ("same",)
    assert not found.equal


def test_nan_and_infinities_are_counted_and_left_out_of_the_figures(differ):
    old = np.ones(2000, np.float32)
    new = old.copy()
    new[:3] = np.nan
    new[1500] = -np.inf
    new[7] = 3
    old[100] = np.inf
    new[100] = np.inf
    (change,) = differ({"w": old}, {"w": new}).changed
    assert (change.nan, change.inf, change.max_abs) == ((0, 3), (1, 2), 2.0)
    assert change.changed_elements == 5
    assert change.relative_l2 == pytest.approx(math.sqrt(4 / 1995))


def test_bits_decide_not_values(differ):
    nan = np.full(1000, np.nan)
    zero = np.zeros(1000)
    found = differ({"nan": nan, "zero": zero}, {"nan": nan.copy(), "zero": -zero})
    assert found.unchanged == ("nan",)
    (change,) = found.changed
    assert (change.changed_share, change.max_abs, change.relative_l2) == (1.0, 0.0, 0.0)


def test_other_chunks_of_the_same_bits_are_unchanged(differ, checkpoints):
    assert differ(checkpoints.state(1), checkpoints.state(1), chunk_bytes=1000).equal


def test_from_zero_the_relative_change_is_infinite(differ):
    (change,) = differ({"w": np.zeros(500)}, {"w": np.ones(500)}).changed
    assert change.relative_l2 == math.inf


def test_new_removed_other_form_and_values(differ):
    before = {"a": np.zeros(300), "b": np.zeros(300), "r": np.zeros((3, 100)), "d": 1, "n": math.nan, "t": 1}
    after = {
        "b": np.zeros(300, np.float32),
        "r": np.zeros((100, 3)),
        "d": 2,
        "e": np.ones(300),
        "n": math.nan,
    }
    found = differ(before, after | {"t": True})
    assert (found.new, found.removed, found.changed) == (("e",), ("a",), ())
    assert found.other_form == {
        "b": "float64 (300,) became float32 (300,)",
        "r": "float64 (3, 100) became float64 (100, 3)",
    }
    assert found.values == {"d": (1, 2), "t": (1, True)}


def test_bfloat16_inline_and_text_arrays(differ):
    weights = torch.ones(1000, dtype=torch.bfloat16)
    before = {"w": weights, "s": np.float32([1, 2]), "x": np.array(["ab", "cd"] * 100)}
    after = {"w": weights * 1.5, "s": np.float32([1, 4]), "x": np.array(["ab", "ce"] * 100)}
    by_path = {change.path: change for change in differ(before, after).changed}
    assert by_path["w"].max_abs == 0.5
    assert (by_path["s"].max_abs, by_path["s"].changed_elements) == (2.0, 1)
    assert (by_path["x"].relative_l2, by_path["x"].changed_share) == (None, 0.5)


def test_damaged_chunk_is_no_change(differ, folder, checkpoints):
    differ({"w": np.zeros(3000)}, {"w": np.ones(3000)})
    open_store(folder).write("00000002-b/w/c/1", b"x" * 99)
    with pytest.raises(ShardCorruptError, match="w/c/1"):
        compare(open_checkpoint(folder, "a"), open_checkpoint(folder, "b"))
