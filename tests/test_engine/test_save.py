"""Saves against real stores, with a failure at each step of each node."""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import replace

import numpy as np
import pytest

from fastcheck_dask.engine import save as save_module
from fastcheck_dask.engine.plan import MESSAGE_CHUNKS
from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.errors import (
    CommitConflictError,
    CoordinationError,
    FencedError,
    NodeFullError,
    NodeUnavailableError,
    StaleBaseError,
    TierFullError,
)
from fastcheck_dask.tiers.local import LocalTier

NODES = ("n0", "n1", "n2", "n3")


def test_save_first_goes_whole_and_every_node_commits(rig, states, loads):
    run = rig()
    saved = run.save(states.of(1), tag="first")
    assert (saved.record.generation, saved.record.tag, saved.record.shards) == (1, "first", 3)
    assert saved.stats.deltas == 0
    assert saved.stats.chunks == len(saved.manifest.digests)
    assert {run.committed_at(name) for name in NODES} == {(1, saved.record.token)}
    assert run.coordinator.latest("run-1") == saved.record
    assert loads(run, states.of(1), states)


def test_save_second_goes_as_deltas_and_loads_exactly(rig, states, loads):
    run = rig()
    first = run.save(states.of(1))
    second = run.save(states.of(1, step=1))
    assert second.stats.deltas > 0
    assert second.stats.sent_bytes < first.stats.sent_bytes
    assert loads(run, states.of(1, step=1), states)


def test_save_many_generations_with_changing_tensors_load_exactly(rig, states, loads):
    run = rig()
    for step in range(8):
        state = states.of(3, step=step, arrays=3 + step % 4)
        if step % 3 == 1:
            state["w1"] = state["w1"].astype(np.float64)
        if step % 3 == 2:
            state["w0"] = state["w0"][: 100 + step]
        run.save(state, tag=f"t{step}")
    assert run.coordinator.latest("run-1").generation == 8
    assert loads(run, state, states)


def test_save_state_without_arrays_commits_and_loads(rig, states):
    run = rig()
    state = {"step": 7, "bias": np.arange(3)}
    saved = run.save(state)
    assert saved.stats.chunks == 0
    assert saved.manifest.sizes == {}
    run.forget_local()
    recovered = run.recover(folder=False)
    assert recovered.state["step"] == 7
    assert recovered.report.source == "inline"


def test_save_more_tiny_chunks_than_a_message_takes_is_split(rig, states):
    run = rig(nodes=2)
    state = {f"w{number:05d}": np.full(65, number, np.float32) for number in range(MESSAGE_CHUNKS * 2 + 9)}
    saved = run.save(state, choice=run.choice(1))
    assert run.nodes["n0"].calls.count("put") == 3
    assert len(saved.manifest.chunks) == len(state)
    run.forget_local()
    recovered = run.recover(folder=False)
    assert states.same(recovered.state, state)
    assert run.nodes["n0"].calls.count("read") == 3


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("op", ["begin", "put", "prepare"])
@pytest.mark.parametrize("after", [False, True], ids=["before", "after"])
def test_save_node_fails_before_commit_former_generation_stays(rig, states, loads, node, op, after):
    run = rig()
    first = run.save(states.of(1))
    base = run.base
    run.nodes[node].fail(op, NodeUnavailableError(node, "injected"), after=after)
    snapshot = run.snapshot(states.of(1, step=1))
    with pytest.raises(NodeUnavailableError, match="injected"):
        run.commit(snapshot)
    assert run.coordinator.commits("run-1") == (first.record,)
    assert run.coordinator.asked == [first.record]
    assert {run.committed_at(name) for name in NODES} == {(1, first.record.token)}
    run.nodes[node].heal()
    # Where the node can be reached again nothing is left of it but what the next save replaces.
    assert all(run.staged_at(name) == [] for name in NODES)
    assert run.base is base
    assert run.slot_of(snapshot).status.state.name == "SNAPSHOT"
    saved = run.retry(snapshot)
    assert saved.stats.deltas > 0
    assert loads(run, states.of(1, step=1), states)


@pytest.mark.parametrize("node", NODES)
def test_save_node_dies_for_good_goes_to_others_whole(rig, states, loads, node):
    run = rig(nodes=5)
    run.save(states.of(1))
    before = run.choice()
    run.nodes[node].down = True
    snapshot = run.snapshot(states.of(1, step=1))
    with pytest.raises(NodeUnavailableError):
        run.commit(snapshot, before)
    saved = run.retry(snapshot)
    assert node not in saved.record.nodes
    assert "n4" in saved.record.nodes
    assert run.nodes["n4"].calls.count("begin") == 1
    assert 0 < saved.stats.deltas < saved.stats.chunks
    assert loads(run, states.of(1, step=1), states)


