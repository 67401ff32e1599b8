from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination import CommitRecord
from fastcheck_dask.coordination.commits import MAX_ENTRY_BYTES, bounded, judge, read_record
from fastcheck_dask.errors import CommitConflictError, CoordinationError, FencedError, UnknownFormatError

RECORD = CommitRecord("run", 5, "tag", "mine", "d", (), (), 0, False, 0, 0.0)


@given(
    token=st.sampled_from([None, "mine", "other"]),
    latest=st.none() | st.integers(0, 9),
    in_force=st.booleans(),
)
def test_judge_every_situation_has_its_outcome(token, latest, in_force):
    stored = None if token is None else replace(RECORD, token=token, tag="stored")

    def call():
        return judge(RECORD, stored=stored, latest=latest, in_force=in_force)

    if token == "mine":
        assert call() is stored
    elif not in_force:
        with pytest.raises(FencedError, match="run"):
            call()
    elif token == "other" or (latest is not None and latest >= 5):
        with pytest.raises(CommitConflictError, match="generation 5"):
            call()
    else:
        assert call() is None


def test_read_record_of_another_place_is_unknown_format():
    assert read_record(RECORD.to_bytes(), run="run", generation=5) == RECORD
    for place in ({"run": "other", "generation": 5}, {"run": "run", "generation": 6}):
        with pytest.raises(UnknownFormatError, match="generation 5"):
            read_record(RECORD.to_bytes(), **place)


def test_bounded_limit_is_inclusive():
    assert len(bounded(bytes(MAX_ENTRY_BYTES), "it")) == MAX_ENTRY_BYTES
    with pytest.raises(CoordinationError, match="900,001"):
        bounded(bytes(MAX_ENTRY_BYTES + 1), "it")
