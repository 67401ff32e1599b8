"""Groups with roots of their own: two locations give one state, and neither is ever half of one."""

from __future__ import annotations

import asyncio
import itertools
import json
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask import cli
from fastcheck_dask.config import Group
from fastcheck_dask.engine import roots
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.persist import Persister
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.engine.roots import (
    clear_rivals,
    folder_name,
    groups_from_text,
    groups_to_text,
    locations,
    removable,
)
from fastcheck_dask.errors import (
    CommitConflictError,
    RootAwayError,
    TierError,
    TierFullError,
    UnrecoverableError,
)
from fastcheck_dask.ids import joined
from fastcheck_dask.inspection.checkpoint import Checkpoint
from fastcheck_dask.inspection.garbage import collect_all
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.repair import Sources, repair
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.testing.dying_store import Death, DyingStore
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.s3 import S3Server, s3_environment
from fastcheck_dask.tiers import checkpoint_folder
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, marker_path
from fastcheck_dask.tiers.commit_marker import BaseLink, CommitMarker
from fastcheck_dask.tiers.object_store import open_existing, open_store
from fastcheck_dask.tiers.s3_store import S3Store

POLICIES = [ChainPolicy(0, max_references=4), ChainPolicy(2, max_references=4), ChainPolicy(2)]


@pytest.fixture(params=["folder", "s3"])
def root(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "shared")
    return str(request.getfixturevalue("s3_location"))


@pytest.fixture
def folder_root(tmp_path):
    return str(tmp_path / "shared")


def group_at(root, *, every=1):
    return (Group("backbone", "frozen*", every, root=root),)


def state_of(states, step, *, backbone=0):
    """Return a small state with a backbone that is what it is told."""
    weights = np.random.default_rng([3, backbone]).normal(size=4000).astype(np.float32)
    return states.of(1, step=step, arrays=2) | {"frozen": weights, "frozen_bias": weights[:5], "frozen_n": 7}


def lose_memory(run):
    run.forget_local()
    for node in run.nodes:
        node.down = True


def save(run, states, step, *, nodes, backbone=0):
    state = state_of(states, step, backbone=backbone)
    if not nodes:
        return run.save_to_objects(state, f"s{step}").stats.sent_bytes
    moved = run.persist(run.save(state, f"s{step}"))
    return moved.by_nodes_bytes + moved.by_host_bytes


def at_root(run, groups):
    """Return where the group lies, and the folder there."""
    location = locations(run.folder.store, groups)["backbone"]
    return location, CheckpointFolder(open_store(location))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nodes", [0, 4])
def test_group_lies_at_its_root_and_the_state_loads_as_one(rig, states, root, nodes, policy):
    groups = group_at(root)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    backbones = [0, 0, 1, 1, 1, 0]
    written = [save(run, states, step, nodes=nodes, backbone=b) for step, b in enumerate(backbones)]
    location, part = at_root(run, groups)
    assert location.startswith(root.partition("?")[0])
    # What did not change is not written again, nor published.
    assert [m.generation for m in part.committed()] == [1, 3, 6]
    assert written[1] < written[0] - 13000
    assert not [path for path in run.folder.store.list("") if "/frozen/c" in path]
    markers = run.folder.committed()
    assert [[(ref.generation, ref.location) for ref in m.refs if ref.location] for m in markers] == [
        [(g, location)] for g in (1, 1, 3, 3, 3, 6)
    ]
    lose_memory(run)
    for step, backbone in enumerate(backbones):
        found = run.recover(tag=f"s{step}", older=())
        assert states.same(found.state, state_of(states, step, backbone=backbone))
    assert all(verify(run.folder, m).intact for m in markers)
    assert all(verify(part, m).intact for m in part.committed())
    assert overview(run.folder).sound
    assert overview(run.folder).checkpoints[-1].refs[0] == joined(location, "00000006-s5")
    opened = Checkpoint(run.folder, run.folder.load_manifest(markers[-1]), markers[-1])
    assert opened.elsewhere == (joined(location, "00000006-s5"),)
    assert opened["frozen"][7:9].tobytes() == state_of(states, 5)["frozen"][7:9].tobytes()


