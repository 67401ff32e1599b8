"""What was saved is what comes back, bit for bit, whatever the state is made of, from wherever it comes."""

from __future__ import annotations

import shutil
import threading
from typing import Any

import numpy as np
import pytest
import torch

from fastcheck_dask.testing.faults import FaultyCluster
from fastcheck_dask.testing.training import TrainingHost, assert_is_state


def bits_of(tensor: Any) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1)
    return whole.view(torch.uint8).numpy().tobytes() if whole.numel() else b""


def assert_same(found: Any, wanted: Any, path: str = "") -> None:
    assert type(found) is type(wanted), path
    if isinstance(wanted, torch.Tensor):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert bits_of(found) == bits_of(wanted), path
    elif isinstance(wanted, np.ndarray):
        assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape), path
        assert found.tobytes() == wanted.tobytes(), path
    elif isinstance(wanted, dict):
        assert [(type(key), key) for key in found] == [(type(key), key) for key in wanted], path
        for key in wanted:
            assert_same(found[key], wanted[key], f"{path}/{key}")
    elif isinstance(wanted, list | tuple):
        assert len(found) == len(wanted), path
        for number, entry in enumerate(wanted):
            assert_same(found[number], entry, f"{path}/{number}")
    elif isinstance(wanted, float) and wanted != wanted:
        assert found != found, path
    else:
        assert found == wanted, path


def exotic_state(step: int) -> dict[str, Any]:
    random = torch.Generator().manual_seed(step)
    tied = torch.randn(50, 70, generator=random)
    nan_payloads = np.random.default_rng(step).integers(0, 2**16, 3000).astype(np.uint32) | 0x7F800000
    return {
        "bf16": torch.randn(40, 65, generator=random).bfloat16(),
        "fp8": torch.randn(3300, generator=random).to(torch.float8_e4m3fn),
        "half": torch.randn(2100, generator=random).half(),
        "zero_dim": torch.tensor(float(step)),
        "zero_dim_array": np.array(step, np.int16),
        "empty": torch.empty(0, 4),
        "nan_payloads": torch.from_numpy(nan_payloads.view(np.float32)),
        "negative_zeros": torch.full((900,), -0.0),
        "transposed": torch.randn(60, 80, generator=random).t(),
        "strided": torch.randn(9000, generator=random)[::3],
        "fortran": np.asfortranarray(np.random.default_rng(step).normal(size=(30, 50))),
        "complex": torch.randn(700, dtype=torch.complex64, generator=random),
        "bools": torch.rand(5000, generator=random) > 0.5,
        "optimizer": {"state": {0: {"exp_avg": tied * step}, 10: {"exp_avg": tied - step}}},
        "tied": (tied, [tied]),
        "plain": (1, (2, "x", None, True), [2**70, float("nan"), -0.0], b"\x00\xff"),
    }


def test_state_of_all_kinds_is_the_same_from_every_source(faulty: FaultyCluster, host: TrainingHost) -> None:
    manager = host.manager()
    manager.save_async(exotic_state(1), "step1").wait("peers", timeout=30)
    handle = manager.save_async(exotic_state(2), "step2").wait("object", timeout=30)
    assert_same(manager.load(), exotic_state(2))
    assert manager.last_load is not None
    assert manager.last_load.source == "local"
    state, report = host.load_elsewhere(objects=False)
    assert_same(state, exotic_state(2))
    assert report.source == "peers"
    for name in handle.stats["nodes"][:2]:
        faulty.proxies[name].cut()
        state, report = host.load_elsewhere(objects=False)
        assert_same(state, exotic_state(2))
        assert report.source == "peers+parity"
        faulty.proxies[name].heal()
    for proxy in faulty.proxies.values():
        proxy.cut()
    state, report = host.load_elsewhere()
    assert_same(state, exotic_state(2))
    assert report.source == "object"


def test_state_changed_right_after_save_async_is_not_in_the_checkpoint(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager(persist_every=0)
    live = {f"p{number}": np.zeros(1000, np.int64) for number in range(200)}
    for step in range(1, 6):
        for tensor in live.values():
            tensor[:] = step
        handle = manager.save_async({"step": step, "live": live}, f"step{step}")
        go_on = threading.Event()

        def train(go_on: threading.Event = go_on) -> None:
            number = 0
            while not go_on.is_set():
                number -= 1
                for tensor in live.values():
                    tensor[:] = number

        training = threading.Thread(target=train)
        training.start()
        try:
            handle.wait("peers", timeout=30)
        finally:
            go_on.set()
            training.join()
        state, _ = host.load_elsewhere()
        assert state["step"] == step
        assert all((tensor == step).all() for tensor in state["live"].values())


def test_tensors_that_come_go_and_change_load_from_peers_and_without_any_node(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager(persist_every=0)
    random = np.random.default_rng(7)
    dtypes = [np.float32, np.float64, np.int16, np.uint8]
    tensors: dict[str, Any] = {}
    deltas = 0
    for step in range(12):
        for name in random.choice(list(tensors) or ["none"], 2):
            tensors.pop(str(name), None)
        for number in random.integers(0, 12, 4):
            shape = tuple(int(n) for n in random.integers(1, 60, int(random.integers(1, 3))))
            tensors[f"t{number}"] = random.normal(0, 50, shape).astype(random.choice(dtypes))
        for tensor in tensors.values():
            tensor.flat[0] += 1
        state = {"step": step, **{name: tensor.copy() for name, tensor in tensors.items()}}
        handle = manager.save_async(state, f"step{step}").wait("peers", timeout=30)
        deltas += handle.stats["deltas"]
        found, report = host.load_elsewhere()
        assert_same(dict(sorted(found.items())), dict(sorted(state.items())))
        assert report.source in ("peers", "inline")
        lost = faulty.proxies[handle.stats["nodes"][step % 3]]
        lost.cut()
        found, report = host.load_elsewhere()
        assert_same(dict(sorted(found.items())), dict(sorted(state.items())))
        assert report.skipped == []
        lost.heal()
    assert deltas > 0


@pytest.mark.slow
def test_load_after_100_saves_reads_the_bytes_of_one_checkpoint(
    faulty: FaultyCluster, host: TrainingHost
) -> None:
    manager = host.manager(persist_every=0)
    read: dict[int, int] = {}
    sent = 0
    for step in range(1, 101):
        handle = host.save(manager, step)
        sent += handle.stats["sent_bytes"]
        if step in (1, 10, 100):
            before = faulty.received_bytes
            assert_is_state(host.load_elsewhere()[0], step)
            read[step] = faulty.received_bytes - before
    raw = handle.stats["raw_bytes"]
    assert 0.5 * raw < read[1] < 1.3 * raw
    assert read[10] == pytest.approx(read[1], rel=0.15)
    assert read[100] == pytest.approx(read[1], rel=0.15)
    assert sent < 0.7 * 100 * raw


def test_load_after_the_shared_memory_was_wiped_takes_peers_and_the_next_save_is_a_delta(
    host: TrainingHost,
) -> None:
    manager = host.manager()
    host.save(manager, 1, level="object")
    host.close()
    shutil.rmtree(host.shared_memory, ignore_errors=True)
    manager = host.manager()
    assert_is_state(manager.load(), 1)
    assert manager.last_load is not None
    assert manager.last_load.source == "peers"
    assert host.save(manager, 2).stats["deltas"] > 0
    assert_is_state(host.load_elsewhere(objects=False)[0], 2)
