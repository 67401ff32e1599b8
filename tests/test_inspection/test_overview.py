from __future__ import annotations

from pathlib import Path

import pytest

from fastcheck_dask.inspection.leftovers import Kind
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.tiers.object_store import open_store


def look(location):
    return overview(open_folder(location)[0])


def test_checkpoints_come_by_generation_not_by_text(location, checkpoints):
    for generation, tag in [(2, "step_10000"), (1, "step_9000"), (100000000, "step_2500")]:
        checkpoints.save(location, tag, generation=generation)
    found = look(location)
    assert [c.tag for c in found.checkpoints] == ["step_9000", "step_10000", "step_2500"]
    assert [c.step for c in found.checkpoints] == [1, 2, 100000000]
    assert all(c.complete for c in found.checkpoints)
    assert (found.damaged, found.leftovers) == ((), ())
    first = found.checkpoints[0]
    assert (first.raw_bytes, first.arrays, first.run) == (40 * 100 * 4 + 3000 * 8 + 2000 * 8, 3, "run")
    stored = [
        s for s in open_store(location).listing("") if "step_9000" in s.path and "/commits/" not in s.path
    ]
    assert first.stored_bytes == sum(s.nbytes for s in stored)


def test_unfinished_attempts_damaged_markers_and_temporaries_are_shown_as_such(location, checkpoints):
    checkpoints.save(location, "good", generation=1)
    checkpoints.save(location, "attempt", generation=2, publish=False)
    checkpoints.save(location, "harmed", generation=3)
    store = open_store(location)
    store.write(".fastcheck/commits/00000003-harmed.json", b"{}")
    found = look(location)
    assert [c.tag for c in found.checkpoints] == ["good"]
    assert [d.path for d in found.damaged] == [".fastcheck/commits/00000003-harmed.json"]
    assert [(f.kind, f.name) for f in found.leftovers] == [(Kind.UNFINISHED, "00000002-attempt")]
    store.delete(".fastcheck/commits/00000003-harmed.json")
    assert [f.kind for f in look(location).leftovers] == [Kind.UNFINISHED, Kind.UNMARKED]


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("00000001-t1/model/w/c/0/0", "model/w/c/0/0 of"),
        ("00000001-t1/model/scale/zarr.json", "model/scale/zarr.json of"),
        ("00000001-t1/model/scale/c/0", "model/scale/c/0 of"),
        (".fastcheck/manifests/00000001-t1.json", "is not in"),
    ],
)
def test_incomplete_checkpoint_says_what_is_missing(folder, checkpoints, name, said):
    checkpoints.save(folder)
    (Path(folder) / name).unlink()
    (listed,) = look(folder).checkpoints
    assert not listed.complete
    assert said in listed.problem


def test_many_missing_are_counted(folder, checkpoints):
    checkpoints.save(folder)
    for path in (Path(folder) / "00000001-t1/model/w/c").glob("*/0"):
        path.write_bytes(b"")
    assert "model/w/c/0/0 and 3 more of" in look(folder).checkpoints[0].problem