def test_part_is_a_checkpoint_that_stock_zarr_reads(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=0)
    opened = zarr.open_group(f"{at_root(run, groups)[0]}/00000001-s0", mode="r")
    state = state_of(states, 0)
    assert sorted(opened) == ["frozen", "frozen_bias"]
    assert all(opened[name][...].tobytes() == state[name].tobytes() for name in opened)


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("nodes", [0, 4])
def test_root_with_interval_keeps_what_the_group_was(rig, states, folder_root, nodes, policy):
    groups = group_at(folder_root, every=3)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    for step in range(5):
        save(run, states, step, nodes=nodes, backbone=step)
    part = at_root(run, groups)[1]
    assert [m.generation for m in part.committed()] == [1, 4]
    assert [m.older for m in run.folder.committed()] == [(), *[("backbone",)] * 2, (), ("backbone",)]
    lose_memory(run)
    for step, of in enumerate([0, 0, 0, 3, 3]):
        found = run.recover(tag=f"s{step}", older=["backbone"])
        assert states.same(found.state, state_of(states, step, backbone=of))


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_group_gets_a_root_and_loses_it_again(rig, states, folder_root, policy):
    run = rig(nodes=0, chains=policy)
    for step, groups in enumerate([(), group_at(folder_root), group_at(folder_root + "-2"), (), ()]):
        run.persister = persister_of(run, groups, policy=policy)
        save(run, states, step, nodes=0, backbone=step // 2)
    if not policy.max_deltas:
        # What has not changed stays where it is.
        second = at_root(run, group_at(folder_root + "-2"))[0]
        assert [ref.location for ref in run.folder.committed()[3].refs] == [second]
    lose_memory(run)
    for step in range(5):
        assert states.same(run.recover(tag=f"s{step}").state, state_of(states, step, backbone=step // 2))


def persister_of(run, groups, *, policy=POLICIES[0], retention=None, encoder=True):
    return Persister(
        run.folder.store.location,
        run.folder,
        run.encoder if encoder else None,
        run.coordinator,
        run.nodes.client,
        chains=policy,
        groups=groups,
        retention=retention,
    )


def test_compacted_checkpoint_needs_no_root(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[1], groups=groups)
    for step in range(2):
        save(run, states, step, nodes=0)
    assert [one.chunks > 0 for one in compact(run.folder.store.location, tag="s1")] == [True]
    shutil.rmtree(folder_root)
    lose_memory(run)
    assert states.same(run.recover().state, state_of(states, 1))
    assert verify(run.folder, run.folder.committed()[-1]).intact


# ---- never silently wrong


def replace_part(part, marker, **changes):
    document = {**marker.__dict__, **changes}
    part.store.write(marker_path(marker.directory), CommitMarker(**document).to_bytes())


@pytest.mark.parametrize(
    "changes", [{"token": "another"}, {"manifest_sha256": "0" * 64}], ids=["token", "manifest"]
)
def test_another_checkpoint_at_the_root_is_refused_by_name_and_location(rig, states, folder_root, changes):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=0)
    location, part = at_root(run, groups)
    replace_part(part, part.committed()[0], **changes)
    lose_memory(run)
    with pytest.raises(UnrecoverableError, match=f"stored against {location}/00000001-s0, which has token"):
        run.recover(tag="s0")
    found = verify(run.folder, run.folder.committed()[0])
    assert not found.restorable
    assert location in found.problems[0].detail
    assert location in (overview(run.folder).checkpoints[0].problem or "")


def test_location_that_refers_on_to_a_third_is_refused(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=0)
    part = at_root(run, groups)[1]
    marker = part.committed()[0]
    back = BaseLink(1, "s0", "token-1", run.folder.committed()[0].manifest_sha256, run.folder.store.location)
    replace_part(part, marker, refs=(back,))
    lose_memory(run)
    with pytest.raises(UnrecoverableError, match="of a third"):
        run.recover(tag="s0")


@pytest.mark.parametrize("gone", [False, True])
def test_damage_at_the_root_is_named_there_and_never_loaded(rig, states, folder_root, gone):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(2):
        save(run, states, step, nodes=0)
    location, part = at_root(run, groups)
    name = "00000001-s0/frozen/c/1"
    intact = part.store.read(name)
    if gone:
        part.store.delete(name)
    else:
        part.store.write(name, intact[:900] + bytes([intact[900] ^ 1]) + intact[901:])
    # Unchanged, it exists once: damage of it is damage of both.
    for marker in run.folder.committed():
        found = verify(run.folder, marker)
        assert [problem.name for problem in found.problems] == [f"{location}/{name}"]
        done = repair(run.folder, marker, found, Sources())
        assert done.left == [f"{location}/{name}"]
        assert not done.repaired
    lose_memory(run)
    with pytest.raises(UnrecoverableError, match="frozen/c/1"):
        run.recover(tag="s1")
    # There it is repaired as in any location.
    copy = CheckpointFolder(open_store(location + "-copy"))
    shutil.copytree(location, location + "-copy", dirs_exist_ok=True)
    copy.store.write(name, intact)
    marker = part.committed()[0]
    assert repair(part, marker, verify(part, marker), Sources([copy])).left == []
    assert verify(run.folder, run.folder.committed()[-1]).intact


def test_what_lies_beside_the_chunks_at_the_root_is_verified_and_repaired_from_the_location(
    rig, states, folder_root
):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(2):
        save(run, states, step, nodes=0)
    location, part = at_root(run, groups)
    name = "00000001-s0/frozen_bias/zarr.json"
    part.store.write(name, b"{}")

    def verified(*options, status):
        ran = CliRunner().invoke(cli.main, ["verify", run.folder.store.location, "--json", *options])
        assert ran.exit_code == status
        return json.loads(ran.stdout)

    # Both checkpoints have it there, and it is verified once.
    found = verified("--all", status=1)["checkpoints"]
    assert [(one["directory"], [p["name"] for p in one["problems"]]) for one in found] == [
        (f"{location}/00000001-s0", [f"{location}/{name}"]),
        ("00000001-s0", []),
        ("00000002-s1", []),
    ]
    assert verified("--repair", status=0)["repaired"] == [f"{name} from the manifest, at {location}"]
    marker = marker_path("00000001-s0")
    part.store.write(marker, b"{}")
    assert f"{location}/{marker}" in [problem["name"] for problem in verified(status=1)["problems"]]


# ---- a root that is away, or full


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("nodes", [0, 4])
def test_root_that_is_away_is_named_and_the_older_checkpoint_stays(rig, states, folder_root, nodes, policy):
    groups = group_at(folder_root)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    save(run, states, 0, nodes=nodes)
    Path(folder_root).rename(folder_root + "-away")
    with pytest.raises(RootAwayError, match=f"{folder_root}.*mounted"):
        save(run, states, 1, nodes=nodes, backbone=1)
    # Nothing was made in its place, neither there nor here.
    assert not Path(folder_root).exists()
    assert [m.tag for m in run.folder.committed()] == ["s0"]
    found = verify(run.folder, run.folder.committed()[0])
    assert [(str(p.fault), p.fatal, folder_root in p.detail) for p in found.problems] == [
        ("missing", True, True)
    ]
    assert folder_root in (overview(run.folder).checkpoints[0].problem or "")
    Path(folder_root + "-away").rename(folder_root)
    saved = save(run, states, 2, nodes=nodes, backbone=1)
    assert saved
    lose_memory(run)
    assert states.same(run.recover().state, state_of(states, 2, backbone=1))
    assert states.same(run.recover(tag="s0").state, state_of(states, 0))


@pytest.fixture
def own_s3(tmp_path, monkeypatch):
    """Return an S3 server to be killed, of which this process soon says that it does not answer."""
    monkeypatch.setitem(S3Store.__init__.__kwdefaults__, "retry_seconds", 1.0)
    with S3Server(tmp_path / "s3") as server, s3_environment(server):
        yield server


@pytest.mark.parametrize(("nodes", "backbone"), [(0, 1), (4, 0)])
def test_root_whose_server_was_killed_is_named_and_gets_what_it_lacks_later(
    rig, states, own_s3, nodes, backbone
):
    groups = group_at(own_s3.url("shared"))
    run = rig(nodes=nodes, chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=nodes)
    part = at_root(run, groups)[1]
    own_s3.kill()
    state = state_of(states, 1, backbone=backbone)
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
    lose_memory(run)
    for step, of in enumerate((0, backbone)):
        assert states.same(run.recover(tag=f"s{step}").state, state_of(states, step, backbone=of))


def answers(folder):
    """Say whether a store serves again; at first it refuses what it has not found yet."""
    try:
        return [folder.load_manifest(marker) for marker in folder.committed()]
    except TierError:
        return False


@pytest.mark.parametrize("other", [None, "-other"])
def test_root_that_is_lost_for_good_is_done_without_once_it_is_not_asked_for(rig, states, folder_root, other):
    run = rig(nodes=0, chains=POLICIES[1], groups=group_at(folder_root))
    save(run, states, 0, nodes=0)
    shutil.rmtree(folder_root)
    with pytest.raises(RootAwayError):
        save(run, states, 1, nodes=0)
    run.persister = persister_of(run, () if other is None else group_at(folder_root + other))
    save(run, states, 2, nodes=0)
    lose_memory(run)
    assert states.same(run.recover().state, state_of(states, 2))
    assert not Path(folder_root).exists()


@pytest.mark.parametrize("backbone", [0, 1])
def test_root_that_goes_away_after_the_plan_is_not_made_again(
    rig, states, folder_root, monkeypatch, backbone
):
    groups = group_at(folder_root)
    run = rig(chains=POLICIES[0], groups=groups, retention=Retention(last=1))
    save(run, states, 0, nodes=4)
    saved = run.save(state_of(states, 1, backbone=backbone), "s1")
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
    lose_memory(run)
    assert states.same(run.recover(tag="s1").state, state_of(states, 1, backbone=backbone))


async def refuse(*_):
    raise TierError("not now")


def test_root_that_is_full_is_named(rig, states, folder_root, monkeypatch):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[1], groups=groups)
    save(run, states, 0, nodes=0)
    location = at_root(run, groups)[0]

    def full(where):
        store = open_store(where)
        if where == location:

            def write(path, data):
                raise TierFullError(f"{location}/{path}", 1, 0, "make room")

            monkeypatch.setattr(store, "write", write)
        return store

    monkeypatch.setattr(roots, "open_store", full)
    with pytest.raises(TierFullError, match=location):
        save(run, states, 1, nodes=0, backbone=1)
    monkeypatch.undo()
    lose_memory(run)
    assert states.same(run.recover().state, state_of(states, 0))


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
def test_author_that_dies_at_any_store_call_of_either_location(rig, states, tmp_path, dying, policy, after):
    """The older one stays; a master without groups, who may find a plan, completes the new one."""
    die, live = dying
    for calls in itertools.count(2, 2):
        groups = group_at(str(tmp_path / f"shared-{calls}"))
        run = rig(chains=policy, groups=groups, chunk_bytes=65536)
        save(run, states, 0, nodes=4)
        saved = run.save(state_of(states, 1, backbone=1), "s1")
        die(run, calls, after=after)
        finished = True
        try:
            run.persist(saved)
        except TierError:
            finished = False
        live(run)
        for marker in run.folder.committed():
            assert verify(run.folder, marker).restorable
        master = persister_of(run, (), policy=ChainPolicy(0), encoder=False)
        asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
        assert [m.tag for m in run.folder.committed()] == ["s0", "s1"]
        assert all(verify(run.folder, marker).restorable for marker in run.folder.committed())
        lose_memory(run)
        assert states.same(run.recover(tag="s0").state, state_of(states, 0))
        assert states.same(run.recover(tag="s1").state, state_of(states, 1, backbone=1))
        run.close()
        if finished:
            break
    assert calls > 20


@pytest.mark.parametrize("after", [False, True])
def test_host_without_nodes_that_dies_at_any_store_call_saves_again(rig, states, tmp_path, dying, after):
    """The next save has the same generation, and finds at the root what the dead one left."""
    die, live = dying
    for calls in itertools.count(2, 2):
        groups = group_at(str(tmp_path / f"shared-{calls}"))
        run = rig(nodes=0, chains=POLICIES[1], groups=groups, chunk_bytes=65536)
        save(run, states, 0, nodes=0)
        die(run, calls, after=after)
        finished = True
        try:
            save(run, states, 1, nodes=0, backbone=1)
        except TierError:
            finished = False
        live(run)
        committed = run.folder.committed()
        assert all(verify(run.folder, marker).restorable for marker in committed)
        if len(committed) == 1:
            run.save_to_objects(state_of(states, 2, backbone=2), "s2")
            run.forget_local()
            assert states.same(run.recover(tag="s2").state, state_of(states, 2, backbone=2))
            # Of the dead one nothing is left.
            assert len(at_root(run, groups)[1].committed()) == 2
        assert states.same(run.recover(tag="s0").state, state_of(states, 0))
        run.close()
        if finished:
            break
    assert calls > 20


def test_what_another_author_left_is_kept_if_it_may_be_needed(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=4)
    saved = run.save(state_of(states, 1, backbone=1), "s1")
    run.persist(saved)
    location, part = at_root(run, groups)
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


def test_master_without_a_plan_writes_the_group_to_its_root(rig, states, folder_root):
    groups = (Group("rare", "momentum", 5), *group_at(folder_root))
    run = rig(chains=POLICIES[0], groups=groups)
    save(run, states, 0, nodes=4)
    saved = run.save(state_of(states, 1, backbone=1), "s1")
    told = groups_from_text(groups_to_text(groups))
    assert [(g.name, g.persist_every, g.root) for g in told] == [
        ("rare", 1, None), ("backbone", 1, folder_root)
    ]  # fmt: skip
    master = persister_of(run, told, policy=ChainPolicy(0), encoder=False)
    asyncio.run(master.persist(saved.manifest, saved.manifest_bytes, record=saved.record, source=None))
    assert [m.generation for m in at_root(run, groups)[1].committed()] == [1, 2]
    assert not [path for path in run.folder.store.list("") if "/frozen/c" in path]
    assert run.folder.committed()[-1].older == ()
    lose_memory(run)
    assert states.same(run.recover().state, state_of(states, 1, backbone=1))


def test_groups_without_roots_are_not_told_and_damaged_ones_are_none(caplog):
    assert groups_to_text((Group("rare", "*", 5),)) == ""
    assert groups_from_text("") == ()
    for text in ("{", "3", '[{"name": 3}]', '[{"name": "a", "match": "*", "later": 1}]'):
        caplog.clear()
        assert groups_from_text(text) == ()
        assert "cannot be read" in caplog.text


# ---- what goes


def test_retention_removes_at_the_root_what_nothing_needs(rig, states, root):
    groups = group_at(root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups, retention=Retention(last=2))
    left = []
    for step, backbone in enumerate([0, 0, 1, 2, 2, 2]):
        save(run, states, step, nodes=0, backbone=backbone)
        asyncio.run(run.persister.retire())
        folders = (at_root(run, groups)[1], run.folder)
        left.append([[m.generation for m in folder.committed()] for folder in folders])
    assert [at for at, _ in left] == [[1], [1], [1, 3], [3, 4], [4], [4]]
    assert [of for _, of in left] == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert all(verify(run.folder, m).intact for m in run.folder.committed())


def test_nothing_goes_at_the_root_while_a_marker_cannot_be_read(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(3):
        save(run, states, step, nodes=0, backbone=step)
    run.persister = persister_of(run, groups, retention=Retention(last=1))
    run.folder.store.write(marker_path("00000001-s0"), b"damaged")
    asyncio.run(run.persister.retire())
    part = at_root(run, groups)[1]
    assert len(part.committed()) == 3
    run.folder.remove("00000001-s0")
    part.store.write(marker_path("00000002-s1"), b"damaged")
    asyncio.run(run.persister.retire())
    assert [m.generation for m in part.committed()] == [1, 3]


def test_gc_removes_what_died_at_a_root_of_the_run_and_never_what_is_needed(rig, states, folder_root):
    groups = group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(3):
        save(run, states, step, nodes=0, backbone=step)
    location, part = at_root(run, groups)
    run.folder.remove("00000002-s1")
    part.store.write("00000009-died/frozen/c/0", b"x")

    def collected(folder, **options):
        found = collect_all(folder, **options)
        return {one.name: str(one.kind) for one in found.removed}, [one.name for one, _ in found.kept]

    names = [f"{location}/00000009-died", f"{location}/00000002-s1"]
    assert collected(run.folder) == ({}, names)
    later = {"now": lambda: time.time() + 2 * 86400}
    wanted = dict(zip(names, ("unfinished", "unneeded"), strict=True))
    assert collected(run.folder, dry_run=True, **later) == (wanted, [])
    # A copy of the run does not need what the run may need.
    copied = Path(run.folder.store.location + "-copy")
    shutil.copytree(run.folder.store.location, copied)
    assert collected(CheckpointFolder(open_store(str(copied))), **later) == ({}, [])
    assert collected(run.folder, **later) == (wanted, [])
    assert [m.generation for m in part.committed()] == [1, 3]
    assert all(verify(run.folder, m).intact for m in run.folder.committed())
    Path(folder_root).rename(folder_root + "-away")
    assert collected(run.folder, **later) == ({}, [location])


def test_two_runs_at_one_root_do_not_touch_each_other(rig, states, folder_root):
    groups = group_at(folder_root)
    runs = [rig(nodes=0, chains=POLICIES[0], groups=groups, retention=Retention(last=1)) for _ in range(2)]
    for step in range(3):
        for number, run in enumerate(runs):
            save(run, states, step, nodes=0, backbone=10 * number + step)
            asyncio.run(run.persister.retire())
    for number, run in enumerate(runs):
        assert len(at_root(run, groups)[1].committed()) == 1
        run.forget_local()
        assert states.same(run.recover().state, state_of(states, 2, backbone=10 * number + 2))
    # A copy is another run, although it has all that the first has.
    location = runs[0].folder.store.location
    shutil.copytree(location, location + "-copy")
    assert folder_name(open_store(location + "-copy")) != folder_name(open_store(location))
    shutil.copytree(folder_root, folder_root + "-copy")
    assert {m.run for m in runs[0].folder.committed()} == {"run-1"}


def marker_at(generation, *, base=None, refs=(), digest="0" * 64):
    return CommitMarker("run", generation, "t", "token", digest, 1, 1.0, base=base, refs=refs)


@given(
    data=st.data(),
    bases=st.lists(st.booleans(), min_size=1, max_size=8),
    kept=st.sets(st.integers(1, 9), min_size=1),
)
def test_what_can_go_is_never_needed(data, bases, kept):
    """Of any history: what a checkpoint of the run names stays, and what that is stored against."""
    parts = []
    for number, has_base in enumerate(bases, 1):
        base = parts[-1].link if has_base and parts else None
        parts.append(marker_at(number, base=base))
    committed = []
    for generation in sorted(kept):
        there = data.draw(st.sampled_from([p for p in parts if p.generation <= generation] or parts[:1]))
        other = data.draw(st.sampled_from(["/root", "/another"]))
        link = BaseLink(there.generation, "t", "token", there.manifest_sha256, other)
        committed.append(marker_at(generation, refs=(link,)))
    gone = removable(parts, committed, location="/root")
    assert gone == sorted(gone, key=lambda m: -m.generation)
    left = [m for m in parts if m not in gone]
    assert parts[-1] in left
    assert {m.generation for m in parts if m.generation > max(kept)} <= {m.generation for m in left}
    for marker in left:
        assert marker.base is None or any(m.link == marker.base for m in left)
    for marker in committed:
        for link in marker.refs:
            assert link.location != "/root" or link.generation in {m.generation for m in left}
    assert not removable(parts, [], location="/root")
