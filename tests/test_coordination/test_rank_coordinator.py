"""Ranks that commit together, interleaved step by step: some die, some replies are lost, time passes."""

from __future__ import annotations

import threading
from dataclasses import replace

import pytest

from fastcheck_dask.coordination import CommitRecord
from fastcheck_dask.coordination.joint import Part, Rank, run_of_rank
from fastcheck_dask.coordination.joint_saves import JointSaves
from fastcheck_dask.coordination.rank_coordinator import RankCoordinator
from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
    RunInUseError,
)
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.testing.fakes import FakeCoordinator

PATIENCE = 60.0
RECORD = CommitRecord("r", 1, "t", "k", "d", ("n0",), ("a",), 1, False, 1, 1.5)


@pytest.fixture
def rank():
    """Make a rank's coordinator over shared memory, without turns."""
    coordinator = FakeCoordinator()

    def make(number, size=2, **options):
        made = RankCoordinator(
            coordinator.another(),
            run="r",
            me=Rank(number, size),
            **({"commit_seconds": PATIENCE} | options),
        )
        return made, made.claim(run_of_rank("r", number), f"process of rank {number}")

    return make


def part(number, tag="t", generation=1):
    return replace(
        RECORD, run=run_of_rank("r", number), tag=tag, token=f"{tag}{number}", generation=generation
    )


