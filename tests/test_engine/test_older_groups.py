"""Groups that go to the object tier more rarely: memory has the state as it was; nothing mixes unasked."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from fastcheck_dask.config import Group
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.folder_run import FolderRun
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.errors import CorruptDataError, TierError, UnrecoverableError
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.dying_store import Death, DyingStore

GROUPS = (Group("rare", "embed*", 3),)
POLICIES = [ChainPolicy(0, max_references=4), ChainPolicy(2, max_references=4), ChainPolicy(2)]


def state_of(states, step):
    """Return a state of which a group changes at each step, too."""
    table = np.random.default_rng([7, step]).normal(size=3000).astype(np.float32)
    return states.of(1, step=step, arrays=2) | {"embed": table, "embed_step": step}


def stored_state(states, step, *, rare):
    """Return what the object tier has of a step: the group of an earlier one."""
    older = state_of(states, rare)
    return state_of(states, step) | {name: older[name] for name in ("embed", "embed_step")}


def lose_memory(run):
    run.forget_local()
    for node in run.nodes:
        node.down = True


def save(run, states, step, *, nodes):
    if not nodes:
        return run.save_to_objects(state_of(states, step), f"s{step}").stats.sent_bytes
    moved = run.persist(run.save(state_of(states, step), f"s{step}"))
    return moved.by_nodes_bytes + moved.by_host_bytes


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nodes", [0, 4])
def test_group_is_written_at_its_interval_and_comes_back_as_it_was_then(rig, states, nodes, policy):
    run = rig(nodes=nodes, chains=policy, groups=GROUPS)
    written = [save(run, states, step, nodes=nodes) for step in range(7)]
    # Generations 1, 4 and 7 have it.
    rare = [0, 0, 0, 3, 3, 3, 6]
    markers = run.folder.committed()
    assert [m.older for m in markers] == [() if step == of else ("rare",) for step, of in enumerate(rare)]
    assert {path.split("/")[0] for path in run.folder.store.list("") if "/embed/c/" in path} == {
        "00000001-s0", "00000004-s3", "00000007-s6",
    }  # fmt: skip
    assert written[1] < written[0] - 9000
    # From memory it is the newest as it was.
    assert states.same(run.recover().state, state_of(states, 6))
    lose_memory(run)
    for step, of in enumerate(rare):
        found = run.recover(tag=f"s{step}", older=["rare"])
        assert states.same(found.state, stored_state(states, step, rare=of))
        assert {n: (g.generation, g.tag) for n, g in found.report.older.items()} == (
            {} if of == step else {"rare": (of + 1, f"s{of}")}
        )
    assert all(verify(run.folder, marker).intact for marker in markers)


def test_load_takes_older_groups_only_if_asked(rig, states):
    run = rig(chains=POLICIES[0], groups=GROUPS)
    for step in range(3):
        save(run, states, step, nodes=4)
    assert not run.recover(tag="s2").report.older
    lose_memory(run)
    with pytest.raises(
        UnrecoverableError, match=r"\(s2\), all of one step, cannot.*of generation 1 only.*older_groups=True"
    ):
        run.recover(tag="s2", older=["another"])
    # Without a tag it falls back to the newest that is of one step.
    found = run.recover()
    assert states.same(found.state, state_of(states, 0))
    assert "older_groups=True" in " ".join(found.report.skipped)
    found = run.recover(older=None, free_slot=0)
    assert states.same(found.state, stored_state(states, 2, rare=0))
    # A slot with it would pass for what the nodes have, and be the base of deltas.
    assert found.filled is None
    folder_run = FolderRun(
        run.folder, run="run-1", policy=ChainPolicy(), retention=Retention(), chunk_bytes=4096
    )
    with pytest.raises(CorruptDataError, match="older groups"):
        folder_run.load("s2")
    assert states.same(folder_run.load()[0], state_of(states, 0))


def test_what_memory_lacks_is_never_taken_from_an_older_group(rig, states):
    """With too few nodes left, the newest cannot be had as it was; then it is the older group, or nothing."""
    run = rig(chains=POLICIES[1], groups=GROUPS)
    for step in range(2):
        save(run, states, step, nodes=4)
    run.forget_local()
    record = run.coordinator.latest("run-1")
    for name in record.nodes[:2]:
        run.nodes[name].down = True
    found = run.recover(older=["rare"])
    assert states.same(found.state, stored_state(states, 1, rare=0))
    assert set(found.report.older) == {"rare"}
    assert found.report.skipped


def test_group_that_did_not_change_is_not_older(rig, states):
    run = rig(nodes=0, chains=POLICIES[0], groups=GROUPS)
    for step in range(5):
        run.save_to_objects(state_of(states, step) | {"embed": np.ones(3000), "embed_step": 1}, f"s{step}")
    assert [m.older for m in run.folder.committed()] == [()] * 5
    lose_memory(run)
    assert not run.recover().report.older


def test_deltas_are_never_made_against_bits_that_are_not_stored(rig, states):
    """The slot has the group of step 1, the object tier that of step 0 under the same token."""
    run = rig(nodes=0, chains=ChainPolicy(9), groups=(Group("rare", "embed*", 2),))
    drift = np.arange(3000, dtype=np.float32)
    for step in range(3):
        state = state_of(states, step) | {"embed": drift + np.float32(step) * 1e-3}
        run.save_to_objects(state, f"s{step}")
    lose_memory(run)
    found = run.recover(older=())
    assert states.same(found.state, state)
    assert not found.report.skipped


def test_retention_keeps_what_older_groups_need(rig, states):
    run = rig(nodes=0, chains=POLICIES[0], groups=GROUPS, retention=Retention(last=1))
    left = []
    for step in range(5):
        save(run, states, step, nodes=0)
        asyncio.run(run.persister.retire())
        left.append([m.generation for m in run.folder.committed()])
    assert left == [[1], [1, 2], [1, 3], [4], [4, 5]]
    # Whole, it needs nothing, and its group is what it was.
    assert [one.chunks > 0 for one in compact(run.folder.store.location, tag="s4")] == [True]
    run.folder.remove("00000004-s3")
    assert verify(run.folder, run.folder.committed()[-1]).intact
    lose_memory(run)
    assert states.same(run.recover(older=None).state, stored_state(states, 4, rare=3))


def test_second_author_mixes_as_the_first_one_planned(rig, states):
    run = rig(chains=POLICIES[0], groups=GROUPS)
    save(run, states, 0, nodes=4)
    saved = run.save(state_of(states, 1), "s1")
    publish, run.persister.publish = run.persister.publish, lambda *_: None
    run.persist(saved)
    run.persister.publish = publish
    master = Persister(
        run.folder.store.location, run.folder, None, run.coordinator, run.nodes.client, chains=ChainPolicy(0)
    )
    asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
    assert run.folder.committed()[-1].older == ("rare",)
    # And the first one, who comes late, finds its own.
    run.persist(saved)
    # Where nobody planned, the master writes what was committed, all of it.
    third = run.save(state_of(states, 2), "s2")
    asyncio.run(master.persist(third.manifest, third.manifest_bytes, record=third.record, source=None))
    assert run.folder.committed()[-1].older == ()
    lose_memory(run)
    assert states.same(run.recover(tag="s1", older=None).state, stored_state(states, 1, rare=0))
    assert states.same(run.recover().state, state_of(states, 2))


@pytest.mark.parametrize("after", [False, True])
def test_author_that_dies_at_any_store_call_leaves_nothing_mixed_by_chance(rig, states, after):
    """Another author without groups finishes it; what is then committed is what one of the two meant."""
    calls, finished = 0, False
    while not finished:
        calls += 2
        run = rig(chains=POLICIES[0], groups=GROUPS, chunk_bytes=65536)
        save(run, states, 0, nodes=4)
        saved = run.save(state_of(states, 1), "s1")
        store = run.folder.store
        run.folder.store = DyingStore(store, Death(calls, after=after))
        try:
            run.persist(saved)
            finished = True
        except TierError:
            pass
        run.folder.store = store
        master = Persister(
            store.location, run.folder, None, run.coordinator, run.nodes.client, chains=ChainPolicy(0)
        )
        asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
        older = run.folder.committed()[-1].older
        assert verify(run.folder, run.folder.committed()[-1]).restorable
        lose_memory(run)
        found = run.recover(tag="s1", older=None)
        assert states.same(found.state, stored_state(states, 1, rare=0 if older else 1))
        assert tuple(found.report.older) == older
        run.close()
    assert calls > 8
