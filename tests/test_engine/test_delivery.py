"""Nodes that fail in the middle of a save: their shard goes to another one, and only theirs."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fastcheck_dask.engine import save as save_module
from fastcheck_dask.errors import NodeFullError, NodeUnavailableError, ShardCorruptError, TierError

NODES = ("n0", "n1", "n2", "n3")
OPS = pytest.mark.parametrize("op", ["begin", "put", "prepare"])


@pytest.fixture
def spared(rig, states, monkeypatch):
    """A run of three shards with one committed checkpoint, many jobs for the next one, and spare nodes."""
    monkeypatch.setattr(save_module, "JOB_BYTES", 8192)

    def make(nodes=6, *, seed=1, **options):
        run = rig(nodes=nodes, spares=True, **options)
        run.save(states.of(seed))
        return run

    return make


def survives_any_loss(run, state, states):
    """Say whether the nodes give exactly this state, whichever of them is lost."""
    run.forget_local()
    record = run.coordinator.latest("run-1")
    for lost in (None, *record.nodes):
        if lost is not None:
            run.nodes[lost].down = True
        recovered = run.recover(folder=False)
        assert recovered.report.generation == record.generation
        assert recovered.report.skipped == []
        assert states.same(recovered.state, state)
        if lost is not None:
            run.nodes[lost].down = False


def puts_of(run):
    """Count from now on how often each node acknowledged each key."""
    counted = {node.name: Counter() for node in run.nodes}
    for node in run.nodes:

        def count(request, name=node.name):
            counted[name].update(chunk[0] for chunk in request["chunks"])

        node.after["put"] = count
    return counted


@OPS
@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("skip", [0, 2])
def test_save_node_lost_in_the_middle_only_its_shard_goes_to_another(spared, states, op, node, after, skip):
    run = spared()
    shard = run.choice().nodes.index(run.nodes[node].info)
    skip = skip if op == "put" else 0
    acknowledged = puts_of(run)
    count = run.nodes[node].after.pop("put") if after else None
    run.nodes[node].fail(op, NodeUnavailableError(node, "injected"), after=after, skip=skip)
    saved = run.save(states.of(1, step=1))
    assert saved.record.generation == 2
    assert saved.stats.replaced.keys() == {node}
    assert "injected" in saved.stats.replaced[node]
    (spare,) = set(saved.record.nodes) - set(NODES)
    assert saved.record.nodes.index(spare) == shard
    assert saved.manifest.nodes == saved.stats.nodes == saved.record.nodes
    layout = saved.manifest.layout
    assert acknowledged[spare] == Counter(layout.keys_of(shard))
    for other in set(NODES) - {node}:
        assert acknowledged[other] == Counter(layout.keys_of(saved.record.nodes.index(other)))
    assert saved.stats.chunks == len(saved.manifest.digests)
    assert saved.stats.deltas == saved.stats.chunks - len(layout.keys_of(shard)) - whole_by_choice(run, saved)
    assert count is None or acknowledged[node] == Counter()
    assert all(run.committed_at(name) == (2, saved.record.token) for name in saved.record.nodes)
    run.nodes[node].heal()
    survives_any_loss(run, states.of(1, step=1), states)


def whole_by_choice(run, saved):
    """Count the chunks of the other shards that are smaller whole than as a delta."""
    held = [run.nodes[name].store._runs["run-1"].committed for name in saved.record.nodes]
    deltas = saved.stats.deltas
    total = sum(len(generation.wanted) for generation in held)
    lost = len(saved.manifest.layout.keys_of(saved.record.nodes.index(*set(saved.record.nodes) - set(NODES))))
    return total - lost - deltas


@OPS
def test_save_after_a_failover_is_a_delta_to_the_new_node(spared, states, op):
    run = spared()
    run.nodes["n1"].fail(op, NodeUnavailableError("n1", "injected"))
    first = run.save(states.of(1, step=1))
    second = run.save(states.of(1, step=2))
    assert second.record.nodes == first.record.nodes
    assert second.stats.replaced == {}
    assert second.stats.deltas > first.stats.deltas
    survives_any_loss(run, states.of(1, step=2), states)


@OPS
def test_save_two_nodes_lost_get_two_others(spared, states, op):
    run = spared()
    for name in ("n0", "n3"):
        run.nodes[name].fail(op, NodeUnavailableError(name, "injected"))
    saved = run.save(states.of(1, step=1))
    assert saved.stats.replaced.keys() == {"n0", "n3"}
    assert saved.record.nodes[1:3] == ("n1", "n2")
    assert {saved.record.nodes[0], saved.record.nodes[3]} == {"n4", "n5"}
    survives_any_loss(run, states.of(1, step=1), states)


@OPS
@pytest.mark.parametrize("spare_op", ["begin", "put", "prepare"])
def test_save_the_replacement_is_lost_too_and_replaced(spared, states, op, spare_op):
    run = spared()
    run.nodes["n2"].fail(op, NodeUnavailableError("n2", "injected"))
    run.nodes["n4"].fail(spare_op, NodeUnavailableError("n4", "injected"))
    saved = run.save(states.of(1, step=1))
    assert saved.stats.replaced.keys() == {"n2", "n4"}
    assert saved.record.nodes == ("n0", "n1", "n5", "n3")
    survives_any_loss(run, states.of(1, step=1), states)


@OPS
def test_save_no_node_is_left_fails_with_the_error_and_changes_nothing(spared, states, op):
    run = spared(nodes=5)
    for name in ("n2", "n4"):
        run.nodes[name].fail(op, NodeUnavailableError(name, "injected"))
    with pytest.raises(NodeUnavailableError, match="n4"):
        run.save(states.of(1, step=1))
    assert run.coordinator.latest("run-1").generation == 1
    assert all(run.staged_at(name) == [] for name in ("n0", "n1", "n3", "n4"))
    for name in ("n2", "n4"):
        run.nodes[name].heal()
    survives_any_loss(run, states.of(1), states)


def test_save_node_full_is_replaced_and_freed(spared, states):
    run = spared()
    run.nodes["n1"].fail("put", NodeFullError("n1", 5, 1), skip=1)
    saved = run.save(states.of(1, step=1))
    assert saved.stats.replaced.keys() == {"n1"}
    assert run.staged_at("n1") == []
    survives_any_loss(run, states.of(1, step=1), states)


@pytest.mark.parametrize("op", ["put", "prepare"])
def test_save_node_restarts_empty_gets_its_shard_whole_in_the_same_save(spared, states, op):
    run = spared()
    node = run.nodes["n1"]

    def restart(_request):
        del node.before[op]
        node.restart()

    node.before[op] = restart
    saved = run.save(states.of(1, step=1))
    assert saved.record.nodes == NODES
    assert saved.stats.replaced == {}
    survives_any_loss(run, states.of(1, step=1), states)


@OPS
def test_save_node_restarts_and_then_dies_is_replaced(spared, states, op):
    run = spared()
    node = run.nodes["n1"]

    def restart(_request):
        del node.before["put"]
        node.restart()
        node.fail(op, NodeUnavailableError("n1", "injected"))

    node.before["put"] = restart
    saved = run.save(states.of(1, step=1))
    assert "n1" not in saved.record.nodes
    survives_any_loss(run, states.of(1, step=1), states)


@pytest.mark.parametrize("op", ["put", "prepare"])
def test_save_message_damaged_on_the_way_is_sent_again(spared, states, op, caplog):
    run = spared()
    node = run.nodes["n1"]

    def damaged(_request):
        del node.before[op]
        raise ShardCorruptError("k", "n1", "0x1", "0x2")

    node.before[op] = damaged
    saved = run.save(states.of(1, step=1))
    assert (saved.record.nodes, saved.stats.replaced) == (NODES, {})
    assert "is sent again" in caplog.text
    survives_any_loss(run, states.of(1, step=1), states)


def test_save_message_damaged_twice_fails(spared, states):
    run = spared()
    run.nodes["n1"].fail("put", ShardCorruptError("k", "n1", "0x1", "0x2"))
    with pytest.raises(ShardCorruptError):
        run.save(states.of(1, step=1))
    assert run.coordinator.latest("run-1").generation == 1


def test_save_other_error_of_a_node_ends_the_save(spared, states):
    run = spared()
    run.nodes["n1"].fail("prepare", TierError("injected"))
    with pytest.raises(TierError, match="injected"):
        run.save(states.of(1, step=1))
    assert "begin" not in run.nodes["n4"].calls


def test_save_with_a_failover_says_nothing_about_the_link(spared, states):
    class Policy(save_module.CompressionPolicy):
        seen = 0

        def observe(self, meter, *, compressed):
            self.seen += 1

    policy = Policy("always", 1)
    run = spared(policy=policy)
    run.nodes["n1"].fail("put", NodeUnavailableError("n1", "injected"))
    run.save(states.of(1, step=1))
    run.save(states.of(1, step=2))
    assert policy.seen == 2


def test_save_number_of_shards_changes_while_a_node_fails(spared, states):
    run = spared()
    run.nodes["n0"].fail("put", NodeUnavailableError("n0", "injected"))
    saved = run.save(states.of(1, step=1), choice=run.choice(2))
    assert len(saved.record.nodes) == 3
    # One of those that held the checkpoint before takes its place, and is told of it first.
    survives_any_loss(run, states.of(1, step=1), states)


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    faults=st.dictionaries(
        st.sampled_from([*NODES, "n4", "n5"]),
        st.tuples(st.sampled_from(["begin", "put", "prepare"]), st.booleans(), st.integers(0, 3)),
        max_size=4,
    ),
    seed=st.integers(0, 3),
)
def test_save_any_faults_commits_exactly_or_not_at_all(spared, states, faults, seed):
    run = spared(seed=seed)
    for name, (op, after, skip) in faults.items():
        run.nodes[name].fail(op, NodeUnavailableError(name, "injected"), after=after, skip=skip)
    state = states.of(seed, step=1)
    try:
        saved = run.save(state)
    except NodeUnavailableError:
        assert len(faults) > 2
        state = states.of(seed)
        assert run.coordinator.latest("run-1").generation == 1
    else:
        assert np.all([name not in saved.stats.replaced for name in saved.record.nodes])
    for node in run.nodes:
        node.heal()
    survives_any_loss(run, state, states)
