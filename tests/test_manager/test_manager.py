"""A manager without storage nodes: what is saved comes back, and what is wrong is said."""

from __future__ import annotations

import asyncio
import logging
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import zarr

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import (
    CheckpointNotFoundError,
    ClosedError,
    ConfigError,
    LayoutError,
    UnrecoverableError,
    UnsupportedLeafError,
)
from fastcheck_dask.testing.faults import wait_until


def test_load_never_saved_returns_none(make: Any) -> None:
    manager = make()
    assert manager.load() is None
    assert manager.tags() == []
    with pytest.raises(CheckpointNotFoundError, match="nothing-here"):
        manager.load(tag="nothing-here")


@pytest.mark.parametrize("keep_local", [True, False])
def test_load_after_restart_empty_and_tiny_leaves_same_shapes(make: Any, keep_local: bool) -> None:
    state = {
        "e": torch.empty(0),
        "e2": torch.empty(0, 5),
        "e3": torch.empty(3, 0, 2, dtype=torch.bfloat16),
        "s": torch.tensor(7),
        "none": None,
        "deep": [(), {}, (1, None, np.float32(2))],
    }
    first = make()
    first.save_async(state, "empty").wait()
    first.close(keep_local=keep_local)
    found = make().load()
    for name in ("e", "e2", "e3", "s"):
        assert found[name].shape == state[name].shape
        assert found[name].dtype == state[name].dtype
    assert found["s"].item() == 7
    assert found["deep"][:2] == [(), {}]
    assert found["none"] is None


def test_save_view_of_large_tensor_stores_the_view(make: Any) -> None:
    big = torch.arange(5_000_000, dtype=torch.float32)
    manager = make()
    handle = manager.save_async({"v": big[10:1010]}, "view").wait()
    assert handle.stats["raw_bytes"] == 4000
    assert handle.stats["sent_bytes"] < 5000
    assert torch.equal(manager.load()["v"], big[10:1010])


@pytest.mark.parametrize("compression", ["auto", "always", "never"])
def test_save_compression_is_as_set_and_told(make: Any, compression: str) -> None:
    zeros_and_ones = np.arange(100_000, dtype=np.int64) % 2
    manager = make(compression=compression)
    handle = manager.save_async({"w": zeros_and_ones}, "a").wait("object")
    assert handle.stats["compressed"] is (compression != "never")
    assert (handle.stats["sent_bytes"] >= zeros_and_ones.nbytes) is (compression == "never")
    assert handle.stats["encode_bytes_per_second"] > 0
    assert handle.stats["link_bytes_per_second"] > 0
    manager.close()
    assert make().load()["w"].tobytes() == zeros_and_ones.tobytes()
    assert (zarr.open_group(manager.path("a"), mode="r")["w"][:] == zeros_and_ones).all()


def test_save_many_small_chunks_comes_back(make: Any) -> None:
    sizes = {f"v{extra}": 20 * 1024 + extra for extra in (-1, 0, 1)}
    state: dict[str, np.ndarray] = {
        name: np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
        for name, size in sizes.items()
    }
    state["m"] = np.random.default_rng(2).normal(size=(7, 333)).T
    manager = make(chunk_bytes=1024)
    handle = manager.save_async(state, "chunks").wait()
    assert handle.stats["chunks"] >= 61 + state["m"].nbytes // 1024
    manager.close()
    found = make().load()
    for name, values in state.items():
        assert found[name].tobytes() == values.tobytes()
        assert found[name].shape == values.shape


def test_load_list_that_grew_needs_no_destination(make: Any, kit: Any) -> None:
    manager = make()
    history: list[np.ndarray] = []
    for step in range(3):
        history.append(kit.noise(step))
        manager.save_async({"hist": history}, f"s{step}").wait()
    found = manager.load()["hist"]
    assert [t.tobytes() for t in found] == [t.tobytes() for t in history]
    assert len(manager.load(tag="s0")["hist"]) == 1


def test_save_changed_right_after_keeps_what_was(make: Any) -> None:
    tensors = {f"t{i}": torch.zeros(3000) for i in range(40)}
    manager = make()
    for step in range(1, 5):
        for tensor in tensors.values():
            tensor.fill_(step)
        handle = manager.save_async(tensors | {"step": step}, f"s{step}")
        for tensor in tensors.values():
            tensor.fill_(-1)
    handle.wait()
    for step in range(1, 5):
        found = manager.load(tag=f"s{step}")
        assert found.pop("step") == step
        assert {float(v) for t in found.values() for v in t.unique()} == {float(step)}


def test_load_while_save_in_flight_sees_it(make: Any, kit: Any) -> None:
    manager = make()
    manager.save_async({"w": kit.noise(1)}, "old").wait()
    manager.save_async({"w": kit.noise(2, 4 * 2**20)}, "new")
    assert manager.load()["w"].tobytes() == kit.noise(2, 4 * 2**20).tobytes()
    manager.save_async({"w": kit.noise(3, 4 * 2**20)}, "newer")
    assert manager.load(tag="newer")["w"].tobytes() == kit.noise(3, 4 * 2**20).tobytes()


