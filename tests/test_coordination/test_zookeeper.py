from __future__ import annotations

import contextlib
import logging
import time

import pytest
from kazoo.client import KazooClient

from fastcheck_dask.coordination.connect import zookeeper_place
from fastcheck_dask.coordination.zookeeper import client
from fastcheck_dask.errors import (
    CommitConflictError,
    ConfigError,
    CoordinationError,
    FencedError,
    RunInUseError,
)
from fastcheck_dask.testing.zookeeper import ZooKeeperServer

pytestmark = pytest.mark.zookeeper


@pytest.fixture
def coordinator(zookeeper_url, open_coordinator):
    return open_coordinator(zookeeper_url)


@pytest.fixture
def other(zookeeper_url, open_coordinator):
    return open_coordinator(zookeeper_url)


@pytest.fixture
def plain(zookeeper_url):
    """Return a client of the test's own, below the root."""
    hosts, root = zookeeper_place(zookeeper_url)
    made = KazooClient(hosts + root)
    made.start()
    yield made
    made.stop()
    made.close()


@pytest.fixture
def own_server(tmp_path):
    with ZooKeeperServer(tmp_path / "server") as server:
        yield server


def owner_session(plain, path):
    stat = plain.exists(path)
    return stat and stat.ephemeralOwner


# Sessions


def test_session_expired_registration_and_claim_come_back(
    coordinator, other, plain, node, record, eventually, expire
):
    coordinator.register(node("a")).update(node("a", state="draining"))
    claim = coordinator.claim("run-1", "trainer")
    places = ["/nodes/a", "/runs/run-1/owner"]
    before = [owner_session(plain, place) for place in places]
    expire(coordinator)
    eventually(lambda: all(owner_session(plain, place) not in (None, *before) for place in places))
    assert other.nodes() == (node("a", state="draining"),)
    with pytest.raises(RunInUseError, match="trainer"):
        other.claim("run-1", "b")
    assert coordinator.commit(record(), claim) == record()


def test_session_expired_what_was_closed_stays_away(coordinator, other, plain, node, eventually, expire):
    coordinator.register(node("a")).close()
    coordinator.claim("run-1", "trainer").close()
    coordinator.register(node("b"))
    before = owner_session(plain, "/nodes/b")
    expire(coordinator)
    eventually(lambda: owner_session(plain, "/nodes/b") not in (None, before))
    assert [info.name for info in other.nodes()] == ["b"]
    other.claim("run-1", "b")


def test_fence_moved_while_session_was_away_claim_is_lost(coordinator, plain, record, eventually, expire):
    claim = coordinator.claim("run-1", "a")
    plain.set("/runs/run-1/fence", b"")
    expire(coordinator)
    eventually(lambda: claim.lost)
    assert owner_session(plain, "/runs/run-1/owner") is None
    with pytest.raises(FencedError):
        coordinator.commit(record(), claim)
    claim.close()


def test_server_lost_its_data_claim_of_the_same_number_is_not_ours(
    coordinator, other, plain, record, eventually, expire
):
    """Versions of znodes begin anew, and most runs were claimed once."""
    claim = coordinator.claim("run-1", "before")
    before = owner_session(plain, "/runs/run-1/owner")
    expire(coordinator)
    # The claim comes back in a thread of its own, which would create what is deleted meanwhile.
    eventually(lambda: owner_session(plain, "/runs/run-1/owner") not in (None, before))
    plain.delete("/runs/run-1", recursive=True)
    later = other.claim("run-1", "after")
    assert later.fencing_token == claim.fencing_token
    for act in (claim.check, lambda: coordinator.commit(record(), claim)):
        with pytest.raises(FencedError, match="taken over by 'after'"):
            act()
    other.commit(record(token="of the later one"), later)
    later.close()
    expire(coordinator)
    eventually(lambda: claim.lost)
    assert owner_session(plain, "/runs/run-1/owner") is None


def test_claim_overtaken_while_it_comes_back_is_lost(
    coordinator, plain, record, monkeypatch, eventually, expire
):
    claim = coordinator.claim("run-1", "a")
    whole = client.Session.transact

    def overtaken(session, what, build, *, deadline):
        plain.set("/runs/run-1/fence", b"")
        return whole(session, what, build, deadline=deadline)

    monkeypatch.setattr(client.Session, "transact", overtaken)
    expire(coordinator)
    eventually(lambda: claim.lost)
    assert owner_session(plain, "/runs/run-1/owner") is None


