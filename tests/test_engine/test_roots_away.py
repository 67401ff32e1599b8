"""Groups with roots of their own: one of the locations is away, full or lost, or the author dies."""

from __future__ import annotations

import asyncio
import itertools
import shutil
from pathlib import Path

import pytest

from fastcheck_dask.config import Group
from fastcheck_dask.engine import roots
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.engine.roots import (
    clear_rivals,
    groups_from_text,
    groups_to_text,
)
from fastcheck_dask.errors import (
    CommitConflictError,
    RootAwayError,
    TierError,
    TierFullError,
)
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.dying_store import Death, DyingStore
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.s3 import S3Server, s3_environment
from fastcheck_dask.tiers import checkpoint_folder
from fastcheck_dask.tiers.checkpoint_folder import marker_path
from fastcheck_dask.tiers.object_store import open_existing, open_store
from fastcheck_dask.tiers.s3_store import S3Store

POLICIES = [ChainPolicy(0, max_references=4), ChainPolicy(2, max_references=4), ChainPolicy(2)]


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("nodes", [0, 4])
def test_root_that_is_away_is_named_and_the_older_checkpoint_stays(
    rig, apart, states, folder_root, nodes, policy
):
    groups = apart.group_at(folder_root)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    apart.save(run, 0, nodes=nodes)
    Path(folder_root).rename(folder_root + "-away")
    with pytest.raises(RootAwayError, match=f"{folder_root}.*mounted"):
        apart.save(run, 1, nodes=nodes, backbone=1)
    # Nothing was made in its place, neither there nor here.
    assert not Path(folder_root).exists()
    assert [m.tag for m in run.folder.committed()] == ["s0"]
    found = verify(run.folder, run.folder.committed()[0])
    assert [(str(p.fault), p.fatal, folder_root in p.detail) for p in found.problems] == [
        ("missing", True, True)
    ]
    assert folder_root in (overview(run.folder).checkpoints[0].problem or "")
    Path(folder_root + "-away").rename(folder_root)
    saved = apart.save(run, 2, nodes=nodes, backbone=1)
    assert saved
    apart.lose_memory(run)
    assert states.same(run.recover().state, apart.state_of(2, backbone=1))
    assert states.same(run.recover(tag="s0").state, apart.state_of(0))


@pytest.fixture
def own_s3(tmp_path, monkeypatch):
    """Return an S3 server to be killed, of which this process soon says that it does not answer."""
    monkeypatch.setitem(S3Store.__init__.__kwdefaults__, "retry_seconds", 1.0)
    with S3Server(tmp_path / "s3") as server, s3_environment(server):
        yield server


@pytest.mark.parametrize(("nodes", "backbone"), [(0, 1), (4, 0)])
def test_root_whose_server_was_killed_is_named_and_gets_what_it_lacks_later(
    rig, apart, states, own_s3, nodes, backbone
):
    groups = apart.group_at(own_s3.url("shared"))
    run = rig(nodes=nodes, chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=nodes)
    part = apart.at_root(run, groups)[1]
    own_s3.kill()
    state = apart.state_of(1, backbone=backbone)
    saved = run.save(state, "s1") if nodes else None
    for _ in range(2):
        with pytest.raises(RootAwayError, match="s3://checkpoints/shared/") as raised:
            run.save_to_objects(state, "s1") if saved is None else run.persist(saved)
        assert raised.value.retryable
    assert [m.tag for m in run.folder.committed()] == ["s0"]
    # What has its chunks in memory loads, whatever is away.
    if nodes:
        assert states.same(run.recover().state, state)
    own_s3.start()
    wait_until(lambda: answers(part), "the server to read what it has", seconds=60)
    assert verify(run.folder, run.folder.committed()[0]).intact
    run.save_to_objects(state, "s1") if saved is None else run.persist(saved)
    # What did not change is not written again because it could not be looked at.
    assert [m.tag for m in part.committed()] == ["s0", "s1"][: 1 + backbone]
    apart.lose_memory(run)
    for step, of in enumerate((0, backbone)):
        assert states.same(run.recover(tag=f"s{step}").state, apart.state_of(step, backbone=of))