def test_save_seal_fails_nothing_is_published(rig, states):
    run = rig()
    first = run.save(states.of(1))

    def no_room(_data):
        raise TierFullError("the local tier", 2, 1, "make room")

    snapshot = run.snapshot(states.of(1, step=1))
    with pytest.raises(TierFullError):
        run.commit(snapshot, seal=no_room)
    assert run.coordinator.commits("run-1") == (first.record,)
    assert all(run.staged_at(name) == [] for name in NODES)
    assert run.retry(snapshot).record.generation == 2


def test_save_seals_manifest_before_commit(rig, states):
    run = rig()
    seen = []
    original = run.coordinator.commit

    def commit(record, claim):
        seen.append(run.slot_of(snapshot).status.state.name)
        return original(record, claim)

    run.coordinator.commit = commit
    snapshot = run.snapshot(states.of(1))
    run.commit(snapshot)
    assert seen == ["SEALED"]


# The commit


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_commit_reply_lost_is_repeated_with_same_token(rig, states, done):
    run = rig()
    run.coordinator.commit_faults = [(CoordinationError("reply lost"), done)] * 3
    saved = run.save(states.of(1))
    assert [record.token for record in run.coordinator.asked] == [saved.record.token] * 4
    assert run.coordinator.commits("run-1") == (saved.record,)
    assert {run.committed_at(name) for name in NODES} == {(1, saved.record.token)}


@pytest.mark.parametrize("done", [False, True], ids=["not done", "done"])
def test_commit_outcome_unknown_next_save_finds_out(rig, states, loads, monkeypatch, done):
    monkeypatch.setattr(save_module, "COMMIT_PATIENCE", 0.0)
    run = rig()
    run.save(states.of(1))
    run.coordinator.commit_faults = [(CoordinationError("no answer"), done)]
    lost = run.snapshot(states.of(1, step=1))
    with pytest.raises(CoordinationError, match="no answer"):
        run.commit(lost)
    # Nothing was dropped: what may be committed is still at the nodes.
    assert all(run.staged_at(name) == [[2, lost.token, True]] for name in NODES)
    latest = run.coordinator.latest("run-1")
    assert latest.generation == (2 if done else 1)
    if done:
        recovered = run.recover(folder=False)
        assert states.same(recovered.state, states.of(1, step=1))
    # As the agent does with a save that failed; a base that is not the latest is not used.
    run.slot_of(lost).clear()
    saved = run.save(states.of(1, step=2))
    assert saved.record.generation == latest.generation + 1
    assert loads(run, states.of(1, step=2), states)


@pytest.mark.parametrize("error", [FencedError("newer owner"), CommitConflictError("decided already")])
def test_commit_refused_drops_what_is_staged(rig, states, error):
    run = rig()
    first = run.save(states.of(1))
    run.coordinator.commit_faults = [(error, False)]
    with pytest.raises(type(error)):
        run.save(states.of(1, step=1))
    assert len(run.coordinator.asked) == 2
    assert all(run.staged_at(name) == [] for name in NODES)
    assert {run.committed_at(name) for name in NODES} == {(1, first.record.token)}
    assert run.coordinator.latest("run-1") == first.record


def test_commit_run_was_taken_over_is_fenced(rig, states):
    run = rig()
    run.claim.close()
    run.coordinator.another().claim("run-1", "newer trainer")
    with pytest.raises(FencedError):
        run.save(states.of(1))
    assert run.coordinator.commits("run-1") == ()
    assert all(run.staged_at(name) == [] for name in NODES)


@pytest.mark.parametrize("node", NODES)
@pytest.mark.parametrize("heal", ["save", "load"])
def test_announce_fails_at_node_next_save_or_load_tells_it(rig, states, loads, node, heal):
    run = rig()
    first = run.save(states.of(1))
    run.nodes[node].fail("commit", NodeUnavailableError(node, "injected"))
    second = run.save(states.of(1, step=1))
    assert run.coordinator.latest("run-1") == second.record
    assert run.committed_at(node) == (1, first.record.token)
    run.nodes[node].heal()
    state = states.of(1, step=1)
    if heal == "save":
        state = states.of(1, step=2)
        third = run.save(state)
        assert third.stats.deltas > 0
        assert run.committed_at(node) == (3, third.record.token)
    assert loads(run, state, states)