def test_registration_that_cannot_come_back_at_once_is_tried_again(
    coordinator, plain, node, monkeypatch, eventually, caplog, expire
):
    coordinator.register(node("a"))
    whole, failed = client.Session.attempt, []

    def attempt(session, description, call, *, deadline):
        if description.startswith("creating") and len(failed) < 3:
            failed.append(description)
            raise CoordinationError("refused for a while")
        return whole(session, description, call, deadline=deadline)

    monkeypatch.setattr(client.Session, "attempt", attempt)
    before = owner_session(plain, "/nodes/a")
    expire(coordinator)
    eventually(lambda: owner_session(plain, "/nodes/a") not in (None, before))
    assert len(failed) == 3
    assert caplog.text.count("refused for a while") == 1


def test_registration_updated_name_taken_by_another_session_is_refused(coordinator, plain, node):
    registration = coordinator.register(node("a"))
    data = plain.get("/nodes/a")[0]
    plain.delete("/nodes/a")
    plain.create("/nodes/a", data, ephemeral=True)
    with pytest.raises(CoordinationError, match="taken by another process"):
        registration.update(node("a", state="draining"))
    registration.close()
    assert plain.get("/nodes/a")[0] == data


# The server is away


def test_server_restarted_registration_claim_and_commits_are_there(
    own_server, open_coordinator, node, record, eventually
):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/a/b/c")
    coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "a")
    coordinator.commit(record(), claim)
    own_server.restart()
    assert coordinator.commit(record(generation=2, token="token-2"), claim).generation == 2
    eventually(lambda: coordinator.nodes() == (node("a"),))
    assert len(coordinator.commits("run-1")) == 2


def test_server_killed_every_call_fails_within_timeout(own_server, open_coordinator, node, record):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root")
    registration = coordinator.register(node("a"))
    claim = coordinator.claim("run-1", "a")
    own_server.kill()
    coordinator._session.timeout_seconds = 0.3
    for call in (
        coordinator.nodes,
        lambda: coordinator.register(node("b")),
        lambda: coordinator.claim("run-2", "a"),
        lambda: coordinator.commit(record(), claim),
        lambda: coordinator.mark_persisted("run-1", 1, "t"),
        lambda: coordinator.latest("run-1"),
        lambda: coordinator.commits("run-1"),
        lambda: registration.update(node("a")),
        registration.close,
        claim.close,
        coordinator.close,
    ):
        begin = time.monotonic()
        with (
            contextlib.nullcontext()
            if call == coordinator.close
            else pytest.raises(CoordinationError, match=r"did not answer within 0\.3 s")
        ):
            call()
        assert time.monotonic() - begin < 8.0


def test_server_paused_commit_says_that_its_outcome_is_open_and_can_be_asked(
    own_server, open_coordinator, record, monkeypatch, eventually
):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root", session_seconds=20.0)
    claim = coordinator.claim("run-1", "a")
    whole = client.Session.transact

    def pause_first(session, *args, **kwargs):
        own_server.pause()
        return whole(session, *args, **kwargs)

    monkeypatch.setattr(client.Session, "transact", pause_first)
    monkeypatch.setattr(coordinator._session, "timeout_seconds", 3.0)
    with pytest.raises(CoordinationError, match="may or may not be committed"):
        coordinator.commit(record(), claim)
    monkeypatch.undo()
    own_server.resume()
    eventually(lambda: coordinator.commit(record(), claim) == record())
    assert coordinator.commits("run-1") == (record(),)


def test_close_server_paused_ends_within_timeout(own_server, open_coordinator, node):
    coordinator = open_coordinator(f"zk://{own_server.hosts}/root")
    coordinator.register(node("a"))
    own_server.pause()
    coordinator._session.timeout_seconds = 0.5
    begin = time.monotonic()
    coordinator.close()
    assert time.monotonic() - begin < 8.0
    own_server.resume()


# Answers that get lost


@pytest.fixture(params=["before the write", "after the write"])
def lose_reply(request, monkeypatch):
    """Let the connection break once around the call whose description begins as given."""

    def arrange(what):
        whole, lost = client.Session.attempt, []

        def attempt(session, description, call, *, deadline):
            if lost or not description.startswith(what):
                return whole(session, description, call, deadline=deadline)
            lost.append(description)
            if request.param == "after the write":
                whole(session, description, call, deadline=deadline)
            raise client.ReplyLostError(description)

        monkeypatch.setattr(client.Session, "attempt", attempt)
        return lost

    return arrange


def test_commit_reply_lost_is_written_once(coordinator, record, lose_reply):
    claim = coordinator.claim("run-1", "a")
    lost = lose_reply("committing")
    assert coordinator.commit(record(), claim) == record()
    assert lost
    assert coordinator.commits("run-1") == (record(),)


def test_claim_reply_lost_is_owned_once(coordinator, other, record, lose_reply):
    lost = lose_reply("claiming")
    claim = coordinator.claim("run-1", "a")
    assert lost
    assert claim.fencing_token == 1
    with pytest.raises(RunInUseError):
        other.claim("run-1", "b")
    assert coordinator.commit(record(), claim) == record()