def answers(folder):
    """Say whether a store serves again; at first it refuses what it has not found yet."""
    try:
        return [folder.load_manifest(marker) for marker in folder.committed()]
    except TierError:
        return False


@pytest.mark.parametrize("other", [None, "-other"])
def test_root_that_is_lost_for_good_is_done_without_once_it_is_not_asked_for(
    rig, apart, states, folder_root, other
):
    run = rig(nodes=0, chains=POLICIES[1], groups=apart.group_at(folder_root))
    apart.save(run, 0, nodes=0)
    shutil.rmtree(folder_root)
    with pytest.raises(RootAwayError):
        apart.save(run, 1, nodes=0)
    run.persister = apart.persister_of(run, () if other is None else apart.group_at(folder_root + other))
    apart.save(run, 2, nodes=0)
    apart.lose_memory(run)
    assert states.same(run.recover().state, apart.state_of(2))
    assert not Path(folder_root).exists()


@pytest.mark.parametrize("backbone", [0, 1])
def test_root_that_goes_away_after_the_plan_is_not_made_again(
    rig, apart, states, folder_root, monkeypatch, backbone
):
    groups = apart.group_at(folder_root)
    run = rig(chains=POLICIES[0], groups=groups, retention=Retention(last=1))
    apart.save(run, 0, nodes=4)
    saved = run.save(apart.state_of(1, backbone=backbone), "s1")
    with monkeypatch.context() as patched:
        patched.setattr(run.persister, "_write", refuse)
        with pytest.raises(TierError, match="not now"):
            run.persist(saved)
    Path(folder_root).rename(folder_root + "-away")
    with pytest.raises(RootAwayError, match="mounted"):
        run.persist(saved)
    asyncio.run(run.persister.retire())
    assert not Path(folder_root).exists()
    Path(folder_root + "-away").rename(folder_root)
    run.persist(saved)
    apart.lose_memory(run)
    assert states.same(run.recover(tag="s1").state, apart.state_of(1, backbone=backbone))


async def refuse(*_):
    raise TierError("not now")


def test_root_that_is_full_is_named(rig, apart, states, folder_root, monkeypatch):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[1], groups=groups)
    apart.save(run, 0, nodes=0)
    location = apart.at_root(run, groups)[0]

    def full(where):
        store = open_store(where)
        if where == location:

            def write(path, data):
                raise TierFullError(f"{location}/{path}", 1, 0, "make room")

            monkeypatch.setattr(store, "write", write)
        return store

    monkeypatch.setattr(roots, "open_store", full)
    with pytest.raises(TierFullError, match=location):
        apart.save(run, 1, nodes=0, backbone=1)
    monkeypatch.undo()
    apart.lose_memory(run)
    assert states.same(run.recover().state, apart.state_of(0))


# ---- crashes


@pytest.fixture
def dying(monkeypatch):
    """Return what makes the process die at a store call, and what lets the next one live."""

    def die(run, calls, *, after):
        death = Death(calls, after=after)
        run.folder.store = DyingStore(run.folder.store, death)
        monkeypatch.setattr(roots, "open_store", lambda where: DyingStore(open_store(where), death))
        monkeypatch.setattr(
            checkpoint_folder, "open_existing", lambda where: DyingStore(open_existing(where), death)
        )

    def live(run):
        monkeypatch.undo()
        run.folder.store = run.folder.store._store

    return die, live


@pytest.mark.parametrize("after", [False, True])
@pytest.mark.parametrize("policy", POLICIES[:2])
def test_author_that_dies_at_any_store_call_of_either_location(
    rig, apart, states, tmp_path, dying, policy, after
):
    """The older one stays; a master without groups, who may find a plan, completes the new one."""
    die, live = dying
    for calls in itertools.count(2, 2):
        groups = apart.group_at(str(tmp_path / f"shared-{calls}"))
        run = rig(chains=policy, groups=groups, chunk_bytes=65536)
        apart.save(run, 0, nodes=4)
        saved = run.save(apart.state_of(1, backbone=1), "s1")
        die(run, calls, after=after)
        finished = True
        try:
            run.persist(saved)
        except TierError:
            finished = False
        live(run)
        for marker in run.folder.committed():
            assert verify(run.folder, marker).restorable
        master = apart.persister_of(run, (), chains=ChainPolicy(0), encoder=False)
        asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
        assert [m.tag for m in run.folder.committed()] == ["s0", "s1"]
        assert all(verify(run.folder, marker).restorable for marker in run.folder.committed())
        apart.lose_memory(run)
        assert states.same(run.recover(tag="s0").state, apart.state_of(0))
        assert states.same(run.recover(tag="s1").state, apart.state_of(1, backbone=1))
        run.close()
        if finished:
            break
    assert calls > 20


