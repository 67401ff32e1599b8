"""What a checkpoint says of itself: it comes back as it was, and damage is refused."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.errors import ConfigError, CorruptDataError
from fastcheck_dask.layout.notes import Notes, check_metrics

PATHS = st.lists(st.text(max_size=5), max_size=3).map(tuple)
NOTES = st.builds(
    Notes,
    metrics=st.dictionaries(st.text(min_size=1, max_size=5), st.floats(allow_nan=False), max_size=3),
    suspicious=PATHS,
    accepted=PATHS,
    unchanged=st.booleans(),
)


@given(NOTES)
def test_notes_round_trip(notes):
    document = json.dumps(notes.to_document(), allow_nan=False)
    assert Notes.from_document(json.loads(document)) == notes
    assert bool(notes) == (document != "{}")


def test_notes_with_nan_are_equal_to_themselves_read_again():
    notes = Notes(check_metrics({"loss": np.float32("nan"), "best": -math.inf}))
    again = Notes.from_document(json.loads(json.dumps(notes.to_document(), allow_nan=False)))
    assert again == notes
    assert math.isnan(again.metrics["loss"])


def test_check_metrics_takes_numbers_of_all_kinds():
    given_ = {"a": 1, "b": np.float32(0.5), "c": torch.tensor(2.0), "d": True}
    assert check_metrics(given_) == {"a": 1.0, "b": 0.5, "c": 2.0, "d": 1.0}
    assert check_metrics(None) == {}


@pytest.mark.parametrize(
    "metrics", [3, [1], {"a": "x"}, {"a": None}, {1: 2.0}, {"": 1}, {"a": torch.ones(2)}]
)
def test_check_metrics_refuses_what_is_no_number(metrics):
    with pytest.raises(ConfigError, match="metric"):
        check_metrics(metrics)


@pytest.mark.parametrize(
    "document",
    [[], {"metrics": 1}, {"metrics": {"a": "x"}}, {"metrics": {"a": True}}, {"suspicious": "a"},
     {"accepted": [1]}, {"unchanged": 1}],
)  # fmt: skip
def test_notes_damaged_are_refused(document):
    with pytest.raises(CorruptDataError):
        Notes.from_document(document)
