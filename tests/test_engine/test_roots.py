"""Groups with roots of their own: two locations give one state, and neither is ever half of one."""

from __future__ import annotations

import asyncio
import json
import shutil
import time
from pathlib import Path

import pytest
import zarr
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from fastcheck_dask import cli
from fastcheck_dask.engine.chains import ChainPolicy
from fastcheck_dask.engine.compact import compact
from fastcheck_dask.engine.retention import Retention
from fastcheck_dask.engine.roots import (
    folder_name,
    removable,
)
from fastcheck_dask.errors import (
    UnrecoverableError,
)
from fastcheck_dask.ids import joined
from fastcheck_dask.inspection.checkpoint import Checkpoint
from fastcheck_dask.inspection.garbage import collect_all
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.repair import Sources, repair
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder, marker_path
from fastcheck_dask.tiers.commit_marker import BaseLink, CommitMarker
from fastcheck_dask.tiers.object_store import open_store

POLICIES = [ChainPolicy(0, max_references=4), ChainPolicy(2, max_references=4), ChainPolicy(2)]


@pytest.fixture(params=["folder", "s3"])
def root(request, tmp_path):
    if request.param == "folder":
        return str(tmp_path / "shared")
    return str(request.getfixturevalue("s3_location"))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("nodes", [0, 4])
def test_group_lies_at_its_root_and_the_state_loads_as_one(rig, apart, states, root, nodes, policy):
    groups = apart.group_at(root)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    backbones = [0, 0, 1, 1, 1, 0]
    written = [apart.save(run, step, nodes=nodes, backbone=b) for step, b in enumerate(backbones)]
    location, part = apart.at_root(run, groups)
    assert location.startswith(root.partition("?")[0])
    # What did not change is not written again, nor published.
    assert [m.generation for m in part.committed()] == [1, 3, 6]
    assert written[1] < written[0] - 13000
    assert not [path for path in run.folder.store.list("") if "/frozen/c" in path]
    markers = run.folder.committed()
    assert [[(ref.generation, ref.location) for ref in m.refs if ref.location] for m in markers] == [
        [(g, location)] for g in (1, 1, 3, 3, 3, 6)
    ]
    apart.lose_memory(run)
    for step, backbone in enumerate(backbones):
        found = run.recover(tag=f"s{step}", older=())
        assert states.same(found.state, apart.state_of(step, backbone=backbone))
    assert all(verify(run.folder, m).intact for m in markers)
    assert all(verify(part, m).intact for m in part.committed())
    assert overview(run.folder).sound
    assert overview(run.folder).checkpoints[-1].refs[0] == joined(location, "00000006-s5")
    opened = Checkpoint(run.folder, run.folder.load_manifest(markers[-1]), markers[-1])
    assert opened.elsewhere == (joined(location, "00000006-s5"),)
    assert opened["frozen"][7:9].tobytes() == apart.state_of(5)["frozen"][7:9].tobytes()


def test_part_is_a_checkpoint_that_stock_zarr_reads(rig, apart, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=0)
    opened = zarr.open_group(f"{apart.at_root(run, groups)[0]}/00000001-s0", mode="r")
    state = apart.state_of(0)
    assert sorted(opened) == ["frozen", "frozen_bias"]
    assert all(opened[name][...].tobytes() == state[name].tobytes() for name in opened)


@pytest.mark.parametrize("policy", POLICIES[:2])
@pytest.mark.parametrize("nodes", [0, 4])
def test_root_with_interval_keeps_what_the_group_was(rig, apart, states, folder_root, nodes, policy):
    groups = apart.group_at(folder_root, every=3)
    run = rig(nodes=nodes, chains=policy, groups=groups)
    for step in range(5):
        apart.save(run, step, nodes=nodes, backbone=step)
    part = apart.at_root(run, groups)[1]
    assert [m.generation for m in part.committed()] == [1, 4]
    assert [m.older for m in run.folder.committed()] == [(), *[("backbone",)] * 2, (), ("backbone",)]
    apart.lose_memory(run)
    for step, of in enumerate([0, 0, 0, 3, 3]):
        found = run.recover(tag=f"s{step}", older=["backbone"])
        assert states.same(found.state, apart.state_of(step, backbone=of))


