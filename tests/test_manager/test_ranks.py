"""Several ranks save and load one checkpoint: all of them or none, and each is told why."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    CommitConflictError,
    ConfigError,
    LayoutError,
    RootAwayError,
    UnrecoverableError,
    UnsupportedLeafError,
)
from fastcheck_dask.inspection.garbage import collect_all
from fastcheck_dask.inspection.joint_verification import choose_all, choose_one
from fastcheck_dask.inspection.overview import overview
from fastcheck_dask.inspection.verification import verify
from fastcheck_dask.manager import snapshots
from fastcheck_dask.manager.ranks import parse_rank
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.tiers.checkpoint_folder import CheckpointFolder
from fastcheck_dask.tiers.joint_marker import JointFolder
from fastcheck_dask.tiers.object_store import open_store


def part(rank: int, step: int, nbytes: int = 4096) -> np.ndarray:
    """Return what a rank has at a step."""
    return np.random.default_rng([rank, step]).normal(size=nbytes // 4).astype(np.float32)


class World:
    """All ranks of one run, each with a manager in this process."""

    def __init__(self, make: Callable[..., FastCheckManager], size: int, **options: Any) -> None:
        self.size = size
        with ThreadPoolExecutor(size) as pool:
            made = [
                pool.submit(make, rank=rank, world_size=size, **({"commit_timeout": "60 s"} | options))
                for rank in range(size)
            ]
            self.managers = [one.result(60) for one in made]

    def save(self, step: int, *, level: str | None = None) -> None:
        for handle in self.handles(step):
            handle.wait(level, timeout=60)

    def handles(self, step: int) -> list[Any]:
        return [
            manager.save_async({"w": part(rank, step), "step": step}, f"t{step}")
            for rank, manager in enumerate(self.managers)
        ]

    def assert_loads(self, step: int, *, tag: str | None = None) -> None:
        for rank, manager in enumerate(self.managers):
            state = manager.load(tag)
            assert state["step"] == step
            assert state["w"].tobytes() == part(rank, step).tobytes()

    def close(self, **options: Any) -> None:
        with ThreadPoolExecutor(self.size) as pool:
            list(pool.map(lambda manager: manager.close(timeout=60, **options), self.managers))


@pytest.fixture
def world(make: Any) -> Iterator[Callable[..., World]]:
    def start(size: int = 2, **options: Any) -> World:
        return World(make, size, **options)

    return start


def test_all_ranks_save_and_load_what_is_theirs(world: Any, tmp_path: Path) -> None:
    first = world()
    assert first.managers[0].load() is None
    for step in (1, 2):
        first.save(step)
    first.assert_loads(2)
    first.assert_loads(1, tag="t1")
    assert [manager.tags() for manager in first.managers] == [["t1", "t2"]] * 2
    assert first.managers[1].path("t2") == f"{tmp_path}/objects/rank-00001/00000002-t2"
    with pytest.raises(CheckpointNotFoundError, match=r"'t2' \(world_size=2\)"):
        first.managers[0].load("t3")
    first.close()
    again = world()
    again.assert_loads(2)
    again.save(3)
    again.assert_loads(3)


def test_one_rank_fails_all_are_told_and_the_former_checkpoint_stays(
    world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = world()
    ranks.save(1)
    taken = snapshots.take_snapshot

    def full(slot: Any, flat: Any, tag: str, **noted: Any) -> None:
        if "r00001" in str(slot.path):
            raise OSError(28, "No space left on device")
        taken(slot, flat, tag, **noted)

    monkeypatch.setattr(snapshots, "take_snapshot", full)
    failed = ranks.handles(2)
    assert isinstance(failed[0].exception(timeout=60), CommitConflictError)
    assert "rank 1 failed" in str(failed[0].exception())
    assert "No space left" in str(failed[0].exception())
    assert "No space left" in str(failed[1].exception(timeout=60))
    ranks.assert_loads(1)
    monkeypatch.undo()
    ranks.save(3)
    ranks.assert_loads(3)
    assert ranks.managers[0].tags() == ["t1", "t3"]


def test_one_rank_has_a_state_that_cannot_be_stored_others_do_not_wait(world: Any) -> None:
    ranks = world()
    handle = ranks.managers[0].save_async({"w": part(0, 1)}, "t1")
    with pytest.raises(UnsupportedLeafError):
        ranks.managers[1].save_async({"w": object()}, "t1")
    assert "rank 1 failed" in str(handle.exception(timeout=60))
    assert ranks.managers[0].load() is None
    ranks.save(2)
    ranks.assert_loads(2)


def test_tags_differ_both_are_named(world: Any) -> None:
    ranks = world()
    apart = [manager.save_async({"w": part(0, 0)}, f"r{n}") for n, manager in enumerate(ranks.managers)]
    # One of them waits for somebody who saves its tag, until the next save of the other.
    together = [manager.save_async({"w": part(0, 0)}, "t9") for manager in ranks.managers]
    assert any("'r0'" in error and "'r1'" in error for error in [str(h.exception(timeout=60)) for h in apart])
    for handle in together:
        handle.wait(timeout=60)
    assert ranks.managers[0].tags() == ["t9"]


def test_rank_that_is_late_is_named_and_told(world: Any) -> None:
    before = world()
    before.save(1)
    before.close()
    ranks = world(commit_timeout="500 ms")
    early = ranks.managers[0].save_async({"w": part(0, 2), "step": 2}, "t2")
    assert "rank 1 had not prepared 't2' within 0.5 s" in str(early.exception(timeout=60))
    late = ranks.managers[1].save_async({"w": part(1, 2), "step": 2}, "t2")
    assert "aborted before rank 1 came" in str(late.exception(timeout=60))
    ranks.assert_loads(1)


def test_rank_closed_others_are_told_at_once(world: Any, make: Any) -> None:
    ranks = world()
    ranks.save(1)
    waiting = ranks.managers[0].save_async({"w": part(0, 2), "step": 2}, "t2")
    ranks.managers[1].close()
    assert "rank 1 died, or was ended" in str(waiting.exception(timeout=60))
    ranks.managers[1] = make(rank=1, world_size=2)
    ranks.assert_loads(1)
    ranks.save(3)
    ranks.assert_loads(3)


@pytest.mark.parametrize("size", [1, 3])
def test_load_with_another_world_size_is_refused_with_both_numbers(world: Any, make: Any, size: int) -> None:
    ranks = world(2)
    ranks.save(1)
    ranks.close()
    for rank in range(size):
        one = make(rank=rank, world_size=size) if size > 1 else make()
        with pytest.raises(LayoutError, match=rf"'t1'.*world_size=2.*rank {rank} of world_size={size}"):
            one.load()
        one.close()


def test_saves_go_on_with_another_world_size_and_back(world: Any, make: Any) -> None:
    for size, step in ((3, 1), (2, 2)):
        ranks = world(size)
        ranks.save(step)
        ranks.assert_loads(step)
        ranks.close()
    one = make()
    one.save_async({"w": part(0, 3)}, "t3").wait(timeout=60)
    assert one.load()["w"].tobytes() == part(0, 3).tobytes()
    one.close()
    three = world(3)
    with pytest.raises(LayoutError, match=r"'t3'.*world_size=1.*'t1' \(world_size=3\)"):
        three.managers[1].load()
    three.assert_loads(1, tag="t1")
    three.save(4)
    three.assert_loads(4)


def test_part_that_is_lost_names_the_next_older_checkpoint_of_all(world: Any, tmp_path: Path) -> None:
    ranks = world()
    for step in (1, 2):
        ranks.save(step, level="object")
    ranks.close()
    shutil.rmtree(tmp_path / "objects" / "rank-00001" / "00000002-t2" / "w")
    again = world()
    assert again.managers[0].load()["step"] == 2
    with pytest.raises(
        UnrecoverableError, match=r"part of rank 1 of checkpoint 't2'.*load\(tag='t1'\) on all"
    ):
        again.managers[1].load()
    again.assert_loads(1, tag="t1")


def test_coordinator_and_memory_lost_object_tier_knows_what_all_ranks_have(
    world: Any, tmp_path: Path
) -> None:
    ranks = world()
    for step in (1, 2):
        ranks.save(step, level="object")
    ranks.close()
    for path in (tmp_path / "objects" / ".fastcheck").glob("coordinator.db*"):
        path.unlink()
    # Of the newest one rank has nothing.
    shutil.rmtree(tmp_path / "objects" / "rank-00000" / "00000002-t2")
    (tmp_path / "objects" / "rank-00000" / ".fastcheck" / "commits" / "00000002-t2.json").unlink()
    again = world()
    again.assert_loads(1)
    assert again.managers[0].tags() == ["t1"]
    again.save(3)
    again.assert_loads(3)


def test_joint_marker_damaged_or_gone_a_load_proves_it_and_writes_it_anew(world: Any, tmp_path: Path) -> None:
    joint = tmp_path / "objects" / ".fastcheck" / "joint"
    marker = joint / "00000001-t1.json"
    ranks = world()
    ranks.save(1, level="object")
    ranks.close()
    assert choose_all(CheckpointFolder(open_store(str(tmp_path / "objects")))).problems == ()
    data = marker.read_bytes()
    marker.write_bytes(data[:-9])
    # The coordinator knows what it was.
    again = world()
    again.assert_loads(1)
    assert marker.read_bytes() == data
    again.close()
    shutil.rmtree(tmp_path / "objects" / ".fastcheck")
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    alone = world()
    alone.assert_loads(1)
    assert marker.read_bytes() == data


def test_parts_that_nobody_knows_do_not_pass_for_a_new_run(world: Any, tmp_path: Path) -> None:
    ranks = world()
    ranks.save(1, level="object")
    ranks.close()
    shutil.rmtree(tmp_path / "objects" / ".fastcheck")
    shutil.rmtree(tmp_path / "objects" / "rank-00000" / ".fastcheck" / "joint-copies")
    again = world()
    for manager in again.managers:
        with pytest.raises(UnrecoverableError, match="move the ranks' folders"):
            manager.load()


def backbone_at(root: Path | str) -> dict[str, Any]:
    return {
        "persist": "incremental",
        "keep_last": 1,
        "groups": [{"name": "b", "match": "back*", "root": str(root)}],
    }


def with_backbone(rank: int, step: int) -> dict[str, Any]:
    """Return a state of which the larger part never changes."""
    return {"w": part(rank, step), "step": step, "backbone": part(rank, 100, 40_000)}


def save_with_backbone(managers: list[FastCheckManager], step: int, *, level: str = "object") -> None:
    handles = [m.save_async(with_backbone(rank, step), f"t{step}") for rank, m in enumerate(managers)]
    for handle in handles:
        handle.wait(level, timeout=60)


def assert_have_backbone(managers: list[FastCheckManager], step: int) -> None:
    for rank, manager in enumerate(managers):
        state, wanted = manager.load(), with_backbone(rank, step)
        assert state["step"] == step
        assert all(state[name].tobytes() == wanted[name].tobytes() for name in ("w", "backbone"))


def test_group_at_a_root_has_a_folder_of_each_rank_and_loads_as_one(world: Any, tmp_path: Path) -> None:
    root = tmp_path / "shared"
    ranks = world(**backbone_at(root))
    for step in (1, 2, 3):
        save_with_backbone(ranks.managers, step)
    ranks.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    names = sorted(path.name for path in root.iterdir())
    assert [re.sub("-[0-9a-f]{16}$", "", name) for name in names] == [
        "objects-rank-00000",
        "objects-rank-00001",
    ]
    # Written once, and kept by whoever refers to it.
    parts = [CheckpointFolder(open_store(str(root / name / "b"))) for name in names]
    assert [[marker.tag for marker in one.committed()] for one in parts] == [["t1"], ["t1"]]
    whole = CheckpointFolder(open_store(str(tmp_path / "objects")))
    assert overview(whole).joint[-1].tag == "t3"
    assert overview(whole).sound
    assert all(verify(one.folder, one.marker).intact for one in choose_all(whole).parts)
    parts[1].store.write("00000009-died/backbone/c/0", b"x")
    done = collect_all(whole, now=lambda: 4e9)
    assert [one.name for one in done.removed] == [f"{root}/{names[1]}/b/00000009-died"]
    assert done.kept == ()
    again = world(**backbone_at(root))
    assert_have_backbone(again.managers, 3)
    # A rank whose group is lost says so, and does not take another checkpoint than the others.
    again.close()
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    shutil.rmtree(root / names[1] / "b" / "00000001-t1" / "backbone")
    damaged = [verify(one.folder, one.marker).restorable for one in choose_one(whole, "t3").parts]
    # Each after what it has at the root.
    assert damaged == [True, True, False, False]
    broken = world(**backbone_at(root))
    assert_have_backbone(broken.managers[:1], 3)
    with pytest.raises(UnrecoverableError, match="part of rank 1 of checkpoint 't3'"):
        broken.managers[1].load()


def test_ranks_may_have_other_groups_than_each_other(make: Any, tmp_path: Path) -> None:
    def start() -> list[FastCheckManager]:
        options = [backbone_at(tmp_path / "shared"), {"persist": "incremental"}]
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(make, rank=rank, world_size=2, **options[rank]) for rank in range(2)]
            return [one.result(60) for one in made]

    managers = start()
    save_with_backbone(managers, 1)
    save_with_backbone(managers, 2)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda manager: manager.close(), managers))
    shutil.rmtree(tmp_path / "shm", ignore_errors=True)
    assert len(list((tmp_path / "shared").iterdir())) == 1
    assert_have_backbone(start(), 2)


def test_root_of_one_rank_is_away_the_checkpoint_is_not_marked_until_it_is_there(
    world: Any, tmp_path: Path
) -> None:
    root = tmp_path / "shared"
    ranks = world(coordinator=f"sqlite:///{tmp_path}/own.db", **backbone_at(root))
    save_with_backbone(ranks.managers, 1)
    whole = JointFolder(str(tmp_path / "objects"))
    (kept,) = whole.markers()
    whole._store.delete(".fastcheck/joint/00000001-t1.json")
    root.rename(tmp_path / "away")
    with pytest.raises(RootAwayError, match="t1 of rank 0"):
        whole.publish(kept)
    assert whole.markers() == []
    (tmp_path / "away").rename(root)
    assert whole.publish(kept)


def test_interval_of_a_group_is_refused_with_several_ranks(tmp_path: Path) -> None:
    groups = [{"name": "b", "match": "back*", "persist_every": 3}]
    with pytest.raises(ConfigError, match=r"b has persist_every=3.*several ranks.*leave the interval out"):
        FastCheckManager(tmp_path / "objects", persist="incremental", groups=groups, rank=0, world_size=2)
    assert not (tmp_path / "objects").exists()


def test_four_ranks_with_nodes_deltas_and_lost_memory(world: Any, tmp_path: Path) -> None:
    with FaultyCluster(tmp_path / "nodes", 3) as cluster:
        options = {"coordinator": cluster.coordinator, "num_shards": 2, "persist_every": 0}
        ranks = world(4, **options)
        for step in (1, 2, 3):
            ranks.save(step, level="peers")
        ranks.close()
        shutil.rmtree(tmp_path / "shm", ignore_errors=True)
        again = world(4, **options)
        again.assert_loads(3)
        assert again.managers[2].last_load.source == "peers"
        again.save(4, level="peers")
        again.assert_loads(4)
        again.close()


def test_one_rank_alone_has_its_nodes_full_all_are_told(world: Any, tmp_path: Path) -> None:
    with FaultyCluster(tmp_path / "nodes", 2) as cluster:
        ranks = world(2, coordinator=cluster.coordinator, num_shards=1, persist_every=0)
        ranks.save(1, level="peers")
        for store in cluster.stores.values():
            store._holdings.limit_bytes = store.used_bytes + 2**16
        small = ranks.managers[0].save_async({"w": part(0, 2), "step": 2}, "t2")
        large = ranks.managers[1].save_async({"w": part(1, 2, 2**20), "step": 2}, "t2")
        assert "too small" in str(large.exception(timeout=60))
        # What the large one has set aside may leave no room for the small one either.
        assert re.search("rank 1 failed|too small", str(small.exception(timeout=60)))
        ranks.assert_loads(1)
        ranks.save(3, level="peers")
        ranks.assert_loads(3)
        ranks.close()


@pytest.mark.parametrize(
    ("rank", "world_size", "environment", "wanted"),
    [
        (None, None, {"RANK": "1", "WORLD_SIZE": "2"}, (0, 1)),
        ("auto", None, {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        ("auto", 2, {"RANK": "1", "WORLD_SIZE": "2"}, (1, 2)),
        (3, 4, {}, (3, 4)),
        ("auto", None, {"RANK": "1"}, "WORLD_SIZE is ''"),
        ("auto", None, {}, "RANK is ''"),
        ("auto", 3, {"RANK": "1", "WORLD_SIZE": "2"}, "WORLD_SIZE=2 is set"),
        (1, None, {}, "go together"),
        (None, 2, {}, "go together"),
        (2, 2, {}, "rank=2 and world_size=2"),
        ("1", 2, {}, "whole numbers"),
        (0.0, 2, {}, "whole numbers"),
    ],
)
def test_rank_is_never_guessed(
    monkeypatch: pytest.MonkeyPatch, rank: Any, world_size: Any, environment: dict[str, str], wanted: Any
) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if isinstance(wanted, str):
        with pytest.raises(ConfigError, match=wanted):
            parse_rank(rank, world_size)
    else:
        found = parse_rank(rank, world_size)
        assert (found.rank, found.world_size) == wanted
