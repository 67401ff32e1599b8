from __future__ import annotations

import numpy as np
import pytest

from fastcheck_dask.errors import LayoutError
from fastcheck_dask.inspection.bisection import first_bad
from fastcheck_dask.inspection.location import open_folder
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.folder_store import FolderStore
from fastcheck_dask.tiers.object_store import open_store


@pytest.fixture
def search(folder, checkpoints):
    """Return a function that saves one checkpoint for each state and looks through them."""

    def found(states, tensor=None, **options):
        known = len(CheckpointFolder(open_store(folder)).committed())
        for generation, state in list(enumerate(states, 1))[known:]:
            checkpoints.save(folder, f"t{generation}", generation=generation, state=state)
        opened, _ = open_folder(folder)
        return first_bad(opened, opened.committed(), tensor, **options)

    return found


def values(fill=1.0, *, at=None, to=np.nan):
    array = np.full(3000, fill)
    if at is not None:
        array[at] = to
    return array


def test_first_of_those_that_are_bad(search):
    states = [{"v": values(), "w": values()} for _ in range(3)]
    states.append({"v": values(at=2999), "w": values(at=[5, 6], to=-np.inf)})
    states.append({"v": values(at=1), "w": values()})
    found = search(states)
    assert [(f.tag, f.path, f.nan, f.inf) for f in found.findings] == [("t4", "v", 1, 0), ("t4", "w", 0, 2)]
    assert (found.last_good, found.searched) == ("t3", ("t1", "t2", "t3", "t4"))


def test_mended_in_between_the_first_is_found_all_the_same(search):
    found = search([{"w": values(at=at)} for at in (None, 7, None, None, 8)], "w")
    assert (found.findings[0].tag, found.last_good) == ("t2", "t1")


def test_one_tensor_is_asked_for_and_no_other_counts(search):
    states = [{"v": values(at=1), "w": values()}, {"v": values(at=1), "w": values(at=4)}]
    assert search(states, "w").findings[0].tag == "t2"


def test_inline_tensors_are_looked_at(search):
    (finding,) = search([{"s": np.float32([1])}, {"s": np.float32([np.nan])}]).findings
    assert (finding.tag, finding.path) == ("t2", "s")


def test_jump_is_measured_against_the_checkpoint_before(search):
    states = [{"w": values(fill)} for fill in (1.0, 1.01, 1.02, 2.0, 2.0)]
    assert search(states).findings == ()
    (finding,) = search(states, jump=0.5).findings
    assert (finding.tag, finding.jump) == ("t4", pytest.approx(0.98 / 1.02))
    assert search(states, jump=5.0).findings == ()


def test_same_bits_of_another_dtype_are_looked_at_again(search):
    bits = np.full(3000, 0x7FC00000, np.int32)
    (finding,) = search([{"w": bits}, {"w": bits.view(np.float32)}]).findings
    assert (finding.tag, finding.nan) == ("t2", 3000)


def test_what_did_not_change_is_read_once(search, monkeypatch):
    asked = []
    read = FolderStore.read
    monkeypatch.setattr(FolderStore, "read", lambda self, path: asked.append(path) or read(self, path))
    assert search([{"w": values()}] * 4).last_good == "t4"
    assert len([path for path in asked if "/w/c/" in path]) == len(
        {p for p in asked if "00000001" in p and "/w/c/" in p}
    )


def test_damaged_checkpoint_is_passed_over_and_named(search, folder):
    search([{"w": values(n)} for n in (1, 2, 3)])
    open_store(folder).delete("00000002-t2/w/c/0")
    opened, _ = open_folder(folder)
    found = first_bad(opened, opened.committed())
    assert found.searched == ("t1", "t3")
    assert "00000002-t2/w/c/0" in found.unreadable[0]


def test_tensor_that_no_checkpoint_has_is_refused(search):
    with pytest.raises(LayoutError, match="'nothing'"):
        search([{"w": values()}], "nothing")