def test_announce_fails_everywhere_save_is_committed_all_the_same(rig, states, loads, caplog):
    run = rig()
    for name in NODES:
        run.nodes[name].fail("commit", NodeUnavailableError(name, "injected"))
    run.save(states.of(1))
    assert [r.levelname for r in caplog.records if "was not told" in r.message] == ["WARNING"] * 4
    assert loads(run, states.of(1), states)


# Bases


@pytest.mark.parametrize("node", NODES)
def test_save_node_restarted_empty_gets_its_shard_whole(rig, states, loads, node):
    run = rig()
    run.save(states.of(1))
    run.nodes[node].restart()
    saved = run.save(states.of(1, step=1))
    shard = saved.record.nodes.index(node)
    assert saved.manifest.layout is not None
    on_node = saved.manifest.layout.keys_of(shard)
    tasks = {task.key: task for job in run.encoder.jobs[-len(run.encoder.jobs) // 2 :] for task in job.tasks}
    assert on_node
    assert all(tasks[key].base is None for key in on_node)
    assert saved.stats.deltas > 0
    assert loads(run, states.of(1, step=1), states)


def test_save_node_lost_one_chunk_gets_that_chunk_whole(rig, states, loads):
    run = rig()
    first = run.save(states.of(1))
    key = first.manifest.layout.keys_of(0)[0]
    run.nodes["n0"].store.quarantine("run-1", 1, first.record.token, [key])
    before = len(run.encoder.jobs)
    run.save(states.of(1, step=1))
    whole = {t.key for job in run.encoder.jobs[before:] for t in job.tasks if t.base is None}
    assert key in whole
    assert loads(run, states.of(1, step=1), states)


def test_save_base_of_other_checkpoint_is_not_used(rig, states, loads):
    run = rig()
    run.save(states.of(1))
    old = run.base
    run.base = None
    # Somebody else saved meanwhile: the nodes hold another base than this host.
    run.save(states.of(2))
    run.base = replace(old, slot=run.base.slot)
    saved = run.save(states.of(1, step=1))
    assert saved.stats.deltas == 0
    assert loads(run, states.of(1, step=1), states)


def test_save_node_that_restarts_before_every_put_is_stale(rig, states, loads):
    run = rig()
    run.save(states.of(1))
    run.nodes["n1"].before["put"] = lambda _request: run.nodes["n1"].restart()
    snapshot = run.snapshot(states.of(1, step=1))
    with pytest.raises(StaleBaseError):
        run.commit(snapshot)
    run.nodes["n1"].heal()
    run.retry(snapshot)
    assert loads(run, states.of(1, step=1), states)


def test_save_base_advances_only_with_the_commit(rig, states, loads):
    run = rig()
    run.save(states.of(1))
    for step in (1, 2, 3):
        run.nodes["n3"].fail("prepare", NodeUnavailableError("n3", "injected"))
        snapshot = run.snapshot(states.of(1, step=step))
        with pytest.raises(NodeUnavailableError):
            run.commit(snapshot)
    run.nodes["n3"].heal()
    saved = run.save(states.of(1, step=4))
    assert saved.record.generation == 2
    assert saved.stats.deltas > 0
    assert loads(run, states.of(1, step=4), states)


@pytest.mark.parametrize(("before", "after"), [(3, 2), (2, 3), (3, 1), (1, 3)])
def test_save_number_of_shards_changes_loads_exactly(rig, states, loads, before, after):
    run = rig()
    run.save(states.of(1), choice=run.choice(before))
    run.save(states.of(1, step=1), choice=run.choice(after))
    run.save(states.of(1, step=2), choice=run.choice(after))
    assert loads(run, states.of(1, step=2), states)


def test_save_parity_comes_and_goes_loads_exactly(rig, states):
    run = rig(nodes=2)
    for step, down in enumerate((True, False, True, False)):
        run.nodes["n1"].down = down
        saved = run.save(states.of(1, step=step))
        assert saved.record.parity is not down
        assert (saved.stats.deltas > 0) is (step > 0)
    run.nodes["n0"].down = True
    run.forget_local()
    recovered = run.recover(folder=False)
    assert recovered.report.source == "parity"
    assert states.same(recovered.state, states.of(1, step=3))


def test_save_clients_are_closed_whatever_happens(rig, states):
    run = rig()
    run.save(states.of(1))
    run.nodes["n2"].fail("put", NodeUnavailableError("n2", "injected"))
    with pytest.raises(NodeUnavailableError):
        run.save(states.of(1, step=1))
    assert run.nodes.clients
    assert all(client._closed for client in run.nodes.clients)


def test_save_node_full_says_so_and_leaves_former_generation(rig, states, loads):
    run = rig(limit_bytes=60_000)
    first = run.save(states.of(1))
    with pytest.raises(TierFullError, match="storage node"):
        run.save({"w": np.random.default_rng(0).normal(size=60_000)})
    assert run.coordinator.latest("run-1") == first.record
    assert loads(run, states.of(1), states)


def test_save_that_cannot_fit_is_refused_before_any_payload(rig, states):
    run = rig(limit_bytes=60_000)
    with pytest.raises(NodeFullError) as told:
        run.save({"w": np.random.default_rng(0).normal(size=200_000)})
    assert told.value.free_bytes == 60_000
    assert told.value.wanted_bytes > 400_000
    assert all("put" not in node.calls for node in run.nodes)
    assert all(node.store.report()["reserved_bytes"] == 0 for node in run.nodes)


def test_save_reserves_what_it_then_takes_at_most(rig, states):
    run = rig()
    seen = []

    def note(request):
        report = run.nodes["n0"].store.report()
        seen.append(report["used_bytes"] + report["reserved_bytes"])

    for step in range(3):
        seen.clear()
        run.nodes["n0"].after["begin"] = run.nodes["n0"].before["prepare"] = note
        run.save(states.of(1, step=step))
        at_begin, at_end = seen
        # Nothing grew while it was sent.
        assert at_begin == at_end


def test_save_that_outgrows_its_estimate_is_tried_with_all_it_may_take(rig, states):
    run = rig(limit_bytes=100_000)
    state = {"w": np.zeros(30_000, np.float32)}
    run.save(state)
    run.save(state)
    # Zeros took nothing: what the next one takes could not be known.
    state["w"][:] = np.random.default_rng(0).normal(size=30_000)
    saved = run.save(state)
    assert saved.stats.deltas > 0
    run.save({"w": np.zeros(30_000, np.float32)})
    huge = {"w": np.random.default_rng(1).normal(size=60_000)}
    with pytest.raises(NodeFullError):
        run.save(huge)
    assert all(node.store.report()["reserved_bytes"] == 0 for node in run.nodes)


def test_save_base_was_damaged_in_the_slot_goes_whole_where_it_was_refused(rig, states, loads, caplog):
    run = rig()
    run.save(states.of(1))
    run.local.slots[0].data[12] ^= 1
    saved = run.save(states.of(1, step=1))
    # The shard of the chunk and its parity, and not the other two.
    assert caplog.text.count("send it whole") == 2
    assert 0 < saved.stats.deltas < saved.stats.chunks
    assert saved.stats.replaced == {}
    assert loads(run, states.of(1, step=1), states)


def weighted(run, shards, rates, **options):
    """Choose nodes as the agent does that knows their rates by name."""
    choice = run.choice(shards, **options)
    return replace(choice, weights=tuple(float(rates[node.name]) for node in choice.nodes))


@pytest.mark.parametrize("parity", [1, 2])
def test_save_weighted_moves_chunks_once_and_every_generation_survives_any_loss(rig, states, parity):
    """Also the generations before and after the move, and the deltas that follow it."""
    run = rig(nodes=3 + parity)
    rates = {f"n{number}": 10 for number in range(3 + parity)}
    sizes = {}
    for step in range(7):
        if step == 2:
            rates = {"n0": 40, "n1": 10, "n2": 40, "n3": 5, "n4": 40}
        state = states.of(1, step=step, arrays=12)
        saved = run.save(state, tag=f"t{step}", choice=weighted(run, 3, rates, parity=parity))
        sizes[step] = (saved.record.nodes, saved.stats)
        names = saved.record.nodes if step in (1, 4, 6) else ()
        for lost in itertools.combinations(names, parity):
            for name in lost:
                run.nodes[name].fail("read", NodeUnavailableError(name, "lost"))
            assert loads_without_local(run, state, states)
            for name in lost:
                run.nodes[name].heal()
    assert [step for step in range(1, 7) if sizes[step][0] != sizes[step - 1][0]] == [4]
    nodes, stats = sizes[4]
    # The fastest have the parity, as much as the fastest that has data.
    assert set(nodes[-parity:]) < {"n0", "n2", "n4"}
    of_node = {name: nbytes for name, (nbytes, _) in stats.transfers.items()}
    assert of_node["n3"] < of_node["n1"] < min(of_node["n0"], of_node["n2"])
    assert sizes[6][1].deltas > 0


def loads_without_local(run, state, states):
    """Say whether the nodes give the state; the slots stay as they are."""
    recovery = Recovery(LocalTier("elsewhere", run.local.path / "elsewhere"), None, run.nodes.client)
    recovered = asyncio.run(recovery.load(run.coordinator.commits("run-1")))
    return states.same(recovered.state, state)