@pytest.mark.parametrize("after", [False, True])
def test_host_without_nodes_that_dies_at_any_store_call_saves_again(
    rig, apart, states, tmp_path, dying, after
):
    """The next save has the same generation, and finds at the root what the dead one left."""
    die, live = dying
    for calls in itertools.count(2, 2):
        groups = apart.group_at(str(tmp_path / f"shared-{calls}"))
        run = rig(nodes=0, chains=POLICIES[1], groups=groups, chunk_bytes=65536)
        apart.save(run, 0, nodes=0)
        die(run, calls, after=after)
        finished = True
        try:
            apart.save(run, 1, nodes=0, backbone=1)
        except TierError:
            finished = False
        live(run)
        committed = run.folder.committed()
        assert all(verify(run.folder, marker).restorable for marker in committed)
        if len(committed) == 1:
            run.save_to_objects(apart.state_of(2, backbone=2), "s2")
            run.forget_local()
            assert states.same(run.recover(tag="s2").state, apart.state_of(2, backbone=2))
            # Of the dead one nothing is left.
            assert len(apart.at_root(run, groups)[1].committed()) == 2
        assert states.same(run.recover(tag="s0").state, apart.state_of(0))
        run.close()
        if finished:
            break
    assert calls > 20


def test_what_another_author_left_is_kept_if_it_may_be_needed(rig, apart, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=4)
    saved = run.save(apart.state_of(1, backbone=1), "s1")
    run.persist(saved)
    location, part = apart.at_root(run, groups)
    author = {"location": location, "generation": 2, "token": "another"}
    with pytest.raises(CommitConflictError, match="may need it"):
        clear_rivals(run.folder, part, **author)
    run.folder.store.write(marker_path("00000002-s1"), b"damaged")
    with pytest.raises(CommitConflictError, match="may need it"):
        clear_rivals(run.folder, part, **author)
    run.folder.store.delete(marker_path("00000002-s1"))
    clear_rivals(run.folder, part, location=location, generation=2, token="token-2")
    clear_rivals(run.folder, part, location=location, generation=3, token="another")
    assert [m.token for m in part.committed()] == ["token-1", "token-2"]
    clear_rivals(run.folder, part, **author)
    assert [m.token for m in part.committed()] == ["token-1"]


def test_master_without_a_plan_writes_the_group_to_its_root(rig, apart, states, folder_root):
    groups = (Group("rare", "momentum", 5), *apart.group_at(folder_root))
    run = rig(chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=4)
    saved = run.save(apart.state_of(1, backbone=1), "s1")
    told = groups_from_text(groups_to_text(groups))
    assert [(g.name, g.persist_every, g.root) for g in told] == [
        ("rare", 1, None), ("backbone", 1, folder_root)
    ]  # fmt: skip
    master = apart.persister_of(run, told, chains=ChainPolicy(0), encoder=False)
    asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
    assert [m.generation for m in apart.at_root(run, groups)[1].committed()] == [1, 2]
    assert not [path for path in run.folder.store.list("") if "/frozen/c" in path]
    assert run.folder.committed()[-1].older == ()
    apart.lose_memory(run)
    assert states.same(run.recover().state, apart.state_of(1, backbone=1))


def test_groups_without_roots_are_not_told_and_damaged_ones_are_none(caplog):
    assert groups_to_text((Group("rare", "*", 5),)) == ""
    assert groups_from_text("") == ()
    for text in ("{", "3", '[{"name": 3}]', '[{"name": "a", "match": "*", "later": 1}]'):
        caplog.clear()
        assert groups_from_text(text) == ()
        assert "cannot be read" in caplog.text
