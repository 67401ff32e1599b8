"""The states protocol with its real parts: bits, master, updater, reader, over every kind of entries."""

from __future__ import annotations

import contextlib
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.clock import Deadline
from fastcheck_dask.coordination.candidacy import EPOCH, Candidate
from fastcheck_dask.coordination.election import Election, ElectionTimes
from fastcheck_dask.coordination.entries import Create, Delete, Entry, Write
from fastcheck_dask.coordination.states import LocalLink, NodeState, StateMaster, StateReader, StateUpdater
from fastcheck_dask.coordination.states.bits import Operation, StateBits
from fastcheck_dask.coordination.states.protocol import read
from fastcheck_dask.coordination.states.value import STATE_NAMES, state_path, version_path
from fastcheck_dask.coordination.steps import Ask, DeadlineError, Get
from fastcheck_dask.errors import CoordinationError, NoMasterError, UnknownFormatError
from fastcheck_dask.testing.fakes import FakeCoordinator

QUICK = ElectionTimes(confirm_seconds=0.02, trust_seconds=5.0, back_off_seconds=0.05)
PATIENCE_SECONDS = 20.0
LEASE_SECONDS = 0.2

states = st.builds(
    NodeState,
    state=st.sampled_from(STATE_NAMES),
    used_bytes=st.integers(0),
    limit_bytes=st.integers(0),
    generations=st.dictionaries(st.text(max_size=5), st.integers(0), max_size=3),
    runs=st.integers(0, 9),
)


@given(states)
def test_state_round_trips(state):
    assert NodeState.from_bytes(state.to_bytes()) == state


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[]",
        b"{}",
        NodeState("asleep", 1, 2).to_bytes(),
        NodeState("available", True, 2).to_bytes(),
        NodeState("available", 1, 2, {"run": "x"}).to_bytes(),
    ],
)
def test_state_wrong_bytes_is_unknown_format(data):
    with pytest.raises(UnknownFormatError):
        NodeState.from_bytes(data)


# Bits

OPERATION = Operation("n", "s", 2)


def test_bits_begin_and_end_version_is_noted():
    bits = StateBits(7, {})
    assert bits.begin(OPERATION, 1.0) == {"fencing_token": 7}
    assert bits.query() == {"fencing_token": 7, "nonce": "", "versions": {}, "changing": ["n"]}
    bits.end(OPERATION, 7, 4)
    assert bits.query() == {"fencing_token": 7, "nonce": "", "versions": {"n": 4}, "changing": []}


@pytest.mark.parametrize(
    ("operation", "token"),
    [(Operation("n", "s", 1), 7), (Operation("n", "t", 2), 7), (Operation("m", "s", 2), 7), (OPERATION, 6)],
)
def test_bits_end_of_another_operation_or_master_clears_nothing(operation, token):
    bits = StateBits(7, {})
    bits.begin(OPERATION, 1.0)
    bits.end(operation, token, 4)
    assert bits.query()["changing"] == ["n"]
    assert bits.query()["versions"] == {}


def test_bits_older_operation_is_refused_and_newer_takes_the_place():
    bits = StateBits(7, {})
    bits.begin(OPERATION, 1.0)
    with pytest.raises(CoordinationError, match="is over"):
        bits.begin(Operation("n", "s", 1), 9.0)
    bits.begin(Operation("n", "s", 3), 2.0)
    assert bits.expired(1.5) == []
    assert bits.expired(2.0) == [Operation("n", "s", 3)]


def test_bits_two_sessions_of_a_node_both_have_to_end():
    bits = StateBits(7, {"n": 1})
    other = Operation("n", "t", 1)
    bits.begin(OPERATION, 1.0)
    bits.begin(other, 1.0)
    bits.end(other, 7, 3)
    assert bits.query()["changing"] == ["n"]
    bits.ruled_out(OPERATION, 2)
    assert bits.query() == {"fencing_token": 7, "nonce": "", "versions": {"n": 3}, "changing": []}


@pytest.mark.parametrize("field", ["node", "session", "number"])
def test_operation_with_a_wrong_field_is_refused(field):
    with pytest.raises(CoordinationError, match="not an operation"):
        Operation.from_request(OPERATION.to_request("state_begin") | {field: None})


# All together


