"""Bits that flip, and files that go: no wrong byte is returned, and what was damaged is named."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from fastcheck_dask.errors import FastCheckError
from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state
from fastcheck_dask.tiers.local import LocalTier, SlotState
from fastcheck_dask.tiers.slot_header import HEADER_BYTES


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def newest_slot(host: TrainingHost, run: str) -> Path:
    with LocalTier(run, host.shared_memory, readonly=True) as local:
        committed = [slot for slot in local.slots if slot.status.state is SlotState.COMMITTED]
        return max(committed, key=lambda slot: slot.status.generation or 0).path


def test_load_bit_flipped_in_the_local_slot_takes_that_chunk_from_peers(
    host: TrainingHost, caplog: pytest.LogCaptureFixture
) -> None:
    manager = host.manager(persist_every=0)
    host.save(manager, 1)
    host.save(manager, 2)
    flip(newest_slot(host, manager.run_id), HEADER_BYTES + 6000)
    assert_is_state(manager.load(), 2)
    report = manager.last_load
    assert report is not None
    assert report.source == "local+peers"
    assert 0 < report.raw_bytes["peers"] <= 4096
    (why,) = report.rebuilt
    assert "shared memory" in why
    assert any(why in record.getMessage() for record in caplog.records)
    assert_is_state(manager.load(), 2)
    assert manager.last_load is not None
    assert (manager.last_load.source, manager.last_load.rebuilt) == ("local", [])
    host.save(manager, 3)
    assert_is_state(host.load_elsewhere()[0], 3)


def test_save_bit_flipped_in_the_base_slot_is_whole_on_the_peers(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    """A delta against damaged bits would leave the nodes with a chunk that nobody can decode."""
    manager = host.manager(persist_every=0)
    host.save(manager, 1)
    flip(newest_slot(host, manager.run_id), HEADER_BYTES + 6000)
    nodes = host.save(manager, 2).stats["nodes"]
    for lost in (None, *nodes):
        if lost is not None:
            faulty.proxies[lost].cut()
        state, report = host.load_elsewhere()
        assert_is_state(state, 2)
        assert (report.generation, report.skipped) == (2, [])
        if lost is None:
            assert report.source == "peers"
        else:
            faulty.proxies[lost].heal()


@pytest.fixture(scope="module")
def saved_twice(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Have a host without storage nodes save two steps and lose its memory; return its folder, and a copy."""
    folder = tmp_path_factory.mktemp("laptop") / "host"
    with TrainingHost(folder, None) as host:
        manager = host.manager()
        host.save(manager, 1, level="object")
        host.save(manager, 2, level="object")
        host.lose_memory()
    return folder, shutil.copytree(folder, folder.with_name("kept"))


@pytest.fixture
def laptop(saved_twice: tuple[Path, Path]) -> Iterator[TrainingHost]:
    """Return that host as it was then; in the same folder, which names the run."""
    folder, kept = saved_twice
    shutil.rmtree(folder)
    shutil.copytree(kept, folder)
    with TrainingHost(folder, None) as made:
        yield made


def directory(host: TrainingHost, step: int) -> Path:
    (found,) = host.objects.glob(f"*-step{step}")
    return found


def chunk_of(host: TrainingHost, step: int) -> Path:
    return next(p for p in sorted(directory(host, step).rglob("*")) if p.is_file() and "/c/" in str(p))


def flip_chunk(host: TrainingHost) -> None:
    path = chunk_of(host, 2)
    flip(path, path.stat().st_size // 2)


def remove_chunk(host: TrainingHost) -> None:
    chunk_of(host, 2).unlink()


def truncate_chunk(host: TrainingHost) -> None:
    path = chunk_of(host, 2)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def empty_chunk(host: TrainingHost) -> None:
    chunk_of(host, 2).write_bytes(b"")


def replace_chunk_by_its_former_self(host: TrainingHost) -> None:
    """Everything about it is in order, except that it is not the chunk that was committed."""
    new, old = chunk_of(host, 2), chunk_of(host, 1)
    assert new.relative_to(directory(host, 2)) == old.relative_to(directory(host, 1))
    new.write_bytes(old.read_bytes())


def private(host: TrainingHost, kind: str) -> Path:
    (found,) = (host.objects / ".fastcheck" / kind).glob("*-step2*")
    return found


def remove_marker(host: TrainingHost) -> None:
    private(host, "commits").unlink()


def damage_marker(host: TrainingHost) -> None:
    marker = private(host, "commits")
    marker.write_bytes(marker.read_bytes()[:-30])


def remove_manifest(host: TrainingHost) -> None:
    private(host, "manifests").unlink()


def flip_manifest(host: TrainingHost) -> None:
    path = private(host, "manifests")
    flip(path, path.stat().st_size // 2)


def remove_directory(host: TrainingHost) -> None:
    directory(host, 2).rename(host.folder / "taken away")


@pytest.mark.parametrize(
    "harm",
    [
        flip_chunk,
        remove_chunk,
        truncate_chunk,
        empty_chunk,
        replace_chunk_by_its_former_self,
        remove_marker,
        damage_marker,
        remove_manifest,
        flip_manifest,
        remove_directory,
    ],
)
def test_load_newest_harmed_in_the_object_tier_falls_back_and_says_so(
    laptop: TrainingHost, harm: Callable[[TrainingHost], None], caplog: pytest.LogCaptureFixture
) -> None:
    harm(laptop)
    manager = laptop.manager()
    with pytest.raises(FastCheckError) as told:
        manager.load("step2")
    assert "step2" in str(told.value) or "00000002" in str(told.value)
    assert_is_state(manager.load(), 1)
    report = manager.last_load
    assert report is not None
    assert (report.generation, report.source) == (1, "object")
    assert any(r.levelno >= logging.WARNING and "2" in r.getMessage() for r in caplog.records)
    if harm not in (remove_marker, damage_marker):
        assert any("step2" in why for why in report.skipped)
    assert laptop.save(manager, 3, level="object").generation == 3
    laptop.lose_memory()
    manager = laptop.manager()
    assert_is_state(manager.load(), 3)


def test_load_zarr_metadata_removed_is_exact_all_the_same(laptop: TrainingHost) -> None:
    (directory(laptop, 2) / "zarr.json").unlink()
    manager = laptop.manager()
    state = manager.load()
    report = manager.last_load
    assert report is not None
    assert_is_state(state, report.generation)
    assert report.generation == 2 or any("step2" in why for why in report.skipped)


def test_load_two_nodes_lost_and_the_object_tier_damaged_falls_back_to_the_former(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager()
    host.save(manager, 1, level="object")
    nodes = host.save(manager, 2, level="object").stats["nodes"]
    for name in nodes[:2]:
        faulty.proxies[name].cut()
    path = chunk_of(host, 2)
    flip(path, path.stat().st_size // 2)
    state, report = host.load_elsewhere()
    assert_is_state(state, 1)
    assert (report.generation, report.source) == (1, "object")
    (why,) = report.skipped
    assert "step2" in why


def test_load_two_nodes_lost_takes_the_missing_chunks_from_the_object_tier(
    faulty: FaultyCluster, host: TrainingHost, caplog: pytest.LogCaptureFixture
) -> None:
    manager = host.manager()
    host.save(manager, 1, level="object")
    nodes = host.save(manager, 2, level="object").stats["nodes"]
    for name in (nodes[0], nodes[2]):
        faulty.proxies[name].cut()
    state, report = host.load_elsewhere()
    assert_is_state(state, 2)
    assert report.source == "peers+object"
    assert any(r.levelno >= logging.WARNING and "object tier" in r.getMessage() for r in caplog.records)