def both(*calls):
    """Run calls in threads; return what each gave or raised."""
    found = [None] * len(calls)

    def run(index, call):
        try:
            found[index] = call()
        except CoordinationError as error:
            found[index] = error

    threads = [threading.Thread(target=run, args=pair) for pair in enumerate(calls)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


def test_commit_is_that_of_the_ranks_own_run_too(rank):
    (zero, claim0), (one, claim1) = rank(0), rank(1)
    found = both(lambda: zero.commit(part(0), claim0), lambda: one.commit(part(1, generation=7), claim1))
    assert found == [part(0), part(1, generation=7)]
    assert zero.latest("r.r00000") == part(0)
    assert one.commits("r.r00001") == (part(1, generation=7),)
    (joint,) = one.joint_commits()
    assert (joint.tag, joint.world_size) == ("t", 2)
    assert (joint.tokens, joint.generations) == (("t0", "t1"), (1, 7))


def test_commit_one_rank_gave_up_the_other_is_told_why(rank):
    (zero, claim0), (one, claim1) = rank(0), rank(1)
    found = both(
        lambda: zero.commit(part(0), claim0), lambda: one.give_up("t", reason="node n3 is too small")
    )
    assert isinstance(found[0], CommitConflictError)
    assert "rank 1 failed: node n3 is too small" in str(found[0])
    assert zero.newest_decided("r.r00000") == 1
    assert (zero.latest("r.r00000"), zero.joint_commits()) == (None, [])
    found = both(lambda: zero.commit(part(0, "u", 2), claim0), lambda: one.commit(part(1, "u", 1), claim1))
    assert found == [part(0, "u", 2), part(1, "u", 1)]


def test_commit_after_the_other_gave_up_is_told_at_once(rank):
    (zero, claim0), (one, _) = rank(0), rank(1)
    one.give_up("t", reason="out of memory")
    with pytest.raises(CommitConflictError, match=r"before rank 0 came.*out of memory"):
        zero.commit(part(0), claim0)


def test_commit_other_world_size_is_refused_with_both_numbers(rank):
    (zero, claim0), (one, claim1) = rank(0, 2), rank(1, 3)
    found = both(lambda: zero.commit(part(0), claim0), lambda: one.give_up("t", reason="x"))
    assert "world_size=3" in str(found[0])
    assert "world_size=2" in str(found[0])
    assert claim1.run == "r.r00001"


def test_commit_rank_taken_over_is_fenced_and_puts_nothing_there(rank):
    zero, claim0 = rank(0)
    late = JointSaves(zero._saves._entries, "r", Rank(0, 2))
    late.join(claim0.order, "late")
    late.begin("u", above=0, last=late.last())
    later, _ = _taken_over(zero)
    with pytest.raises(FencedError):
        zero.commit(part(0), claim0)
    with pytest.raises(FencedError, match="taken over by"):
        late.begin("t", above=0, last=late.last())
    with pytest.raises(FencedError, match="taken over by"):
        late.add_part(1, Part(0, "late", part(0, "u")))
    assert late.numbers() == [1]
    assert late.read(1).parts == {}
    assert later.joint_commits() == []
    with pytest.raises(FencedError, match="taken over by"):
        late.join(claim0.order, "late")


def _taken_over(zero):
    made = RankCoordinator(zero._inner.another(), run="r", me=Rank(0, 2), commit_seconds=PATIENCE)
    return made, made.claim("r.r00000", "another", takeover=True)


def test_claim_of_another_run_is_refused(rank):
    zero, _ = rank(0)
    with pytest.raises(ConfigError):
        zero.claim("r.r00001", "x")


def test_claim_in_use_names_the_owner(rank):
    rank(0)
    with pytest.raises(RunInUseError, match="process of rank 0"):
        rank(0)


def test_numbers_go_on_above_what_the_object_tier_knows(rank):
    (zero, claim0), (one, claim1) = rank(0, above=41), rank(1, above=41)
    both(lambda: zero.commit(part(0), claim0), lambda: one.commit(part(1), claim1))
    assert [joint.number for joint in zero.joint_commits()] == [42]


def test_coordinator_lost_while_waiting_part_is_kept_until_it_is_known(rank):
    clock = FakeClock()
    (zero, claim0), (one, claim1) = rank(0, clock=clock), rank(1)
    numbers = zero._saves

    def lose_it(*_):
        zero._inner.unreachable = True
        clock.advance(PATIENCE)
        raise CoordinationError("the coordinator does not answer")

    numbers.watch = lose_it
    with pytest.raises(CoordinationError, match="does not answer"):
        zero.commit(part(0), claim0)
    with pytest.raises(CoordinationError):
        zero.newest_decided("r.r00000")
    # Meanwhile the other rank finds both parts there.
    assert one.commit(part(1), claim1) == part(1)
    zero._inner.unreachable = False
    assert zero.newest_decided("r.r00000") == 1
    assert zero.latest("r.r00000") == part(0)


def test_coordinator_lost_while_waiting_undecided_is_aborted_before_the_next_save(rank):
    clock = FakeClock()
    (zero, claim0), (one, claim1) = rank(0, clock=clock), rank(1)

    def lose_it(*_):
        clock.advance(PATIENCE)
        raise CoordinationError("the coordinator does not answer")

    zero._saves.watch, watch = lose_it, zero._saves.watch
    with pytest.raises(CoordinationError, match="does not answer"):
        zero.commit(part(0), claim0)
    zero._saves.watch = watch
    assert zero.newest_decided("r.r00000") == 1
    assert (zero.latest("r.r00000"), zero._saves.read(1).outcome.committed) == (None, False)
    found = both(lambda: zero.commit(part(0, "u", 2), claim0), lambda: one.commit(part(1, "u", 1), claim1))
    assert found == [part(0, "u", 2), part(1, "u", 1)]


def test_give_up_of_a_part_in_doubt_settles_it_and_the_other_is_told_at_once(rank):
    clock = FakeClock()
    (zero, claim0), (one, claim1) = rank(0, clock=clock), rank(1)

    def lose_it(*_):
        clock.advance(PATIENCE)
        raise CoordinationError("the coordinator does not answer")

    zero._saves.watch = lose_it
    with pytest.raises(CoordinationError, match="does not answer"):
        zero.commit(part(0), claim0)
    zero.give_up("t", token="t0", reason="the coordinator does not answer")
    assert not zero._saves.read(1).outcome.committed
    with pytest.raises(CommitConflictError, match=r"before rank 1 came to it: .*lost the coordinator"):
        one.commit(part(1), claim1)
    assert zero._saves.numbers() == [1]


def test_commit_under_a_claim_that_was_lost_begins_nothing(rank):
    """The new owner of the rank's run has not come as far as its fence: the claim alone says it."""
    zero, claim0 = rank(0, size=1)
    zero._inner.another().claim("r.r00000", "another", takeover=True)
    with pytest.raises(FencedError, match="taken over by 'another'"):
        zero.commit(part(0), claim0)
    assert zero._saves.numbers() == []


def test_give_up_of_a_decided_save_harms_no_later_one(rank):
    (zero, claim0), (one, _) = rank(0), rank(1)
    one.give_up("t", reason="out of memory")
    with pytest.raises(CommitConflictError):
        zero.commit(part(0), claim0)
    zero.give_up("t", token="t0", reason="it was aborted")
    assert zero._saves.numbers() == [1]
