"""The rules by which a joint save is matched and decided, and what is written of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.coordination.joint import (
    JointSave,
    JointView,
    Late,
    Outcome,
    Part,
    Pass,
    Rank,
    Take,
    Wait,
    judge_joint,
    match,
    named,
    run_of_rank,
)
from fastcheck_dask.errors import ConfigError, UnknownFormatError

ME = Rank(1, 3)


@pytest.fixture
def view(record):
    """Make a joint save of three ranks, begun by rank 0 as number 5, tag "t"."""

    def make(*ranks, outcome=None, **fields):
        save = replace(JointSave(5, "t", 3, 0), **fields)
        parts = {
            rank: Part(rank, f"owner {rank}", record(token=f"k{rank}", generation=rank)) for rank in ranks
        }
        return JointView(save, parts, outcome)

    return make


@pytest.mark.parametrize(
    ("fields", "gone", "says"),
    [
        ({}, (), None),
        ({"tag": "u"}, (), "rank 1 saves 't', and rank 0 had begun 'u'"),
        ({"world_size": 4}, (), "rank 1 was started with world_size=3, rank 0 with world_size=4"),
        ({}, (0, 2), "ranks 0, 2 prepared it, and died"),
        ({"world_size": 4, "tag": "u"}, (2,), "rank 2 prepared it"),
    ],
)
def test_match_undecided_is_taken_or_aborted_with_both_sides(view, fields, gone, says):
    found = match(view(0, **fields), ME, "t", gone=gone)
    if says is None:
        assert found == Take()
    else:
        assert isinstance(found, Outcome)
        assert not found.committed
        assert says in found.reason
        assert found.leftover == bool(gone)


def test_match_undecided_with_own_part_is_aborted(view):
    found = match(view(1), ME, "t")
    assert isinstance(found, Outcome)
    assert not found.committed


@pytest.mark.parametrize(
    ("outcome", "tag", "joined_after", "wanted"),
    [
        (Outcome(False, "why"), "t", 0, Late("why")),
        (Outcome(False, "why"), "t", 4, Late("why")),
        (Outcome(False, "why"), "t", 5, Pass()),
        (Outcome(False, "why"), "u", 0, Pass()),
        (Outcome(False, "why", leftover=True), "t", 0, Pass()),
        (Outcome(True, "all"), "t", 0, Pass()),
    ],
)
def test_match_decided_is_late_only_for_its_own_tag_in_this_life(view, outcome, tag, joined_after, wanted):
    assert match(view(outcome=outcome), ME, tag, joined_after=joined_after) == wanted


@given(st.sets(st.integers(0, 2)), st.sets(st.integers(0, 2)), st.booleans())
def test_judge_commits_exactly_with_all_parts(present, gone, late):
    record_of = Part.from_bytes(_PART)
    parts = {rank: replace(record_of, rank=rank) for rank in present}
    found = judge_joint(JointView(JointSave(5, "t", 3, 0), parts), 0, gone=gone, late="late" if late else "")
    missing = {0, 1, 2} - present
    if not missing:
        assert found.committed
        assert len(found.tokens) == len(found.generations) == 3
    elif missing & gone:
        assert not found.committed
        assert named(missing & gone) in found.reason
        assert "died" in found.reason
    elif late:
        assert not found.committed
        assert named(missing) in found.reason
    else:
        assert found == Wait()


def test_judge_decided_returns_that(view):
    outcome = Outcome(False, "why")
    assert judge_joint(view(0, 1, 2, outcome=outcome), 0, gone=(), late="") is outcome


_PART = (
    b'{"owner":"o","rank":0,"record":"{\\"addresses\\":[],\\"created_unix\\":1.0,\\"generation\\":1,'
    b'\\"manifest_digest\\":\\"d\\",\\"nodes\\":[],\\"parity\\":false,\\"persisted\\":false,\\"raw_bytes\\":1,'
    b'\\"run\\":\\"r\\",\\"shards\\":0,\\"tag\\":\\"t\\",\\"token\\":\\"k\\"}"}'
)


def test_bytes_round_trip(view):
    for one in (
        view(0).parts[0],
        view().save,
        Outcome(True, "all", ("a", "b"), (1, 2)),
        Outcome(False, "why", leftover=True),
    ):
        assert type(one).from_bytes(one.to_bytes()) == one
    assert Part.from_bytes(_PART).to_bytes() == _PART


@pytest.mark.parametrize("kind", [Part, JointSave, Outcome])
@pytest.mark.parametrize("data", [b"", b"[]", b"{", b'{"rank":0,"owner":"o","record":5}', b'{"x":1}'])
def test_bytes_of_something_else_are_refused(kind, data):
    with pytest.raises(UnknownFormatError):
        kind.from_bytes(data)


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0), (True, 2), (0, 10_001), ("0", 2)])
def test_rank_senseless_is_refused_with_both_numbers(rank, world_size):
    with pytest.raises(ConfigError, match=f"rank={rank!r} and world_size={world_size!r}"):
        Rank(rank, world_size)


def test_run_of_rank_too_long_is_refused():
    with pytest.raises(ConfigError, match="run_id"):
        run_of_rank("x" * 125, 0)


def test_named_many_are_shortened():
    assert named(range(100)).endswith("15 and 84 more")
