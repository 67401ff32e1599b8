"""Agents and trainers that die or hang, signals, full tiers: training goes on, nothing is lost silently."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import (
    ClosedError,
    SaveBusyError,
    SaveFailedError,
    TierFullError,
    TierTimeoutError,
)
from fastcheck_dask.manager import agent_link, snapshots
from fastcheck_dask.testing.faults import wait_until


def test_save_agent_killed_in_flight_fails_and_the_next_works(make: Any, kit: Any) -> None:
    manager = make()
    manager.save_async({"w": kit.noise(1)}, "before").wait()
    agent = kit.agent_of(manager)
    encoders = agent.children()
    assert encoders
    with kit.stopped(manager):
        handle = manager.save_async({"w": kit.noise(2)}, "lost")
        assert handle.level == "local"
        agent.kill()
        with pytest.raises(SaveFailedError, match=f"agent .process {agent.pid}. died.*next save starts"):
            handle.wait(timeout=kit.patience)
    assert handle.exception() is not None
    assert not psutil.wait_procs(encoders, kit.patience)[1]
    assert not psutil.pid_exists(agent.pid), "a zombie is left"
    assert manager.load()["w"].tobytes() == kit.noise(1).tobytes()
    manager.save_async({"w": kit.noise(3)}, "after").wait()
    assert manager.load()["w"].tobytes() == kit.noise(3).tobytes()
    assert manager.tags() == ["before", "after"]


def test_save_agent_killed_during_copy_slot_is_handed_over_once(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    manager.save_async({"w": kit.noise(1)}, "base").wait()
    copy = snapshots.copy_bits

    def copy_and_kill(source: Any, out: Any) -> None:
        monkeypatch.setattr(snapshots, "copy_bits", copy)
        link = manager._agents.link()
        os.kill(link.pid, signal.SIGKILL)
        wait_until(lambda: link.lost, "the loss")
        # Another thread may need an agent right now: the new one must leave the half-written slot alone.
        assert manager.tags() == ["base"]
        copy(source, out)

    monkeypatch.setattr(snapshots, "copy_bits", copy_and_kill)
    handle = manager.save_async({"w": kit.noise(2, 2**20)}, "through")
    assert manager._agents.link().free_slot() is None or handle.done(), "the agent still reads that slot"
    later = manager.save_async({"w": kit.noise(3, 2**20)}, "later")
    handle.wait(timeout=kit.patience)
    later.wait(timeout=kit.patience)
    assert manager.load(tag="through")["w"].tobytes() == kit.noise(2, 2**20).tobytes()
    assert manager.load(tag="later")["w"].tobytes() == kit.noise(3, 2**20).tobytes()


def test_save_encoder_killed_job_goes_to_another(make: Any, kit: Any) -> None:
    manager = make()
    for step in range(3):
        for encoder in kit.agent_of(manager).children():
            encoder.kill()
        manager.save_async({"w": kit.noise(step)}, f"s{step}").wait(timeout=kit.patience)
    assert manager.load()["w"].tobytes() == kit.noise(2).tobytes()


def test_hung_agent_is_ended_and_nobody_waits_for_ever(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(agent_link, "PING_SECONDS", 0.2)
    monkeypatch.setattr(agent_link, "SILENT_PINGS", 10)
    manager = make()
    manager.save_async({"w": kit.noise(0)}, "base").wait()
    with kit.stopped(manager) as agent, ThreadPoolExecutor(2) as pool:
        lost = manager.save_async({"w": kit.noise(1)}, "lost")
        waiting = pool.submit(manager.save_async, {"w": kit.noise(2)}, "waiting")
        with pytest.raises(SaveFailedError):
            lost.wait(timeout=kit.patience)
        assert not psutil.pid_exists(agent.pid)
        waiting.result(kit.patience).wait(timeout=kit.patience)
    assert manager.load()["w"].tobytes() == kit.noise(2).tobytes()


def test_busy_agent_stopped_each_policy_as_configured(make: Any, kit: Any, tmp_path: Path) -> None:
    manager = make(on_busy="raise")
    with kit.stopped(manager):
        first = [manager.save_async({"w": kit.noise(i, 2**20)}, f"s{i}") for i in range(2)]
        held = shared_bytes(tmp_path)
        with pytest.raises(SaveBusyError, match="on_busy='wait'"):
            manager.save_async({"w": kit.noise(2, 2**20)}, "refused")
        assert shared_bytes(tmp_path) == held, "snapshots are bounded by the two slots"
        with pytest.raises(TierTimeoutError):
            first[0].wait(timeout=0.0)
    assert [h.wait(timeout=kit.patience).generation for h in first] == [1, 2]
    manager.close(keep_local=True)

    manager = make(on_busy="skip")
    with kit.stopped(manager):
        # One slot holds the base.
        taken = manager.save_async({"w": kit.noise(4)}, "taken")
        left_out = manager.save_async({"w": kit.noise(5)}, "left-out")
        assert left_out.skipped
        assert left_out.done()
        assert isinstance(left_out.exception(), SaveBusyError)
        assert left_out.level is None
    taken.wait(timeout=kit.patience)
    assert manager.tags() == ["s0", "s1", "taken"]


def shared_bytes(tmp_path: Path) -> int:
    return sum(f.stat().st_size for f in (tmp_path / "shm").rglob("slot*") if "." not in f.name)


def test_busy_wait_goes_on_when_a_slot_is_free(make: Any, kit: Any) -> None:
    manager = make()
    with ThreadPoolExecutor(1) as pool:
        with kit.stopped(manager):
            for i in range(2):
                manager.save_async({"w": kit.noise(i)}, f"s{i}")
            waiting = pool.submit(manager.save_async, {"w": kit.noise(9)}, "waits")
            link = manager._agents.link()
            wait_until(lambda: bool(link._changed._waiters), "the third save to wait")
            assert not waiting.done()
        handle = waiting.result(kit.patience)
    handle.wait(timeout=kit.patience)
    assert handle.stats["busy_seconds"] > 0
    assert manager.load()["w"].tobytes() == kit.noise(9).tobytes()


def test_close_agent_stopped_reports_lost_and_keeps_local(make: Any, kit: Any, tmp_path: Path) -> None:
    manager = make()
    with kit.stopped(manager) as agent, ThreadPoolExecutor(1) as pool:
        handles = [manager.save_async({"w": kit.noise(i)}, f"s{i}") for i in range(2)]
        waiting = pool.submit(manager.save_async, {"w": kit.noise(9)}, "waits")
        link = manager._agents.link()
        wait_until(lambda: bool(link._changed._waiters), "the third save to wait")
        manager.close(timeout=0.3)
        with pytest.raises(ClosedError, match="waits"):
            waiting.result(kit.patience)
        for handle in handles:
            with pytest.raises(SaveFailedError, match="closed before this save was done"):
                handle.wait(timeout=kit.patience)
        assert not psutil.pid_exists(agent.pid)
    assert list((tmp_path / "shm").rglob("slot0"))
    manager.close()


def test_close_finishes_in_flight_and_leaves_no_file(make: Any, kit: Any, tmp_path: Path) -> None:
    manager = make()
    handles = [manager.save_async({"w": kit.noise(i, 2**20)}, f"s{i}") for i in range(2)]
    manager.close()
    assert [h.wait("object", timeout=0.0).generation for h in handles] == [1, 2]
    assert not list((tmp_path / "shm").rglob("*"))


def test_with_block_raises_saves_are_finished(make: Any, kit: Any) -> None:
    manager = make()
    handles = []

    def train() -> None:
        with manager:
            handles.append(manager.save_async({"w": kit.noise(1)}, "s"))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        train()
    (handle,) = handles
    assert handle.wait(timeout=0.0).level == "object"
    assert make().tags() == ["s"]


def test_save_local_tier_full_is_told_and_training_goes_on(
    tmp_path: Path,
    kit: Any,
    caplog: pytest.LogCaptureFixture,
    small_file_system: Any,
    no_process_is_left: None,
) -> None:
    with (
        small_file_system(tmp_path / "tiny", 4 * 2**20),
        FastCheckManager(tmp_path / "objects", local_dir=tmp_path / "tiny", encoders=1) as manager,
    ):
        handle = manager.save_async({"w": kit.noise(1, 8 * 2**20)}, "big")
        with pytest.raises(TierFullError, match=r"too small.*bytes are needed.*local_dir"):
            handle.wait("local", timeout=0.0)
        assert isinstance(handle.exception(timeout=0.0), TierFullError)
        caplog.clear()
        manager.save_async({"w": kit.noise(2, 2**20)}, "small").wait(timeout=kit.patience)
        assert "an earlier save failed" in caplog.text
        assert manager.load()["w"].tobytes() == kit.noise(2, 2**20).tobytes()
        subprocess.run(["mount", "-o", "remount,size=32m", str(tmp_path / "tiny")], check=True)
        manager.save_async({"w": kit.noise(3, 8 * 2**20)}, "room").wait(timeout=kit.patience)
        assert manager.load()["w"].tobytes() == kit.noise(3, 8 * 2**20).tobytes()


def test_save_object_tier_full_is_told_and_the_next_works(
    tmp_path: Path, kit: Any, small_file_system: Any, no_process_is_left: None
) -> None:
    with (
        small_file_system(tmp_path / "tiny", 6 * 2**20),
        FastCheckManager(tmp_path / "tiny", local_dir=tmp_path / "shm", encoders=1) as manager,
    ):
        manager.save_async({"w": kit.noise(1, 2**20)}, "good").wait(timeout=kit.patience)
        handle = manager.save_async({"w": kit.noise(2, 16 * 2**20)}, "big")
        error = handle.exception(timeout=kit.patience)
        assert isinstance(error, TierFullError)
        assert str(tmp_path / "tiny") in str(error)
        assert manager.load()["w"].tobytes() == kit.noise(1, 2**20).tobytes()
        subprocess.run(["mount", "-o", "remount,size=64m", str(tmp_path / "tiny")], check=True)
        manager.save_async({"w": kit.noise(3, 16 * 2**20)}, "room").wait(timeout=kit.patience)
        assert manager.load()["w"].tobytes() == kit.noise(3, 16 * 2**20).tobytes()


def in_signal_handler(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[BaseException]:
    """Have a call made by a signal handler, in the middle of the next copy."""
    caught: list[BaseException] = []
    copy = snapshots.copy_bits

    def handler(*_: object) -> None:
        try:
            call()
        except Exception as error:
            caught.append(error)

    def copy_with_signal(source: Any, out: Any) -> None:
        monkeypatch.setattr(snapshots, "copy_bits", copy)
        before = signal.signal(signal.SIGUSR1, handler)
        try:
            signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.signal(signal.SIGUSR1, before)
        copy(source, out)

    monkeypatch.setattr(snapshots, "copy_bits", copy_with_signal)
    return caught


def test_save_from_signal_handler_inside_save_refused(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    caught = in_signal_handler(lambda: manager.save_async({"w": kit.noise(8)}, "nested"), monkeypatch)
    manager.save_async({"w": kit.noise(1)}, "outer").wait(timeout=kit.patience)
    assert [type(error) for error in caught] == [SaveBusyError]
    assert "set a flag" in str(caught[0])
    manager.save_async({"w": kit.noise(2)}, "next").wait(timeout=kit.patience)
    assert manager.tags() == ["outer", "next"]


def test_close_from_signal_handler_inside_save_does_not_hang(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    done = manager.save_async({"w": kit.noise(1)}, "done")
    caught = in_signal_handler(manager.close, monkeypatch)
    with contextlib.suppress(ClosedError):
        assert manager.save_async({"w": kit.noise(2)}, "cut").exception(timeout=0.0) is not None
    assert not caught
    assert done.wait(timeout=0.0).level == "object"
    assert make().load()["w"].tobytes() == kit.noise(1).tobytes()


def test_save_interrupted_in_the_copy_slot_is_free_again(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager = make()
    manager.save_async({"w": kit.noise(1)}, "base").wait()

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(snapshots, "copy_bits", interrupt)
            with pytest.raises(KeyboardInterrupt):
                manager.save_async({"w": kit.noise(2)}, "cut")
    manager.save_async({"w": kit.noise(3)}, "next").wait(timeout=kit.patience)
    assert manager.tags() == ["base", "next"]


@pytest.mark.parametrize("sent", [True, False])
def test_hand_over_interrupted_is_saved_once(
    make: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, sent: bool
) -> None:
    manager = make()
    channel = manager._agents.link()._channel
    send = channel.send

    def send_and_interrupt(message: Any) -> None:
        monkeypatch.setattr(channel, "send", send)
        if sent:
            send(message)
        raise KeyboardInterrupt

    monkeypatch.setattr(channel, "send", send_and_interrupt)
    with pytest.raises(KeyboardInterrupt):
        manager.save_async({"w": kit.noise(1)}, "sent")
    for i in (2, 3):
        manager.save_async({"w": kit.noise(i)}, f"s{i}").wait(timeout=kit.patience)
    assert manager.tags() == ["sent", "s2", "s3"]
    assert manager.load(tag="sent")["w"].tobytes() == kit.noise(1).tobytes()


def test_forked_child_is_told_and_the_parent_unaffected(make: Any, kit: Any) -> None:
    manager = make()
    flying = manager.save_async({"w": kit.noise(1)}, "a")
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        heard = []
        for call in (
            lambda: manager.save_async({"w": 1}, "b"),
            manager.load,
            manager.tags,
            lambda: flying.wait(timeout=5.0),
            flying.exception,
        ):
            try:
                call()
                heard.append("nothing")
            except Exception as error:
                heard.append(type(error).__name__)
        manager.close()
        os.write(write, ",".join(heard).encode())
        # The child keeps our end of the agent's socket until it is told to end.
        os._exit(0)
    os.close(write)
    manager.save_async({"w": kit.noise(2)}, "c").wait(timeout=kit.patience)
    assert os.read(read, 1000).decode().split(",") == ["ClosedError"] * 5
    os.close(read)
    assert os.waitpid(child, 0)[1] == 0
    assert manager.load()["w"].tobytes() == kit.noise(2).tobytes()
    assert manager.tags() == ["a", "c"]


@pytest.mark.slow
def test_memory_and_descriptors_many_saves_stay_flat(make: Any, kit: Any) -> None:
    nbytes = 25 * 2**20
    manager = make()
    weights = kit.noise(1, nbytes)
    agent = kit.agent_of(manager)
    processes = [psutil.Process(), agent, *agent.children()]

    def private() -> list[int]:
        return [p.memory_info().rss - p.memory_info().shared for p in processes]

    def descriptors() -> list[int]:
        return [p.num_fds() for p in processes]

    for step in range(30):
        weights += 0.001
        manager.save_async({"w": weights, "step": step}, f"s{step}").wait()
        if step == 4:
            # What earlier tests left to the collector is not ours to count.
            gc.collect()
            early, early_fds = private(), descriptors()
    for before, after in zip(early, private(), strict=True):
        assert after < before * 1.05 + 2 * 2**20

    def flat() -> bool:
        return all(late <= before for late, before in zip(descriptors(), early_fds, strict=True))

    # A file may be open for a moment; one that stays open is a leak.
    wait_until(flat, f"{early_fds} descriptors", seconds=20)
    assert agent.children() == processes[2:]
