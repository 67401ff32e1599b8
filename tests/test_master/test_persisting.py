"""What a run left unpersisted is persisted by the master, with real nodes."""

from __future__ import annotations

import pytest

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.coordination.runs import RunDescription
from fastcheck_dask.master.persisting import left_over

RECORD = CommitRecord("run-1", 3, "t", "token", "ab" * 32, ("n0",), ("fcs://h:1",), 1, False, 1, 1.0)


@pytest.mark.parametrize(
    ("description", "latest", "owner", "wanted"),
    [
        (RunDescription("/x", 1), RECORD, None, RECORD),
        (RunDescription("/x", 7), RECORD, None, RECORD),
        (RunDescription("/x", 0), RECORD, None, None),
        (RunDescription("/x", 1), RECORD, "trainer", None),
        (RunDescription("/x", 1), RECORD.as_persisted(), None, None),
        (RunDescription("/x", 1), None, None, None),
    ],
)
def test_left_over(description, latest, owner, wanted):
    assert left_over(description, latest, owner) == wanted
