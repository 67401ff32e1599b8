"""The object tier with deltas: written by nodes, by the host, by one after the other, and read back."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from fastcheck_codecs import is_delta

from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.errors import NodeUnavailableError, TierError, UnrecoverableError
from fastcheck_dask.tiers.commit_marker import Needs, Plan


def deltas_at(run, generation):
    """Return how many chunks of a generation lie there as deltas, whole, and not at all."""
    marker = next(m for m in run.folder.committed() if m.generation == generation)
    manifest = run.folder.load_manifest(marker)
    here = [k for k in manifest.chunks if run.folder.store.exists(f"{marker.directory}/{k}")]
    deltas = sum(is_delta(run.folder.read_chunk(marker.directory, key)) for key in here)
    return deltas, len(here) - deltas, len(manifest.chunks) - len(here)


def frozen(states, step):
    """Return a state of which one large array never changes."""
    return states.of(1, step=step) | {"frozen": np.arange(5000, dtype=np.float32)}


def only_objects(run):
    run.forget_local()
    for node in run.nodes:
        node.down = True


def test_persist_nodes_write_deltas_and_nothing_of_what_did_not_change(rig, states):
    run = rig(chains=ChainPolicy())
    moved = [run.persist(run.save(frozen(states, step), f"s{step}")) for step in range(3)]
    assert [m.by_host_bytes for m in moved] == [0, 0, 0]
    assert moved[1].by_nodes_bytes < moved[0].by_nodes_bytes / 1.5
    assert deltas_at(run, 1)[0] == deltas_at(run, 1)[2] == 0
    for generation in (2, 3):
        deltas, _, shared = deltas_at(run, generation)
        assert deltas >= 5
        assert shared == 5
    only_objects(run)
    for step in range(3):
        recovered = run.recover(tag=f"s{step}")
        assert recovered.report.source == "object"
        assert states.same(recovered.state, frozen(states, step))


def test_persist_casts_that_nodes_make_go_as_deltas_too(rig):
    torch = pytest.importorskip("torch")
    run = rig(chains=ChainPolicy())
    master = torch.randn(4000, generator=torch.Generator().manual_seed(1))

    def state(step):
        weights = master + 1e-4 * step
        return {"master": weights, "weights": weights.bfloat16(), "step": step}

    for step in range(2):
        saved = run.save(state(step), f"s{step}")
        assert saved.stats.derived_bytes
        run.persist(saved, from_host=False)
    assert deltas_at(run, 2)[0]
    only_objects(run)
    for step in range(2):
        found = run.recover(tag=f"s{step}").state
        for name, value in state(step).items():
            assert not torch.is_tensor(value) or torch.equal(found[name], value)


@pytest.mark.parametrize("from_host", [False, True])
def test_persist_of_a_lost_node_writes_its_chunks_whole(rig, states, from_host):
    run = rig(chains=ChainPolicy())
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    lost = run.nodes[saved.record.nodes[0]]
    lost.down = True
    run.persist(saved, from_host=from_host)
    deltas, whole, _ = deltas_at(run, 2)
    assert deltas
    assert whole
    only_objects(run)
    assert states.same(run.recover().state, frozen(states, 1))


def test_persist_without_nodes_takes_deltas_from_the_other_slot(rig, states):
    run = rig(nodes=0, chains=ChainPolicy())
    saves = [run.save_to_objects(frozen(states, step), f"s{step}") for step in range(3)]
    assert [save.stats.deltas > 0 for save in saves] == [False, True, True]
    assert deltas_at(run, 2)[2] == deltas_at(run, 3)[2] == 5
    assert saves[1].stats.sent_bytes < saves[0].stats.sent_bytes / 1.5
    run.forget_local()
    for step in range(3):
        assert states.same(run.recover(tag=f"s{step}").state, frozen(states, step))


def test_persist_after_the_slots_are_gone_shares_and_goes_whole(rig, states):
    run = rig(nodes=0, chains=ChainPolicy())
    run.save_to_objects(frozen(states, 0), "s0")
    run.forget_local()
    run.save_to_objects(frozen(states, 1), "s1")
    deltas, whole, shared = deltas_at(run, 2)
    assert (deltas, shared) == (0, 5)
    assert whole
    run.forget_local()
    assert states.same(run.recover().state, frozen(states, 1))


def test_persist_second_author_follows_the_first_ones_plan(rig, states):
    """One leaves chunks to the base; the other, who would not, must not declare them to be there."""
    run = rig(chains=ChainPolicy())
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    store = run.folder.store
    calls = 0

    class Dying:
        location = store.location

        def write_all(self, files):
            for path, data in files:
                self.write(path, data)

        def __getattr__(self, name):
            method = getattr(store, name)

            def call(*arguments):
                nonlocal calls
                calls += name == "write"
                if calls == 6:
                    raise TierError("the first author dies")
                return method(*arguments)

            return call

    run.folder.store = Dying()
    with pytest.raises(TierError, match="the first author dies"):
        run.persist(saved)
    run.folder.store = store
    master = Persister(
        store.location, run.folder, None, run.coordinator, run.nodes.client, chains=ChainPolicy(max_deltas=0)
    )
    asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
    assert run.folder.committed()[-1].base.directory == "00000001-s0"
    # Nobody said anything before: then the master goes whole, and says so.
    third = run.save(frozen(states, 2), "s2")
    asyncio.run(master.persist(third.manifest, third.manifest_bytes, record=third.record, source=None))
    assert run.folder.planned("00000003-s2", third.record.token) == Plan()
    assert run.folder.committed()[-1].base is None
    only_objects(run)
    for step in range(3):
        assert states.same(run.recover(tag=f"s{step}").state, frozen(states, step))


def test_persist_whose_planned_base_is_gone_goes_whole(rig, states):
    run = rig(chains=ChainPolicy())
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    base = run.folder.committed()[0]
    needs = Plan(Needs(base.link))
    assert run.folder.plan("00000002-s1", saved.record.token, needs) == needs
    run.folder.remove(base.directory)
    run.persist(saved)
    assert run.folder.committed()[-1].base is None
    only_objects(run)
    assert states.same(run.recover().state, frozen(states, 1))


def test_publish_refuses_a_delta_whose_base_is_gone(rig, states):
    run = rig(chains=ChainPolicy())
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    run.remove_before_publishing("00000001-s0")
    with pytest.raises(LookupError, match="stored against 00000001-s0, which is not in"):
        run.persist(saved)
    assert run.folder.committed() == []


def test_load_skips_a_broken_chain_and_names_the_link(rig, states):
    run = rig(nodes=0, chains=ChainPolicy())
    for step in range(3):
        run.save_to_objects(frozen(states, step), f"s{step}")
    run.folder.remove("00000002-s1")
    run.forget_local()
    recovered = run.recover()
    assert states.same(recovered.state, frozen(states, 0))
    assert "00000002-s1" in " ".join(recovered.report.skipped)
    with pytest.raises(UnrecoverableError, match="is stored against 00000002-s1, which is not in"):
        run.recover(tag="s2")


def test_load_of_a_delta_whose_marker_is_lost_goes_by_its_plan(rig, states):
    run = rig(chains=ChainPolicy())
    for step in range(2):
        run.persist(run.save(frozen(states, step), f"s{step}"))
    run.folder.store.delete(".fastcheck/commits/00000002-s1.json")
    manifest_at = run.coordinator.latest("run-1").nodes
    run.forget_local()
    # The nodes have the manifest, and have lost their chunks.
    for name in manifest_at:
        run.nodes[name].before["read"] = lambda _: (_ for _ in ()).throw(NodeUnavailableError("n", "gone"))
    assert states.same(run.recover().state, frozen(states, 1))


def test_retire_after_each_persist_keeps_what_the_rules_say(rig, states):
    run = rig(chains=ChainPolicy(2), retention=Retention(last=2))
    for step in range(7):
        run.persist(run.save(frozen(states, step), f"s{step}"))
        asyncio.run(run.persister.retire())
    # 7 is whole, and 6 is the second delta on 4.
    assert [m.generation for m in run.folder.committed()] == [4, 5, 6, 7]
    only_objects(run)
    assert states.same(run.recover(tag="s5").state, frozen(states, 5))


def test_retire_that_fails_is_told_and_is_no_failure(rig, states, caplog):
    run = rig(nodes=0, retention=Retention(last=1))
    for step in range(2):
        run.save_to_objects(frozen(states, step), f"s{step}")
    run.folder.store.delete = lambda _: (_ for _ in ()).throw(TierError("read-only"))
    asyncio.run(run.persister.retire())
    assert "could not be removed" in caplog.text
    del run.folder.store.delete
    asyncio.run(run.persister.retire())
    assert [m.generation for m in run.folder.committed()] == [2]