def test_restart_resumes_at_the_last_commit_whatever_the_tags_sort_like(make: Any) -> None:
    manager = make()
    for step in (500, 2500, 10000, 900):
        manager.save_async({"step": step}, f"step_{step}")
    manager.close()
    again = make()
    assert again.load()["step"] == 900
    assert again.tags() == ["step_500", "step_2500", "step_10000", "step_900"]
    handle = again.save_async({"step": 901}, "next").wait()
    assert handle.generation == 5


def test_save_same_tag_again_newest_of_it_wins(make: Any, kit: Any) -> None:
    manager = make()
    for seed in (1, 2, 3):
        manager.save_async({"w": kit.noise(seed)}, "best").wait()
    assert manager.load(tag="best")["w"].tobytes() == kit.noise(3).tobytes()
    assert Path(manager.path("best")).name.startswith("00000003")
    with pytest.raises(ConfigError, match="worst"):
        manager.path("worst")


def test_load_include_reads_only_what_matches(make: Any, kit: Any) -> None:
    manager = make()
    state = {"model": {"a": kit.noise(1, 2**16)}, "opt": {"m": kit.noise(2, 2**20)}, "step": 7}
    manager.save_async(state, "s").wait()
    manager.close()
    again = make()
    found = again.load(include="model/*")
    assert list(found) == ["model"]
    assert found["model"]["a"].tobytes() == state["model"]["a"].tobytes()
    assert sum(again.last_load.raw_bytes.values()) == 2**16
    assert again.load(include=["step"]) == {"step": 7}
    with pytest.raises(LayoutError, match="modle"):
        again.load(include="modle/*")


def test_load_into_part_of_a_live_state_fills_that_and_names_what_does_not_fit(make: Any, kit: Any) -> None:
    manager = make()
    saved = {"model": {"a": torch.from_numpy(kit.noise(1)), "b": torch.ones(3)}, "opt": {"m": kit.noise(2)}}
    manager.save_async(saved | {"step": 7}, "s").wait()
    manager.close()
    again = make()
    state = {"model": {"a": torch.zeros(1024), "b": torch.zeros(3)}, "step": 0}
    a = state["model"]["a"]
    with pytest.raises(LayoutError, match=r"1 unexpected, the state has no such tensor: opt/m\. Nothing was"):
        again.load(into=state)
    assert not a.any()
    found = again.load(into=state, include=["model/*", "step"])
    assert found["step"] == 7
    assert found["model"]["a"] is a
    assert torch.equal(a, saved["model"]["a"])
    assert sum(again.last_load.raw_bytes.values()) == a.nbytes
    model = {"a": torch.zeros(1024), "b": torch.zeros(4), "new": torch.zeros(1)}
    other = {"model": model, "outside": torch.zeros(1)}
    with pytest.raises(LayoutError, match=r"1 missing .*: model/new; 1 of another .*: model/b \(checkpoint"):
        again.load(into=other, include="model/*")
    assert again.load(into=other, include="model/*", strict=False)["model"].keys() == {"a"}
    assert torch.equal(other["model"]["a"], saved["model"]["a"])


def test_load_gives_cpu_tensors_whatever_device_they_were_on_or_is_the_default(make: Any) -> None:
    saved = {"w": torch.arange(1000.0), "s": torch.tensor(3), "device": torch.device("cuda:3")}
    if torch.cuda.is_available():
        saved |= {"w": saved["w"].cuda()}
    manager = make()
    manager.save_async(saved, "s").wait()
    with torch.device("meta"):
        found = manager.load()
    assert found["device"] == torch.device("cuda:3")
    assert all(torch.equal(found[name], saved[name].cpu()) for name in ("w", "s"))
    assert all(found[name].device.type == "cpu" for name in ("w", "s"))
    if torch.cuda.is_available():
        state = {"w": torch.zeros(1000, device="cuda"), "s": torch.tensor(0)}
        assert manager.load(into=state)["w"] is state["w"]
        assert torch.equal(state["w"], saved["w"])


def test_load_left_over_of_a_crash_is_no_checkpoint(make: Any, kit: Any, tmp_path: Path) -> None:
    first = make()
    first.save_async({"w": kit.noise(1)}, "good").wait()
    first.close()
    half = tmp_path / "objects" / "00000002-torn" / "w" / "c"
    half.mkdir(parents=True)
    (half / "0").write_bytes(b"half")
    second = make()
    assert second.load()["w"].tobytes() == kit.noise(1).tobytes()
    second.save_async({"w": kit.noise(2)}, "torn").wait()
    assert second.load()["w"].tobytes() == kit.noise(2).tobytes()
    second.close()
    assert make().load(tag="torn")["w"].tobytes() == kit.noise(2).tobytes()


