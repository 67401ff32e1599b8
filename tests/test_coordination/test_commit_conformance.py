"""What every coordinator does about commits, relocations and aborts; the same tests for each."""

from __future__ import annotations

import threading

import pytest

from fastcheck_dask.coordination import Abort
from fastcheck_dask.coordination.entries import Create, Write
from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
)


def test_latest_unknown_run_is_none(coordinator):
    assert coordinator.latest("run-1") is None
    assert coordinator.commits("run-1") == ()


def test_commit_several_latest_and_order(coordinator, other, record):
    claim = coordinator.claim("run-1", "a")
    records = [record(generation=g, tag=f"t{g}", token=f"token-{g}") for g in (1, 2, 9, 10, 11)]
    for one in records:
        assert coordinator.commit(one, claim) == one
    assert other.latest("run-1") == records[-1]
    assert other.commits("run-1") == tuple(records)
    assert other.commits("run-2") == ()


def test_commit_same_token_again_returns_what_is_stored(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    first = coordinator.commit(record(), claim)
    coordinator.commit(record(generation=2, token="token-2"), claim)
    assert coordinator.commit(record(tag="renamed"), claim) == first
    assert coordinator.latest("run-1").generation == 2


def test_commit_decided_generation_with_other_token_conflicts(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    coordinator.commit(record(), claim)
    with pytest.raises(CommitConflictError, match="epoch1"):
        coordinator.commit(record(token="other", tag="mine"), claim)
    assert coordinator.commits("run-1") == (record(),)


def test_commit_generation_below_latest_conflicts(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    coordinator.commit(record(generation=5), claim)
    with pytest.raises(CommitConflictError, match="5"):
        coordinator.commit(record(generation=3, token="other"), claim)
    assert coordinator.commits("run-1") == (record(generation=5),)


def test_commit_claim_taken_over_is_fenced(coordinator, other, record):
    old = coordinator.claim("run-1", "a")
    coordinator.commit(record(), old)
    old.close()
    new = other.claim("run-1", "b")
    with pytest.raises(FencedError):
        coordinator.commit(record(generation=2, token="old"), old)
    assert other.commit(record(generation=2, token="new"), new).token == "new"
    with pytest.raises(FencedError):
        coordinator.commit(record(generation=2, token="old"), old)
    # What took effect before stays known to its author.
    assert coordinator.commit(record(), old) == record()


def test_commit_claim_given_back_is_fenced(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    claim.close()
    claim.close()
    with pytest.raises(FencedError):
        coordinator.commit(record(), claim)
    assert coordinator.latest("run-1") is None


def test_commit_earlier_claim_of_same_session_is_fenced(coordinator, record):
    earlier = coordinator.claim("run-1", "a")
    earlier.close()
    now = coordinator.claim("run-1", "a")
    with pytest.raises(FencedError):
        coordinator.commit(record(), earlier)
    assert coordinator.commit(record(), now) == record()


def test_commit_claim_of_another_session_is_fenced(coordinator, other, record):
    claim = coordinator.claim("run-1", "a")
    with pytest.raises(FencedError):
        other.commit(record(), claim)


@pytest.mark.parametrize(
    "wrong",
    [{"run": "run-2"}, {"generation": -1}, {"generation": 10**10}, {"generation": True}, {"token": ""}],
)
def test_commit_senseless_record_is_refused(coordinator, record, wrong):
    claim = coordinator.claim("run-1", "a")
    with pytest.raises(ConfigError):
        coordinator.commit(record(**wrong), claim)
    assert coordinator.commits("run-1") == ()


def test_commit_record_too_large_is_refused_with_its_size(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    with pytest.raises(CoordinationError, match=r"1,000,\d{3} bytes"):
        coordinator.commit(record(tag="x" * 1_000_000), claim)
    large = record(tag="x" * 800_000)
    assert coordinator.commit(large, claim) == large == coordinator.latest("run-1")


def test_mark_persisted_is_seen_and_idempotent(coordinator, other, record):
    claim = coordinator.claim("run-1", "a")
    coordinator.commit(record(), claim)
    coordinator.commit(record(generation=2, token="token-2"), claim)
    other.mark_persisted("run-1", 1, "token-1")
    coordinator.mark_persisted("run-1", 1, "token-1")
    assert [one.persisted for one in coordinator.commits("run-1")] == [True, False]
    assert coordinator.commit(record(), claim) == record(persisted=True)


def test_mark_persisted_unknown_generation_is_ignored(coordinator):
    coordinator.mark_persisted("run-1", 7, "token-7")
    assert coordinator.commits("run-1") == ()


def test_mark_persisted_other_token_conflicts_and_marks_nothing(coordinator, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    with pytest.raises(CommitConflictError):
        coordinator.mark_persisted("run-1", 1, "other")
    assert coordinator.latest("run-1").persisted is False


def test_commits_coordinator_reopened_are_there(url, open_coordinator, record):
    first = open_coordinator(url)
    first.commit(record(), first.claim("run-1", "a"))
    first.close()
    second = open_coordinator(url)
    assert second.latest("run-1") == record()
    assert second.commit(record(generation=2, token="n"), second.claim("run-1", "b")).generation == 2


# Relocations


def office(coordinator):
    """Lead, and return the fencing token."""
    found = coordinator.entries.get("epoch")
    coordinator.entries.apply(
        Create("epoch", b"{}") if found is None else Write("epoch", b"{}", found.version)
    )
    return 0 if found is None else found.version + 1


def moved(record):
    return record.held_by(("n0", "n7"), ("fcs://h:1", "fcs://h:9"))


def test_relocate_newest_generation_is_seen_by_all_and_keeps_the_rest(coordinator, other, record):
    claim, token = coordinator.claim("run-1", "a"), office(other)
    coordinator.commit(record(), claim)
    coordinator.mark_persisted("run-1", 1, "token-1")
    read = other.latest("run-1")
    for _ in range(2):
        assert other.relocate(read, moved(read), fencing_token=token) == moved(record(persisted=True))
    assert coordinator.commits("run-1") == (moved(record(persisted=True)),)
    assert coordinator.commit(record(), claim) == moved(record(persisted=True))
    following = record(generation=2, token="token-2")
    assert coordinator.commit(following, claim) == following == other.latest("run-1")


def test_relocate_before_it_was_persisted_the_mark_keeps_the_nodes(coordinator, other, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    other.relocate(record(), moved(record()), fencing_token=office(other))
    coordinator.mark_persisted("run-1", 1, "token-1")
    assert other.latest("run-1") == moved(record(persisted=True))


def test_relocate_by_deposed_master_is_fenced(coordinator, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    with pytest.raises(FencedError):
        coordinator.relocate(record(), moved(record()), fencing_token=0)
    token = office(coordinator)
    office(coordinator)
    with pytest.raises(FencedError):
        coordinator.relocate(record(), moved(record()), fencing_token=token)
    assert coordinator.latest("run-1") == record()


@pytest.mark.parametrize("meanwhile", ["newer", "relocated", "other token", "nothing"])
def test_relocate_of_what_is_not_so_any_more_conflicts(coordinator, record, meanwhile):
    claim, token, read = coordinator.claim("run-1", "a"), office(coordinator), record()
    if meanwhile != "nothing":
        coordinator.commit(record(), claim)
    if meanwhile == "newer":
        coordinator.commit(record(generation=2, token="token-2"), claim)
    elif meanwhile == "relocated":
        elsewhere = record().held_by(("n5", "n1"), ("fcs://h:5", "fcs://h:2"))
        coordinator.relocate(record(), elsewhere, fencing_token=token)
    elif meanwhile == "other token":
        read = record(token="other")
    before = coordinator.commits("run-1")
    with pytest.raises(CommitConflictError):
        coordinator.relocate(read, moved(read), fencing_token=token)
    assert coordinator.commits("run-1") == before


def test_relocate_that_changes_more_than_the_nodes_is_refused(coordinator, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    token = office(coordinator)
    for wrong in (
        record(tag="other"),
        record().held_by(("n0",), ("fcs://h:1",)),
        record().held_by(("n0", "n0"), ("fcs://h:1", "fcs://h:1")),
    ):
        with pytest.raises(ConfigError):
            coordinator.relocate(record(), wrong, fencing_token=token)
    assert coordinator.latest("run-1") == record()


# Aborts


def test_abort_undecided_generation_author_is_told_by_whom_and_why(coordinator, other, record):
    claim = coordinator.claim("run-1", "a")
    abort = other.abort("run-1", 1, token="r", reason="resolver: the author was silent")
    assert abort == Abort("run-1", 1, "r", "resolver: the author was silent")
    with pytest.raises(CommitConflictError, match="resolver: the author was silent"):
        coordinator.commit(record(), claim)
    with pytest.raises(CommitConflictError, match="resolver: the author was silent"):
        coordinator.commit(record(token="r"), claim)
    assert (coordinator.latest("run-1"), coordinator.commits("run-1")) == (None, ())
    assert coordinator.newest_decided("run-1") == 1
    assert coordinator.commit(record(generation=2), claim) == record(generation=2)


def test_abort_committed_generation_returns_its_record(coordinator, other, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    assert other.abort("run-1", 1, token="r", reason="late") == record()
    assert coordinator.latest("run-1") == record()


def test_abort_again_first_one_stays(coordinator, other):
    first = coordinator.abort("run-1", 1, token="r", reason="first")
    assert other.abort("run-1", 1, token="s", reason="second") == first
    assert coordinator.abort("run-1", 1, token="r", reason="again") == first


def test_abort_between_commits_is_skipped(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    assert coordinator.newest_decided("run-1") == 0
    first, third = record(), record(generation=3, token="token-3")
    coordinator.commit(first, claim)
    coordinator.abort("run-1", 2, token="r", reason="why")
    coordinator.commit(third, claim)
    coordinator.abort("run-1", 9, token="r", reason="why")
    assert coordinator.commits("run-1") == (first, third)
    assert coordinator.latest("run-1") == third
    assert coordinator.newest_decided("run-1") == 9
    assert coordinator.newest_decided("run-2") == 0


def test_abort_marked_persisted_conflicts(coordinator):
    coordinator.abort("run-1", 1, token="r", reason="why")
    with pytest.raises(CommitConflictError):
        coordinator.mark_persisted("run-1", 1, "r")


def test_abort_senseless_or_too_long_is_refused(coordinator):
    for run, generation, token in (
        ("../x", 1, "r"),
        ("run-1", -1, "r"),
        ("run-1", True, "r"),
        ("run-1", 1, ""),
    ):
        with pytest.raises(ConfigError):
            coordinator.abort(run, generation, token=token, reason="why")
    with pytest.raises(CoordinationError, match=r"1,000,\d{3} bytes"):
        coordinator.abort("run-1", 1, token="r", reason="x" * 1_000_000)
    assert coordinator.newest_decided("run-1") == 0


def test_author_and_resolver_race_both_learn_the_same_decision(coordinator, other, record):
    claim = coordinator.claim("run-1", "a")
    start, outcomes = threading.Barrier(2), {}

    def author(generation, token):
        start.wait()
        try:
            outcomes["author"] = coordinator.commit(record(generation=generation, token=token), claim)
        except CommitConflictError as error:
            outcomes["author"] = str(error)

    def resolver(generation):
        start.wait()
        outcomes["resolver"] = other.abort("run-1", generation, token="r", reason="resolved")

    committed = []
    for generation in range(1, 41):
        token = f"t{generation}"
        threads = [
            threading.Thread(target=author, args=(generation, token)),
            threading.Thread(target=resolver, args=(generation,)),
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if isinstance(outcomes["resolver"], Abort):
            assert "resolved" in outcomes["author"]
        else:
            assert outcomes["author"] == outcomes["resolver"] == record(generation=generation, token=token)
            committed.append(generation)
    assert [one.generation for one in other.commits("run-1")] == committed
    assert other.newest_decided("run-1") == 40


# Several at once


def test_commit_threads_race_one_wins_and_losers_know(coordinator, record):
    claim = coordinator.claim("run-1", "a")
    start, outcomes = threading.Barrier(4), {}

    def race(token):
        start.wait()
        try:
            outcomes[token] = coordinator.commit(record(token=token), claim).token
        except CommitConflictError:
            outcomes[token] = None

    threads = [threading.Thread(target=race, args=(f"t{number}",)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    winners = [token for token, got in outcomes.items() if got]
    assert len(outcomes) == 4
    assert winners == [coordinator.latest("run-1").token]


def test_own_processes_take_turns_no_generation_is_lost_or_decided_twice(url, coordinator, actor_of):
    rounds = 8
    actors = [actor_of(url) for _ in range(3)]
    for number, actor in enumerate(actors):
        actor.tell("own", "run-1", rounds, f"actor{number}")
    assert [actor.answer() for actor in actors] == [True] * 3
    commits = coordinator.commits("run-1")
    assert [one.generation for one in commits] == list(range(3 * rounds))
    assert len({one.token for one in commits}) == 3 * rounds
    fences = [one.created_unix for one in commits]
    assert fences == sorted(set(fences))


def test_commit_processes_race_for_one_generation_one_record_is_in_force(url, coordinator, actor_of, record):
    actors = [actor_of(url) for _ in range(4)]
    for number, actor in enumerate(actors):
        actor.tell("claim and commit", record(token=f"t{number}").to_bytes().decode())
    answers = [actor.answer() for actor in actors]
    winners = [answer for answer in answers if answer.startswith("t")]
    assert winners == [coordinator.latest("run-1").token]
    assert [answer for answer in answers if answer != winners[0]] == ["CommitConflictError"] * 3
