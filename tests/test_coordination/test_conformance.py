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
from fastcheck_dask.errors import (
    ClosedError,
    ConfigError,
    CoordinationError,
    FencedError,
    RunInUseError,
)


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


def test_register_description_too_large_is_refused_with_its_size(coordinator, node):
    with pytest.raises(CoordinationError, match=r"1,000,\d{3} bytes"):
        coordinator.register(node("a", rack="x" * 1_000_000))
    assert coordinator.nodes() == ()


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
