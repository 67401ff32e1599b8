from __future__ import annotations

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.base import CommitRecord
from fastcheck_dask.engine.candidates import candidates, with_tag
from fastcheck_dask.errors import CheckpointNotFoundError
from fastcheck_dask.tiers.checkpoint_folder import CommitMarker
from fastcheck_dask.tiers.local import SlotState, SlotStatus


def record(generation, token="a", tag=None, **fields):
    return CommitRecord(
        run="r",
        generation=generation,
        tag=tag or f"t{generation}",
        token=token,
        manifest_digest="d",
        nodes=(),
        addresses=(),
        shards=0,
        parity=False,
        raw_bytes=1,
        created_unix=1.0,
        **fields,
    )


def marker(generation, token="a", tag=None):
    return CommitMarker(
        run="r",
        generation=generation,
        tag=tag or f"t{generation}",
        token=token,
        manifest_sha256="0" * 64,
        created_unix=1.0,
        raw_bytes=1,
    )


def slot(generation, token="a", state=SlotState.COMMITTED, tag=None):
    return SlotStatus(state=state, generation=generation, token=token, tag=tag or f"t{generation}")


def test_candidates_nothing_known_is_empty():
    assert candidates([], [], {}) == []


def test_candidates_same_token_everywhere_is_one():
    found = candidates([record(3)], [marker(3)], {1: slot(3)})
    assert len(found) == 1
    assert (found[0].generation, found[0].tag, found[0].token, found[0].slot) == (3, "t3", "a", 1)
    assert found[0].record == record(3)
    assert found[0].marker == marker(3)


@pytest.mark.parametrize(
    ("sources", "places"),
    [
        (([record(1)], [], {}), (True, False, None)),
        (([], [marker(1)], {}), (False, True, None)),
        (([], [], {0: slot(1)}), (False, False, 0)),
    ],
    ids=["record", "marker", "slot"],
)
def test_candidates_each_source_alone_proves_a_commit(sources, places):
    (found,) = candidates(*sources)
    assert (found.record is not None, found.marker is not None, found.slot) == places


@pytest.mark.parametrize("state", [s for s in SlotState if s is not SlotState.COMMITTED])
def test_candidates_slot_that_is_not_committed_does_not_count(state):
    assert candidates([], [], {0: slot(1, state=state)}) == []


def test_candidates_numbers_not_texts_decide_the_order():
    found = candidates([record(9), record(10)], [marker(100_000_000), marker(2)], {0: slot(99)})
    assert [c.generation for c in found] == [100_000_000, 99, 10, 9, 2]


def test_candidates_disagreement_keeps_both_coordinator_first_and_says_so(caplog):
    with caplog.at_level(logging.WARNING):
        found = candidates([record(5, "mine")], [marker(5, "other"), marker(4)], {0: slot(5, "other")})
    assert [(c.generation, c.token) for c in found] == [(5, "mine"), (5, "other"), (4, "a")]
    assert found[0].marker is None
    assert found[1].record is None
    assert found[1].slot == 0
    assert "the coordinator decides" in caplog.text
    assert "mine" in caplog.text
    assert "other" in caplog.text


def test_candidates_agreement_logs_nothing(caplog):
    with caplog.at_level(logging.DEBUG):
        candidates([record(5), record(6)], [marker(5)], {0: slot(6)})
    assert caplog.records == []


def test_candidates_many_persisted_without_marker_are_told_once_with_their_number(caplog):
    with caplog.at_level(logging.WARNING):
        candidates([record(g, persisted=g != 4) for g in range(1, 7)], [marker(2)], {})
    (told,) = caplog.messages
    assert "generation 6 (t6) is persisted" in told
    assert "nor of 2 before it" in told


def test_candidates_persisted_without_marker_is_told(caplog):
    (found,) = candidates([record(5, persisted=True)], [], {})
    assert found.generation == 5
    assert "no commit marker" in caplog.text


@given(
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), max_size=8),
    st.lists(st.tuples(st.integers(0, 5), st.sampled_from("ab")), max_size=8),
)
def test_candidates_any_sources_each_checkpoint_once_newest_first(records, markers):
    found = candidates([record(*r) for r in records], [marker(*m) for m in markers], {})
    assert {(c.generation, c.token) for c in found} == {*records, *markers}
    assert len(found) == len({*records, *markers})
    assert [c.generation for c in found] == sorted((c.generation for c in found), reverse=True)
    for candidate in found:
        assert (candidate.record is not None) == ((candidate.generation, candidate.token) in records)
        assert (candidate.marker is not None) == ((candidate.generation, candidate.token) in markers)


def test_with_tag_saved_twice_gives_the_newest():
    found = candidates([record(1, tag="x"), record(2, tag="y"), record(3, tag="x")], [], {})
    assert with_tag(found, "x").generation == 3
    assert with_tag(found, "y").generation == 2


def test_with_tag_unknown_names_those_that_there_are():
    with pytest.raises(CheckpointNotFoundError, match=r"'z'.*t2, t1"):
        with_tag(candidates([record(1), record(2)], [], {}), "z")
    with pytest.raises(CheckpointNotFoundError, match="none"):
        with_tag([], "z")
