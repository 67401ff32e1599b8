"""Chunks that did not change are referred to, by nodes, by the host, in a folder; nothing needed goes."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
import zarr
from fastcheck_codecs import CodecError
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.folder_run import FolderRun
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.references import LEAST_SHARE, worth
from fastcheck_dask.engine.retention import Retention, retire
from fastcheck_dask.errors import UnrecoverableError
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.commit_marker import BaseLink, Needs, Plan
from fastcheck_dask.tiers.folder_store import FolderStore

#: No deltas, and then two between each two checkpoints without.
ALONE, BETWEEN = ChainPolicy(0, max_references=4), ChainPolicy(2, max_references=4)
FROZEN_BYTES = 16_000


def frozen(states, step, *, thawed=0):
    """Return a state of which two arrays never change, but for one that does from step `thawed` on."""
    head = np.arange(2000, dtype=np.float32) + (step if thawed and step >= thawed else 0)
    return states.of(1, step=step, arrays=1) | {"frozen": head, "embedding": np.full(2000, 7.5, np.float32)}


def link(generation):
    return BaseLink(generation, "t", "token", "0" * 64)


@given(
    st.dictionaries(st.integers(1, 9).map(link), st.integers(0, 1000), max_size=9),
    st.integers(0, 9000),
    st.integers(0, 5),
)
def test_worth_chooses_the_largest_and_nothing_that_is_small(spared, total, limit):
    chosen = worth(spared, total, limit=limit)
    assert len(chosen) <= limit
    assert [one.generation for one in chosen] == sorted({one.generation for one in chosen})
    enough = [one for one, nbytes in spared.items() if nbytes >= LEAST_SHARE * total]
    assert set(chosen) <= set(enough)
    assert len(chosen) == min(limit, len(enough))
    left = [spared[one] for one in enough if one not in chosen]
    assert not left or not chosen or max(left) <= min(spared[one] for one in chosen)


def marker_of(run, generation):
    return next(m for m in run.folder.committed() if m.generation == generation)


def generations_with(run, name):
    """Return the generations in whose own directory there are chunks of an array."""
    paths = run.folder.store.list("")
    return {int(path.split("-")[0]) for path in paths if f"/{name}/c/" in path}


@pytest.mark.parametrize("policy", [ALONE, BETWEEN])
@pytest.mark.parametrize("nodes", [0, 4])
def test_unchanged_chunks_are_written_once_however_many_checkpoints_follow(rig, states, nodes, policy):
    run = rig(nodes=nodes, chains=policy)
    written = []
    for step in range(7):
        if nodes:
            written.append(run.persist(run.save(frozen(states, step), f"s{step}")).by_nodes_bytes)
        else:
            written.append(run.save_to_objects(frozen(states, step), f"s{step}").stats.sent_bytes)
    assert generations_with(run, "frozen") == generations_with(run, "embedding") == {1}
    assert max(written[1:]) < written[0]
    heads = [m for m in run.folder.committed() if m.base is None]
    assert len(heads) == (7 if policy is ALONE else 3)
    assert [[ref.generation for ref in m.refs] for m in heads] == [[], *[[1]] * (len(heads) - 1)]
    run.forget_local()
    for node in run.nodes:
        node.down = True
    for step in range(7):
        assert states.same(run.recover(tag=f"s{step}").state, frozen(states, step))
    assert all(verify(run.folder, m, strict=True).intact for m in run.folder.committed())
    assert all(listed.complete for listed in overview(run.folder).checkpoints)


def test_bytes_of_what_does_not_change_are_nothing(rig, states):
    run, bare = (rig(nodes=0, chains=ALONE) for _ in range(2))
    for step in range(3):
        with_frozen = run.save_to_objects(frozen(states, step), f"s{step}").stats.sent_bytes
        without = bare.save_to_objects(states.of(1, step=step, arrays=1), f"s{step}").stats.sent_bytes
        if step:
            assert with_frozen - without < FROZEN_BYTES / 100


def test_what_thaws_is_written_and_its_holder_may_go(rig, states):
    run = rig(nodes=0, chains=ALONE, retention=Retention(last=1))
    left = []
    for step in range(5):
        run.save_to_objects(frozen(states, step, thawed=3), f"s{step}")
        asyncio.run(run.persister.retire())
        left.append([m.generation for m in run.folder.committed()])
        assert states.same(run.read(step + 1), frozen(states, step, thawed=3))
    # The embedding stays with the first, which has to stay for it.
    assert left == [[1], [1, 2], [1, 3], [1, 4], [1, 5]]
    assert generations_with(run, "frozen") == {1, 5}
    for step in range(5, 7):
        state = frozen(states, step, thawed=3) | {"embedding": np.full(2000, step, np.float32)}
        run.save_to_objects(state, f"s{step}")
        asyncio.run(run.persister.retire())
        assert states.same(run.read(step + 1), state)
    assert [m.generation for m in run.folder.committed()] == [7]


def test_several_checkpoints_are_referred_to_each_for_what_it_has(rig, states):
    run = rig(nodes=0, chains=ALONE)
    embeddings = [0, 1, 1, 2, 2]
    for step, of in enumerate(embeddings):
        state = frozen(states, step) | {"embedding": np.full(2000, of, np.float32)}
        run.save_to_objects(state, f"s{step}")
        assert states.same(run.read(step + 1), state)
    refs = [[ref.generation for ref in marker.refs] for marker in run.folder.committed()]
    assert refs == [[], [1], [1, 2], [1], [1, 4]]


def test_second_author_follows_the_references_of_the_first(rig, states):
    run = rig(chains=ALONE)
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    publish, run.persister.publish = run.persister.publish, lambda *_: None
    run.persist(saved)
    run.persister.publish = publish
    assert run.folder.planned("00000002-s1", saved.record.token).needs.refs == (marker_of(run, 1).link,)
    master = Persister(
        run.folder.store.location, run.folder, None, run.coordinator, run.nodes.client, chains=ChainPolicy(0)
    )
    asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
    assert marker_of(run, 2).refs == (marker_of(run, 1).link,)
    assert states.same(run.read(2), frozen(states, 1))


def test_planned_reference_that_is_gone_makes_it_whole(rig, states):
    run = rig(chains=ALONE)
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    first = marker_of(run, 1)
    run.folder.plan("00000002-s1", saved.record.token, Plan(Needs(refs=(first.link,))))
    run.folder.remove(first.directory)
    run.persist(saved)
    assert marker_of(run, 2).refs == ()
    assert states.same(run.read(2), frozen(states, 1))


def test_publish_refuses_a_reference_that_is_gone(rig, states):
    run = rig(chains=ALONE)
    run.persist(run.save(frozen(states, 0), "s0"))
    saved = run.save(frozen(states, 1), "s1")
    run.remove_before_publishing("00000001-s0")
    with pytest.raises(LookupError, match="00000001-s0, which is not in"):
        run.persist(saved)
    assert run.folder.committed() == []


@pytest.mark.parametrize("damage", ["gone", "chunk", "manifest"])
def test_damaged_holder_is_named_and_never_read_as_something_else(rig, states, damage):
    run = rig(nodes=0, chains=ALONE)
    for step in range(3):
        run.save_to_objects(frozen(states, step), f"s{step}")
    paths = {"chunk": "00000001-s0/frozen/c/0", "manifest": ".fastcheck/manifests/00000001-s0.json"}
    path = paths.get(damage)
    if path is None:
        run.folder.remove("00000001-s0")
    else:
        data = bytearray(run.folder.store.read(path))
        data[len(data) // 2] ^= 1
        run.folder.store.write(path, bytes(data))
    run.forget_local()
    for step in (1, 2):
        with pytest.raises(UnrecoverableError, match=r"00000001-s0|frozen"):
            run.recover(tag=f"s{step}")
        found = verify(run.folder, marker_of(run, step + 1))
        assert not found.restorable
        assert "00000001-s0" in " ".join(problem.name + problem.detail for problem in found.problems)
    # And the next one is not built upon what is broken, or is as whole as before.
    run.save_to_objects(frozen(states, 3), "s3")
    if damage != "chunk":
        assert marker_of(run, 4).refs == ()
        assert states.same(run.read(4), frozen(states, 3))


def test_stock_zarr_refuses_and_compact_makes_it_whole(tmp_path, states):
    location = tmp_path / "ckpts"
    run = FolderRun(
        CheckpointFolder(FolderStore(str(location))),
        run="run",
        policy=ALONE,
        retention=Retention(),
        chunk_bytes=4096,
    )
    saves = [run.save(frozen(states, step), f"s{step}") for step in range(3)]
    assert saves[2].shared == 4
    assert [ref.directory for ref in saves[2].marker.refs] == ["00000001-s0"]
    assert run.save(frozen(states, 3), "whole", whole=True).marker.refs == ()
    group = zarr.open_group(location / "00000003-s2", mode="r")
    for name in ("frozen", "w0"):
        with pytest.raises(CodecError, match=r"00000001-s0.*compact"):
            group[name]
    assert [one.chunks > 0 for one in compact(str(location), tag="s2")] == [True]
    run.folder.remove("00000001-s0")
    assert states.same(run.load("s2")[0], frozen(states, 2))
    again = zarr.open_group(location / "00000003-s2", mode="r")
    assert again["frozen"][...].tolist() == frozen(states, 2)["frozen"].tolist()


def test_retire_cut_short_anywhere_leaves_what_can_be_read(rig, states):
    """Whatever the store call after which removal ends, every checkpoint with a marker is complete."""
    calls = 0
    while True:
        calls += 1
        run = rig(nodes=0, chains=ALONE)
        for step in range(3):
            run.save_to_objects(frozen(states, step), f"s{step}")
        store, made = run.folder.store, 0

        class Dying:
            location = store.location

            def __getattr__(self, name, store=store, limit=calls):
                method = getattr(store, name)

                def call(*arguments):
                    nonlocal made
                    made += name in ("write", "delete_tree", "sync")
                    if made == limit:
                        raise InterruptedError
                    return method(*arguments)

                return call

        cut = False
        try:
            retire(CheckpointFolder(Dying()), Retention(last=1))
        except InterruptedError:
            cut = True
        for marker in run.folder.committed():
            assert states.same(run.read(marker.generation), frozen(states, marker.generation - 1))
        retire(run.folder, Retention(last=1))
        assert [m.generation for m in run.folder.committed()] == [1, 3]
        if not cut:
            break
    assert calls > 3