@pytest.fixture(params=["memory", "embedded", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def opened(request, tmp_path, open_coordinator):
    """Open one session after another with the same coordinator."""
    if request.param == "memory":
        return FakeCoordinator().another
    in_zookeeper = request.param == "zookeeper"
    url = request.getfixturevalue("zookeeper_url") if in_zookeeper else f"sqlite://{tmp_path}/c.db"
    return lambda: open_coordinator(url)


class Cluster:
    """Masters, nodes and readers in this process."""

    def __init__(self, opened, stack):
        self.opened, self.stack = opened, stack
        self.masters = {}
        self.elections = {}

    def master(self, name):
        coordinator = self.opened()
        master = StateMaster(name, coordinator.entries, lease_seconds=LEASE_SECONDS, sweep_seconds=0.02)
        self.masters[name] = master.operations
        self.elections[name] = Election(coordinator.entries, name, master.serve, times=QUICK)
        self.elections[name].start()
        self.stack.callback(self.elections[name].close)
        return coordinator

    def link(self, entries):
        return LocalLink(entries, self.masters)

    def updater(self, name, coordinator=None):
        entries = (coordinator or self.opened()).entries
        return StateUpdater(name, entries, link=self.link(entries))

    def reader(self):
        entries = self.opened().entries
        return StateReader(entries, link=self.link(entries))


@pytest.fixture
def cluster(opened):
    with contextlib.ExitStack() as stack:
        yield Cluster(opened, stack)


def state(used):
    return NodeState("available", used, 100, {"run": used}, 1)


def soon():
    return Deadline.after(PATIENCE_SECONDS)


def test_update_is_read_by_everybody(cluster):
    cluster.master("m0")
    one, other = cluster.updater("a"), cluster.updater("b")
    readers = [cluster.reader(), cluster.reader()]
    for used in range(3):
        version = one.update(state(used), deadline=soon())
        other.update(state(used + 10), deadline=soon())
        assert version == used
        for reader in readers:
            assert reader.read(deadline=soon()) == {"a": state(used), "b": state(used + 10)}


def test_master_dies_next_one_knows_what_was_published(cluster):
    cluster.master("m0")
    updater, reader = cluster.updater("a"), cluster.reader()
    updater.update(state(1), deadline=soon())
    assert reader.read(deadline=soon()) == {"a": state(1)}
    cluster.elections["m0"].close()
    with pytest.raises(DeadlineError, match="too long"):
        reader.read(deadline=Deadline.after(0.3))
    cluster.master("m1")
    assert reader.read(deadline=soon()) == {"a": state(1)}
    updater.update(state(2), deadline=soon())
    assert reader.read(deadline=soon()) == {"a": state(2)}


def test_session_ends_state_goes_and_is_needed_again(cluster, expire):
    cluster.master("m0")
    coordinator = cluster.opened()
    updater, reader = cluster.updater("a", coordinator), cluster.reader()
    updater.update(state(1), deadline=soon())
    assert not updater.needs(state(1))
    assert updater.needs(state(2))
    expire(coordinator)
    deadline = soon()
    while reader.read(deadline=deadline) or not updater.needs(state(1)):
        assert not deadline.passed
    updater.update(state(1), deadline=soon())
    assert reader.read(deadline=soon()) == {"a": state(1)}


def test_reader_waits_for_an_update_that_was_begun_and_never_ended(cluster):
    """Bounded by the lease; what comes after is refused."""
    cluster.master("m0")
    coordinator = cluster.opened()
    updater, reader = cluster.updater("a", coordinator), cluster.reader()
    version = updater.update(state(1), deadline=soon())
    link = cluster.link(coordinator.entries)
    link.ask(Operation("a", "another", 9).to_request("state_begin"))
    assert link.ask({"op": "state_query"})["changing"] == ["a"]
    assert reader.read(deadline=soon()) == {"a": state(1)}
    assert coordinator.entries.get(version_path("a")).version == version + 1


def test_reader_reads_only_what_changed(cluster, monkeypatch):
    cluster.master("m0")
    updaters = [cluster.updater(name) for name in ("a", "b")]
    for updater in updaters:
        updater.update(state(1), deadline=soon())
    entries = cluster.opened().entries
    asked = []
    real = entries.get_many
    monkeypatch.setattr(entries, "get_many", lambda *paths: asked.append(paths) or real(*paths))
    reader = StateReader(entries, link=cluster.link(entries))
    reader.read(deadline=soon())
    reader.read(deadline=soon())
    updaters[1].update(state(2), deadline=soon())
    assert reader.read(deadline=soon()) == {"a": state(1), "b": state(2)}
    found = [path for paths in asked for path in paths if path != EPOCH]
    assert found == [state_path("a"), state_path("b"), state_path("b")]


def test_coordinator_lost_its_data_and_came_to_the_same_numbers_nothing_old_is_read(cluster):
    cluster.master("m0")
    node, entries = cluster.opened(), cluster.opened().entries
    cluster.updater("a", node).update(state(1), deadline=soon())
    reader = cluster.reader()
    assert reader.read(deadline=soon()) == {"a": state(1)}
    before = [entry.version for entry in entries.get_many(EPOCH, version_path("a"))]
    cluster.elections["m0"].close()
    node.close()
    entries.apply(Delete(EPOCH, None), Delete(version_path("a"), None))
    cluster.master("m1")
    cluster.updater("a").update(state(2), deadline=soon())
    assert [entry.version for entry in entries.get_many(EPOCH, version_path("a"))] == before
    assert reader.read(deadline=soon()) == {"a": state(2)}


def test_answer_of_a_master_of_the_same_number_before_the_data_were_lost_is_not_used():
    steps = read({})
    assert next(steps) == Ask({"op": "state_query"})
    names = steps.send(StateBits(3, {"a": 5}, nonce="before").query())
    assert steps.send(()) == Get((EPOCH,)), names
    epoch = Entry(Candidate("m", "", "after").to_bytes(3), 3)
    assert steps.send([epoch]) == Ask({"op": "state_query"})
    steps.send(StateBits(3, {}, nonce="after").query())
    steps.send(())
    with pytest.raises(StopIteration):
        steps.send([epoch])


def test_update_name_of_a_live_node_waits_until_that_is_gone(cluster):
    cluster.master("m0")
    first = cluster.opened()
    cluster.updater("a", first).update(state(1), deadline=soon())
    second = cluster.updater("a")
    with pytest.raises(DeadlineError):
        second.update(state(2), deadline=Deadline.after(0.3))
    first.close()
    second.update(state(2), deadline=soon())
    assert cluster.reader().read(deadline=soon()) == {"a": state(2)}


def test_unreadable_state_is_left_out(cluster, caplog):
    cluster.master("m0")
    cluster.updater("a").update(state(1), deadline=soon())
    cluster.opened().entries.apply(Create(state_path("b"), b"?"))
    assert cluster.reader().read(deadline=soon()) == {"a": state(1)}
    assert "the state of storage node b is not used" in caplog.text


def test_not_the_master_says_who_is(cluster):
    cluster.master("m0")
    reader = cluster.reader()
    reader.read(deadline=soon())
    idle = StateMaster("m1", cluster.opened().entries)
    with pytest.raises(NoMasterError, match="m1 is not the master, it is m0") as found:
        idle.operations["state_query"]({})
    assert (found.value.asked, found.value.master) == ("m1", "m0")


@pytest.mark.parametrize("done", [True, False])
def test_update_reply_lost_is_published_once(done):
    coordinator = FakeCoordinator()
    with contextlib.ExitStack() as stack:
        cluster = Cluster(coordinator.another, stack)
        cluster.master("m0")
        node = coordinator.another()
        updater = cluster.updater("a", node)
        updater.update(state(1), deadline=soon())
        node.entries.lose_reply(done=done)
        assert updater.update(state(2), deadline=soon()) == 1
        assert cluster.reader().read(deadline=soon()) == {"a": state(2)}


def test_update_stopped_ends():
    coordinator, stopping = FakeCoordinator(), threading.Event()
    stopping.set()
    entries = coordinator.another().entries
    with pytest.raises(Exception, match="closed while it waited"):
        StateUpdater("a", entries, link=LocalLink(entries, {})).update(state(1), stopping=stopping)


def test_master_deposed_while_it_rules_out_stops(cluster):
    coordinator = cluster.master("m0")
    reader = cluster.reader()
    reader.read(deadline=soon())
    office = cluster.elections["m0"].leadership
    entries = cluster.opened().entries
    cluster.link(entries).ask(Operation("a", "s", 1).to_request("state_begin"))
    entries.apply(Write(EPOCH, b"{}", None))
    deadline = soon()
    while not office.over:
        assert not deadline.passed
        office.wait(0.01)
    assert reader.read(deadline=soon()) == {}
    assert coordinator.entries.get(EPOCH).version > office.fencing_token