@pytest.mark.parametrize("policy", POLICIES[:2])
def test_group_gets_a_root_and_loses_it_again(rig, apart, states, folder_root, policy):
    run = rig(nodes=0, chains=policy)
    for step, groups in enumerate(
        [(), apart.group_at(folder_root), apart.group_at(folder_root + "-2"), (), ()]
    ):
        run.persister = apart.persister_of(run, groups, chains=policy)
        apart.save(run, step, nodes=0, backbone=step // 2)
    if not policy.max_deltas:
        # What has not changed stays where it is.
        second = apart.at_root(run, apart.group_at(folder_root + "-2"))[0]
        assert [ref.location for ref in run.folder.committed()[3].refs] == [second]
    apart.lose_memory(run)
    for step in range(5):
        assert states.same(run.recover(tag=f"s{step}").state, apart.state_of(step, backbone=step // 2))


def test_compacted_checkpoint_needs_no_root(rig, apart, states, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[1], groups=groups)
    for step in range(2):
        apart.save(run, step, nodes=0)
    assert [one.chunks > 0 for one in compact(run.folder.store.location, tag="s1")] == [True]
    shutil.rmtree(folder_root)
    apart.lose_memory(run)
    assert states.same(run.recover().state, apart.state_of(1))
    assert verify(run.folder, run.folder.committed()[-1]).intact


# ---- never silently wrong


def replace_part(part, marker, **changes):
    document = {**marker.__dict__, **changes}
    part.store.write(marker_path(marker.directory), CommitMarker(**document).to_bytes())


@pytest.mark.parametrize(
    "changes", [{"token": "another"}, {"manifest_sha256": "0" * 64}], ids=["token", "manifest"]
)
def test_another_checkpoint_at_the_root_is_refused_by_name_and_location(rig, apart, folder_root, changes):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=0)
    location, part = apart.at_root(run, groups)
    replace_part(part, part.committed()[0], **changes)
    apart.lose_memory(run)
    with pytest.raises(UnrecoverableError, match=f"stored against {location}/00000001-s0, which has token"):
        run.recover(tag="s0")
    found = verify(run.folder, run.folder.committed()[0])
    assert not found.restorable
    assert location in found.problems[0].detail
    assert location in (overview(run.folder).checkpoints[0].problem or "")


def test_location_that_refers_on_to_a_third_is_refused(rig, apart, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    apart.save(run, 0, nodes=0)
    part = apart.at_root(run, groups)[1]
    marker = part.committed()[0]
    back = BaseLink(1, "s0", "token-1", run.folder.committed()[0].manifest_sha256, run.folder.store.location)
    replace_part(part, marker, refs=(back,))
    apart.lose_memory(run)
    with pytest.raises(UnrecoverableError, match="of a third"):
        run.recover(tag="s0")


@pytest.mark.parametrize("gone", [False, True])
def test_damage_at_the_root_is_named_there_and_never_loaded(rig, apart, folder_root, gone):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(2):
        apart.save(run, step, nodes=0)
    location, part = apart.at_root(run, groups)
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
    apart.lose_memory(run)
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
    rig, apart, folder_root
):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(2):
        apart.save(run, step, nodes=0)
    location, part = apart.at_root(run, groups)
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


# ---- what goes


def test_retention_removes_at_the_root_what_nothing_needs(rig, apart, root):
    groups = apart.group_at(root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups, retention=Retention(last=2))
    left = []
    for step, backbone in enumerate([0, 0, 1, 2, 2, 2]):
        apart.save(run, step, nodes=0, backbone=backbone)
        asyncio.run(run.persister.retire())
        folders = (apart.at_root(run, groups)[1], run.folder)
        left.append([[m.generation for m in folder.committed()] for folder in folders])
    assert [at for at, _ in left] == [[1], [1], [1, 3], [3, 4], [4], [4]]
    assert [of for _, of in left] == [[1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 6]]
    assert all(verify(run.folder, m).intact for m in run.folder.committed())


def test_nothing_goes_at_the_root_while_a_marker_cannot_be_read(rig, apart, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(3):
        apart.save(run, step, nodes=0, backbone=step)
    run.persister = apart.persister_of(run, groups, retention=Retention(last=1))
    run.folder.store.write(marker_path("00000001-s0"), b"damaged")
    asyncio.run(run.persister.retire())
    part = apart.at_root(run, groups)[1]
    assert len(part.committed()) == 3
    run.folder.remove("00000001-s0")
    part.store.write(marker_path("00000002-s1"), b"damaged")
    asyncio.run(run.persister.retire())
    assert [m.generation for m in part.committed()] == [1, 3]


def test_gc_removes_what_died_at_a_root_of_the_run_and_never_what_is_needed(rig, apart, folder_root):
    groups = apart.group_at(folder_root)
    run = rig(nodes=0, chains=POLICIES[0], groups=groups)
    for step in range(3):
        apart.save(run, step, nodes=0, backbone=step)
    location, part = apart.at_root(run, groups)
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


def test_two_runs_at_one_root_do_not_touch_each_other(rig, apart, states, folder_root):
    groups = apart.group_at(folder_root)
    runs = [rig(nodes=0, chains=POLICIES[0], groups=groups, retention=Retention(last=1)) for _ in range(2)]
    for step in range(3):
        for number, run in enumerate(runs):
            apart.save(run, step, nodes=0, backbone=10 * number + step)
            asyncio.run(run.persister.retire())
    for number, run in enumerate(runs):
        assert len(apart.at_root(run, groups)[1].committed()) == 1
        run.forget_local()
        assert states.same(run.recover().state, apart.state_of(2, backbone=10 * number + 2))
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