def test_register_reply_lost_is_there_once(coordinator, node, lose_reply):
    lost = lose_reply("creating /tests")
    registration = coordinator.register(node("a"))
    assert lost
    assert coordinator.nodes() == (node("a"),)
    registration.close()
    assert coordinator.nodes() == ()


def test_registration_closed_reply_lost_is_gone(coordinator, node, lose_reply):
    registration = coordinator.register(node("a"))
    lost = lose_reply("deleting")
    registration.close()
    assert lost
    assert coordinator.nodes() == ()


def test_mark_persisted_reply_lost_is_marked(coordinator, record, lose_reply):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    lost = lose_reply("writing")
    coordinator.mark_persisted("run-1", 1, "token-1")
    assert lost
    assert coordinator.latest("run-1") == record(persisted=True)


@pytest.mark.parametrize("what", ["claiming", "creating /tests"])
def test_call_failed_after_its_write_leaves_nothing_behind(
    coordinator, other, node, what, monkeypatch, eventually
):
    whole = client.Session.attempt
    failed = []

    def attempt(session, description, call, *, deadline):
        answer = whole(session, description, call, deadline=deadline)
        if session is coordinator._session and description.startswith(what) and "/runs/" not in description:
            failed.append(description)
            raise CoordinationError("the answer is missing")
        return answer

    monkeypatch.setattr(client.Session, "attempt", attempt)
    with pytest.raises(CoordinationError, match="the answer is missing"):
        coordinator.claim("run-1", "a") if what == "claiming" else coordinator.register(node("a"))
    assert failed
    monkeypatch.undo()
    eventually(lambda: other.nodes() == ())
    assert other.claim("run-1", "b", wait_seconds=20.0).fencing_token >= 1


# What happens between the reading and the transaction


@pytest.mark.parametrize(
    ("path", "data", "error"), [("fence", b"", FencedError), ("latest", b"5", CommitConflictError)]
)
def test_commit_overtaken_after_its_checks_is_refused_by_the_server(
    coordinator, plain, record, monkeypatch, path, data, error
):
    claim = coordinator.claim("run-1", "a")
    whole = client.Session.transact

    def overtaken(session, what, build, *, deadline):
        monkeypatch.undo()
        plain.set(f"/runs/run-1/{path}", data)
        return whole(session, what, build, deadline=deadline)

    monkeypatch.setattr(client.Session, "transact", overtaken)
    with pytest.raises(error):
        coordinator.commit(record(), claim)
    assert coordinator.commits("run-1") == ()


def test_claim_overtaken_after_its_checks_takes_the_next_token(coordinator, plain, monkeypatch):
    whole = client.Session.transact

    def overtaken(session, what, build, *, deadline):
        monkeypatch.undo()
        plain.set("/runs/run-1/fence", b"")
        return whole(session, what, build, deadline=deadline)

    monkeypatch.setattr(client.Session, "transact", overtaken)
    assert coordinator.claim("run-1", "a").fencing_token == 2


# What lies there


def test_connect_newer_layout_is_refused(zookeeper_url, coordinator, plain, open_coordinator):
    plain.set("/format", b"2")
    with pytest.raises(ConfigError, match="layout version b'2'"):
        open_coordinator(zookeeper_url)


def test_nodes_entry_that_cannot_be_read_is_left_out_and_logged(coordinator, plain, node, caplog):
    coordinator.register(node("a"))
    plain.create("/nodes/bad", b"\xff{")
    with caplog.at_level(logging.WARNING, logger="fastcheck_dask"):
        assert coordinator.nodes() == (node("a"),)
    assert "storage node bad" in caplog.text


def test_latest_record_of_another_generation_is_not_returned(coordinator, plain, record):
    coordinator.commit(record(), coordinator.claim("run-1", "a"))
    plain.set("/runs/run-1/decisions/0000000001", record(generation=2).to_bytes())
    for call in (coordinator.latest, coordinator.commits):
        with pytest.raises(Exception, match="holds generation 2"):
            call("run-1")


def test_root_emptied_meanwhile_commit_is_refused(coordinator, plain, record):
    claim = coordinator.claim("run-1", "a")
    plain.delete("/runs", recursive=True)
    with pytest.raises(FencedError):
        coordinator.commit(record(), claim)
    assert coordinator.latest("run-1") is None


def test_nodes_many_calls_leave_no_watch(coordinator, node, zookeeper):
    coordinator.register(node("a"))
    for _ in range(5):
        coordinator.nodes()
        coordinator.latest("run-1")
    kazoo = coordinator._session._client
    assert not kazoo._child_watchers
    assert not kazoo._data_watchers