def test_load_many_chunks_lost_says_so_in_few_words(make: Any, tmp_path: Path) -> None:
    first = make(chunk_bytes=256)
    first.save_async({"w": np.random.default_rng(0).integers(0, 9, 40_000)}, "big").wait()
    first.close()
    for chunk in (tmp_path / "objects" / "00000001-big" / "w" / "c").rglob("*"):
        if chunk.is_file():
            chunk.unlink()
    with pytest.raises(UnrecoverableError) as caught:
        make(chunk_bytes=256).load(tag="big")
    assert "more" in str(caught.value)
    assert len(str(caught.value)) < 1500
    assert len(caught.value.causes) > 1000


def test_load_markers_removed_by_hand_coordinator_decides(
    make: Any, kit: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = make()
    first.save_async({"w": kit.noise(1)}, "a").wait()
    first.save_async({"w": kit.noise(2)}, "b").wait()
    first.close(keep_local=True)
    for marker in (tmp_path / "objects" / ".fastcheck" / "commits").iterdir():
        if marker.name.startswith("00000002"):
            marker.unlink()
    with caplog.at_level(logging.WARNING):
        assert make().load()["w"].tobytes() == kit.noise(2).tobytes()
    assert "generation 2 (b) is persisted to the coordinator, but the object tier has no" in caplog.text


def test_load_coordinator_lost_markers_decide(make: Any, kit: Any, tmp_path: Path) -> None:
    first = make()
    first.save_async({"w": kit.noise(1)}, "a").wait()
    first.close()
    for file in (tmp_path / "objects" / ".fastcheck").glob("coordinator.db*"):
        file.unlink()
    again = make()
    assert again.load()["w"].tobytes() == kit.noise(1).tobytes()
    assert again.save_async({"w": kit.noise(2)}, "b").wait().generation == 2


def test_save_object_that_needs_code_is_refused_and_saves_go_on(make: Any) -> None:
    manager = make()
    with pytest.raises(UnsupportedLeafError, match="model/hook"):
        manager.save_async({"model": {"hook": lambda: None}}, "bad")
    manager.save_async({"step": 1}, "good").wait()
    assert manager.tags() == ["good"]


def test_save_from_several_threads_each_comes_back(make: Any, kit: Any) -> None:
    manager = make()
    ready = threading.Barrier(4)

    def train(thread: int) -> list[Any]:
        ready.wait()
        return [manager.save_async({"w": kit.noise(10 * thread + i)}, f"t{thread}-{i}") for i in range(3)]

    with ThreadPoolExecutor(4) as pool:
        handles = [handle for made in pool.map(train, range(4)) for handle in made]
    assert sorted(handle.wait().generation for handle in handles) == list(range(1, 13))
    for thread in range(4):
        for i in range(3):
            assert manager.load(tag=f"t{thread}-{i}")["w"].tobytes() == kit.noise(10 * thread + i).tobytes()


def test_manager_inside_running_loop_saves_and_loads(make: Any, kit: Any) -> None:
    async def train() -> Any:
        manager = make()
        manager.save_async({"w": kit.noise(1)}, "a").wait()
        found = manager.load()
        manager.close()
        return found

    assert asyncio.run(train())["w"].tobytes() == kit.noise(1).tobytes()


@pytest.mark.parametrize("tag", ["", "../x", "a/b", "a b", "x" * 300, None, 3, b"a", "a\n", ".", "-a"])
def test_save_bad_tag_raises_and_saves_go_on(shared: FastCheckManager, tag: Any) -> None:
    before = len(shared.tags())
    with pytest.raises(ConfigError, match="tag must be"):
        shared.save_async({"step": 1}, tag)
    shared.save_async({"step": 1}, "good").wait()
    assert len(shared.tags()) == before + 1


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp("shared")
    with FastCheckManager(folder / "objects", local_dir=folder / "shm", encoders=1) as manager:
        yield manager


def test_wait_unknown_level_raises(shared: FastCheckManager) -> None:
    handle = shared.save_async({"step": 1}, "levels")
    with pytest.raises(ConfigError, match="a level is one of"):
        handle.wait("moon")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="without storage nodes"):
        handle.wait("peers")
    assert handle.wait("object").level == "object"
    assert handle.exception() is None


def test_closed_manager_refuses_everything(make: Any) -> None:
    manager = make()
    manager.close()
    manager.close()
    for call in (lambda: manager.save_async({}, "a"), manager.load, manager.tags):
        with pytest.raises(ClosedError, match="make a new one"):
            call()


def test_first_save_has_the_other_slot_made_in_the_background(make: Any, kit: Any) -> None:
    manager = make()
    slots = manager._local.slots
    manager.save_async({"w": kit.noise(1, 5 * 2**20)}, "first").wait()
    wait_until(lambda: all(slot.status.capacity_bytes >= 5 * 2**20 for slot in slots), "the second slot")
    made = [slot.path.stat().st_ino for slot in slots]
    for step in range(3):
        manager.save_async({"w": kit.noise(step, 5 * 2**20)}, f"s{step}").wait()
    assert [slot.path.stat().st_ino for slot in slots] == made
