"""What every coordinator does; the same tests for each."""

from __future__ import annotations

import ast
import contextlib
import os
import pickle
import threading
from pathlib import Path

import pytest

import fastcheck_dask.coordination
from fastcheck_dask.coordination import Abort
from fastcheck_dask.coordination.entries import Create, Write
from fastcheck_dask.errors import (
    ClosedError,
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
    RunInUseError,
)


@pytest.fixture(params=["embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def url(request, tmp_path):
    if request.param == "zookeeper":
        return request.getfixturevalue("zookeeper_url")
    return f"sqlite://{tmp_path}/coordinator/c.db"


@pytest.fixture
def coordinator(url, open_coordinator):
    return open_coordinator(url)


@pytest.fixture
def other(url, open_coordinator):
    return open_coordinator(url)


def names(coordinator):
    return [info.name for info in coordinator.nodes()]


# Registry


def test_nodes_nothing_registered_is_empty(coordinator):
    assert coordinator.nodes() == ()


def test_nodes_several_registered_come_sorted_and_whole(coordinator, other, node):
    infos = [node(name, rack=f"rack-{name}", capacity_bytes=1 << 40) for name in ("b", "a", "c")]
    coordinator.register(infos[0])
    other.register(infos[1])
    coordinator.register(infos[2])
    assert coordinator.nodes() == other.nodes() == (infos[1], infos[0], infos[2])


def test_registration_updated_is_seen_by_others(coordinator, other, node):
    registration = coordinator.register(node("a"))
    registration.update(node("a", state="draining"))
    assert other.nodes() == (node("a", state="draining"),)


def test_registration_updated_with_another_name_is_refused(coordinator, node):
    registration = coordinator.register(node("a"))
    with pytest.raises(ConfigError, match="'a'"):
        registration.update(node("b"))
    assert names(coordinator) == ["a"]


def test_registration_closed_twice_leaves_once_and_name_is_free(coordinator, other, node):
    registration = coordinator.register(node("a"))
    registration.close()
    registration.close()
    assert names(other) == []
    other.register(node("a"))
    registration.close()
    assert names(coordinator) == ["a"]
    with pytest.raises(ClosedError):
        registration.update(node("a"))


def test_register_name_of_live_node_is_refused(coordinator, other, node):
    coordinator.register(node("a", rack="first"))
    for one in (coordinator, other):
        with pytest.raises(CoordinationError, match="'a'"):
            one.register(node("a", rack="second"))
    assert coordinator.nodes() == (node("a", rack="first"),)


def test_register_bad_name_is_refused(coordinator, node):
    with pytest.raises(ConfigError):
        coordinator.register(node("a/b"))


def test_nodes_process_killed_disappears_and_name_is_free(url, coordinator, actor_of, eventually, node):
    actor = actor_of(url)
    assert actor.ask("register", "a") is True
    assert names(coordinator) == ["a"]
    actor.kill()
    eventually(lambda: names(coordinator) == [])
    coordinator.register(node("a"))
    assert names(coordinator) == ["a"]


def test_register_name_of_killed_process_at_once_succeeds(url, coordinator, actor_of, node):
    actor = actor_of(url)
    actor.ask("register", "a")
    actor.kill()
    coordinator.register(node("a"))
    assert coordinator.nodes() == (node("a"),)


# Claims


def test_owner_is_told_to_everybody_while_the_claim_lasts(coordinator, other):
    assert coordinator.owner("run-1") is None
    assert coordinator.runs() == ()
    claim = coordinator.claim("run-1", "trainer 7")
    coordinator.claim("run-0", "trainer 8")
    assert coordinator.owner("run-1") == other.owner("run-1") == "trainer 7"
    assert other.owner("run-2") is None
    claim.close()
    assert other.owner("run-1") is None
    assert other.runs() == ("run-0", "run-1")
    with pytest.raises(ConfigError):
        coordinator.owner("a/b")


def test_owner_process_killed_is_none(url, coordinator, actor_of, eventually):
    actor = actor_of(url)
    assert isinstance(actor.ask("claim", "run-1", 0.0), int)
    assert coordinator.owner("run-1") == "actor"
    actor.kill()
    eventually(lambda: coordinator.owner("run-1") is None)


def test_claim_owned_run_is_refused_and_names_owner(coordinator, other):
    coordinator.claim("run-1", "trainer on host-7")
    for one in (coordinator, other):
        with pytest.raises(RunInUseError, match="trainer on host-7"):
            one.claim("run-1", "second")


def test_claim_other_run_is_independent(coordinator, other):
    assert coordinator.claim("run-1", "a").run == "run-1"
    assert other.claim("run-2", "b").run == "run-2"


def test_claim_given_back_is_free_and_token_grows(coordinator, other):
    first = coordinator.claim("run-1", "a")
    first.close()
    second = other.claim("run-1", "b")
    assert second.fencing_token > first.fencing_token
    assert second.order > first.order > 0
    first.close()
    with pytest.raises(RunInUseError):
        coordinator.claim("run-1", "c")


def test_claim_waiting_gets_run_when_given_back(coordinator, other):
    first = coordinator.claim("run-1", "a")
    got = []
    waiter = threading.Thread(target=lambda: got.append(other.claim("run-1", "b", wait_seconds=30.0)))
    waiter.start()
    first.close()
    waiter.join(30.0)
    assert got[0].fencing_token > first.fencing_token


def test_claim_coordinator_closed_releases_run(coordinator, other):
    coordinator.claim("run-1", "a")
    coordinator.close()
    other.claim("run-1", "b", wait_seconds=5.0)


def test_claim_owner_killed_releases_run(url, coordinator, actor_of):
    actor = actor_of(url)
    token = actor.ask("claim", "run-1", 0)
    with pytest.raises(RunInUseError):
        coordinator.claim("run-1", "b")
    actor.kill()
    assert coordinator.claim("run-1", "b", wait_seconds=20.0).fencing_token > token


def test_claim_owned_run_names_the_flag_that_takes_it(coordinator, other):
    coordinator.claim("run-1", "a")
    with pytest.raises(RunInUseError, match="takeover=True"):
        other.claim("run-1", "b")


def test_claim_takeover_fences_the_live_owner_who_is_told_by_whom(coordinator, other, record):
    old = coordinator.claim("run-1", "old owner")
    old.check()
    coordinator.commit(record(), old)
    new = other.claim("run-1", "new owner", takeover=True)
    assert new.fencing_token > old.fencing_token
    assert new.order > old.order
    for refused in (old.check, lambda: coordinator.commit(record(generation=2, token="old"), old)):
        with pytest.raises(FencedError, match="taken over by 'new owner'"):
            refused()
    assert other.commit(record(generation=2, token="new"), new).token == "new"
    old.close()
    new.check()
    assert other.owner("run-1") == "new owner"
    with pytest.raises(RunInUseError):
        coordinator.claim("run-1", "c")


def test_claim_takeover_of_free_run_is_a_claim(coordinator, other):
    new = coordinator.claim("run-1", "a", takeover=True)
    new.check()
    with pytest.raises(RunInUseError):
        other.claim("run-1", "b")


def test_claim_takeover_back_and_forth_last_one_owns(coordinator, other):
    claims = [one.claim("run-1", f"o{n}", takeover=True) for n, one in enumerate((coordinator, other) * 3)]
    claims[-1].check()
    for claim in claims[:-1]:
        with pytest.raises(FencedError):
            claim.check()
    assert other.owner("run-1") == "o5"


def test_claim_check_given_back_is_fenced(coordinator):
    claim = coordinator.claim("run-1", "a")
    claim.close()
    with pytest.raises(FencedError, match="given back"):
        claim.check()


def test_claim_bad_run_is_refused(coordinator):
    with pytest.raises(ConfigError):
        coordinator.claim("../run", "a")


# A process that stands still


def test_process_paused_loses_run_to_other_and_its_commit_is_fenced(url, coordinator, actor_of, record):
    actor = actor_of(url)
    token = actor.ask("claim", "run-1", 0)
    actor.pause(coordinator)
    claim = coordinator.claim("run-1", "b", wait_seconds=20.0)
    assert claim.fencing_token == token + 1
    actor.resume()
    assert actor.ask("commit", record(token="stale").to_bytes().decode()) == "FencedError"
    assert coordinator.commit(record(), claim) == record()
    claim.close()
    # Given back by the new owner: the old one still does not have it.
    assert actor.ask("commit", record(generation=2, token="stale").to_bytes().decode()) == "FencedError"
    assert coordinator.commits("run-1") == (record(),)


def test_process_paused_and_resumed_registers_again_and_keeps_the_run_that_nobody_took(
    url, coordinator, actor_of, eventually, record
):
    actor = actor_of(url)
    actor.ask("register", "a")
    actor.ask("claim", "run-1", 0)
    actor.pause(coordinator)
    eventually(lambda: coordinator.nodes() == ())
    actor.resume()
    eventually(lambda: names(coordinator) == ["a"])
    assert actor.ask("commit", record(token="mine").to_bytes().decode()) == "mine"
    with pytest.raises(RunInUseError):
        coordinator.claim("run-1", "b")


# Commits


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


def test_register_description_too_large_is_refused_with_its_size(coordinator, node):
    with pytest.raises(CoordinationError, match=r"1,000,\d{3} bytes"):
        coordinator.register(node("a", rack="x" * 1_000_000))
    assert coordinator.nodes() == ()


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


def test_claim_processes_race_for_one_run_one_wins(url, coordinator, actor_of, record):
    actors = [actor_of(url) for _ in range(3)]
    for actor in actors:
        actor.tell("claim", "run-1", 0)
    answers = [actor.answer() for actor in actors]
    assert sorted(type(answer).__name__ for answer in answers) == ["int", "str", "str"]
    assert sorted(map(str, answers))[1:] == ["RunInUseError", "RunInUseError"]
    (winner,) = (actor for actor, answer in zip(actors, answers, strict=True) if isinstance(answer, int))
    assert winner.ask("commit", record(token="w").to_bytes().decode()) == "w"
    assert coordinator.latest("run-1").token == "w"


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


# The end


def test_close_twice_then_use_says_closed(coordinator, node, record):
    claim = coordinator.claim("run-1", "a")
    registration = coordinator.register(node("a"))
    coordinator.close()
    coordinator.close()
    claim.close()
    registration.close()
    for call in (
        coordinator.nodes,
        lambda: coordinator.register(node("b")),
        lambda: coordinator.claim("run-2", "a"),
        lambda: coordinator.commit(record(), claim),
        lambda: coordinator.mark_persisted("run-1", 1, "t"),
        lambda: coordinator.abort("run-1", 1, token="r", reason="why"),
        lambda: coordinator.newest_decided("run-1"),
        lambda: coordinator.relocate(record(), record(), fencing_token=0),
        lambda: coordinator.owner("run-1"),
        claim.check,
        lambda: coordinator.latest("run-1"),
        lambda: coordinator.commits("run-1"),
        lambda: registration.update(node("a")),
    ):
        with pytest.raises(ClosedError):
            call()


def test_close_takes_registrations_away(coordinator, other, node):
    coordinator.register(node("a"))
    coordinator.close()
    assert names(other) == []


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*:DeprecationWarning")
def test_fork_child_is_refused_and_harms_nothing(coordinator, other, node, record):
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "a")
    child = os.fork()
    if not child:
        refused = 0
        for call in (coordinator.nodes, lambda: coordinator.commit(record(), claim)):
            try:
                call()
            except ClosedError:
                refused += 1
        with contextlib.suppress(BaseException):
            claim.close()
            registration.close()
            coordinator.close()
            refused += 1
        os._exit(refused)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
    assert names(other) == ["a"]
    with pytest.raises(RunInUseError):
        other.claim("run-1", "b")
    assert coordinator.commit(record(), claim) == record()


def test_everything_with_pickle_forbidden_works(coordinator, other, node, record, monkeypatch):
    def forbidden(*_args, **_kwargs):
        raise AssertionError("pickle was used")

    for name in ("dump", "dumps", "load", "loads", "Pickler", "Unpickler"):
        monkeypatch.setattr(pickle, name, forbidden)
    coordinator.register(node("a")).update(node("a", state="draining"))
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    coordinator.mark_persisted("run-1", 1, "token-1")
    assert other.nodes() == (node("a", state="draining"),)
    assert other.latest("run-1") == record(persisted=True)


def test_sources_import_no_pickle():
    found = set()
    for path in Path(fastcheck_dask.coordination.__file__).parent.rglob("*.py"):
        for part in ast.walk(ast.parse(path.read_text())):
            if isinstance(part, ast.Import):
                found |= {alias.name.split(".")[0] for alias in part.names}
            elif isinstance(part, ast.ImportFrom) and part.module:
                found.add(part.module.split(".")[0])
    assert "json" in found
    assert not found & {"pickle", "cloudpickle", "marshal", "shelve", "dill"}


# Health


def test_health_connected_until_closed(coordinator):
    first = coordinator.health()
    assert (first.state, first.why) == ("connected", "")
    assert first.hosts
    assert first.session_id
    coordinator.nodes()
    assert coordinator.health() == first
    coordinator.close()
    after = coordinator.health()
    assert (after.state, after.hosts, after.why) == ("closed", first.hosts, "")
    assert after.since_seconds >= first.since_seconds
    assert coordinator.health() == after
