"""A run that is taken from an owner which lives: the owner hears of it, and nothing is mixed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcheck_dask.errors import FencedError, RunInUseError
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import wait_until
from fastcheck_dask.testing.stopping import stop_process

OWNER = """
import os, sys
import numpy as np
from fastcheck_dask import FastCheckManager
from fastcheck_dask.errors import FastCheckError
folder, coordinator, options = sys.argv[1], sys.argv[2] or None, eval(sys.argv[3])
def noise(seed, nbytes=4096):
    return np.random.default_rng(seed).normal(size=nbytes // 4).astype(np.float32)
manager = FastCheckManager(folder + "/objects", local_dir=folder + "/shm", encoders=1, coordinator=coordinator, **options)
print("agent", manager._agents.link().pid, flush=True)
for line in sys.stdin:
    number = int(line)
    try:
        handle = manager.save_async({"w": noise(number)}, f"s{number}").wait(timeout=60)
        print("saved", number, handle.generation, flush=True)
    except FastCheckError as error:
        print("failed", number, type(error).__name__, error, flush=True)
manager.close()
"""  # noqa: E501


class Owner:
    """A training process that saves what it is told."""

    def __init__(self, start: Any, folder: Path, coordinator: str = "", **options: Any) -> None:
        self.trainer = start(OWNER, folder, coordinator, repr(options))
        self.agent = int(self.trainer.line("agent")[0])

    def tell(self, number: int) -> None:
        self.trainer.process.stdin.write(f"{number}\n")
        self.trainer.process.stdin.flush()

    def save(self, number: int) -> int:
        self.tell(number)
        return int(self.trainer.line("saved")[1])

    def signal(self, number: signal.Signals) -> None:
        for pid in (self.trainer.process.pid, self.agent):
            os.kill(pid, number)

    def put_agent_to_sleep(self, database: Path | None) -> None:
        stop_process(self.agent, database)

    def put_trainer_to_sleep(self, database: Path | None) -> None:
        stop_process(self.trainer.process.pid, database)

    def quit(self) -> int:
        self.trainer.process.stdin.close()
        return self.trainer.end()


def test_takeover_live_owner_is_fenced_and_told_on_its_handle(
    make: Any, kit: Any, tmp_path: Path, start_trainer: Any
) -> None:
    owner = Owner(start_trainer, tmp_path)
    assert owner.save(1) == 1
    with pytest.raises(RunInUseError, match=rf"process {owner.trainer.process.pid}.*takeover=True"):
        make()
    with pytest.raises(RunInUseError, match="takeover=True"):
        make(local_dir=tmp_path / "another host")
    manager = make(takeover=True)
    assert manager.load()["w"].tobytes() == kit.noise(1).tobytes()
    owner.tell(2)
    assert " ".join(owner.trainer.line("failed")).startswith("2 FencedError run")
    assert f"taken over by 'pid {os.getpid()}" in owner.trainer.lines[-1]
    manager.save_async({"w": kit.noise(3)}, "s3").wait(timeout=kit.patience)
    owner.tell(4)
    assert owner.trainer.line("failed")[1] == "FencedError"
    assert owner.quit() == 0
    assert manager.load()["w"].tobytes() == kit.noise(3).tobytes()
    assert manager.tags() == ["s1", "s3"]


def test_takeover_sleeping_owner_wakes_up_in_mid_save_and_mixes_nothing(
    make: Any, kit: Any, tmp_path: Path, start_trainer: Any
) -> None:
    owner = Owner(start_trainer, tmp_path)
    owner.save(1)
    database = tmp_path / "objects/.fastcheck/coordinator.db"
    owner.put_agent_to_sleep(database)
    # The snapshot is handed over to an agent that sleeps.
    owner.tell(2)
    owner.put_trainer_to_sleep(database)
    manager = make(takeover=True)
    for number in (2, 3):
        manager.save_async({"w": kit.noise(10 + number)}, f"s{number}").wait(timeout=kit.patience)
    owner.signal(signal.SIGCONT)
    assert owner.trainer.line("failed")[:2] == ["2", "FencedError"]
    for number in (2, 3):
        assert manager.load(tag=f"s{number}")["w"].tobytes() == kit.noise(10 + number).tobytes()
    assert owner.quit() == 0
    manager.close()
    assert make().load()["w"].tobytes() == kit.noise(13).tobytes()


def test_takeover_after_takeover_last_one_owns(make: Any, kit: Any) -> None:
    managers = [make()] + [make(takeover=True) for _ in range(2)]
    for number, manager in enumerate(managers):
        handle = manager.save_async({"w": kit.noise(number)}, f"s{number}")
        if manager is managers[-1]:
            handle.wait(timeout=kit.patience)
        else:
            assert isinstance(handle.exception(timeout=kit.patience), FencedError)
    for manager in managers:
        manager.close()
    assert make().tags() == ["s2"]


def test_takeover_agent_killed_later_takes_nothing_back(make: Any, kit: Any) -> None:
    first, second = make(takeover=True), make(takeover=True)
    link = first._agents.link()
    kit.agent_of(first).kill()
    wait_until(lambda: link.lost, "the loss")
    with pytest.raises(RunInUseError, match="takeover=True"):
        first.save_async({"w": kit.noise(2)}, "no")
    second.save_async({"w": kit.noise(3)}, "s3").wait(timeout=kit.patience)


def test_takeover_other_run_keeps_its_directory(make: Any) -> None:
    make()
    with pytest.raises(RunInUseError, match="checkpoint directory"):
        make(run_id="other", takeover=True)


def test_takeover_owner_killed_the_next_one_without_the_flag_finds_its_memory(
    make: Any, kit: Any, tmp_path: Path, start_trainer: Any
) -> None:
    first = Owner(start_trainer, tmp_path)
    first.save(1)
    second = Owner(start_trainer, tmp_path, takeover=True)
    second.save(2)
    second.signal(signal.SIGKILL)
    # As long as the first one lives, it may be the one that is meant.
    with pytest.raises(RunInUseError, match="takeover=True"):
        make()
    assert list((tmp_path / "shm").glob("takeover~1/*/slot*"))
    first.signal(signal.SIGKILL)
    wait_until(lambda: not psutil.pid_exists(first.agent), "the end of the first agent")
    manager = make()
    assert manager.load()["w"].tobytes() == kit.noise(2).tobytes()
    assert manager.last_load.source == "local"
    manager.save_async({"w": kit.noise(3)}, "s3").wait(timeout=kit.patience)
    manager.close()
    assert not list((tmp_path / "shm").rglob("slot*"))


def test_takeover_leaves_no_shared_memory(make: Any, kit: Any, tmp_path: Path) -> None:
    first, second = make(), make(takeover=True)
    second.save_async({"w": kit.noise(1)}, "s1").wait(timeout=kit.patience)
    assert list((tmp_path / "shm").glob("takeover~1/*"))
    second.close()
    first.close()
    assert not list((tmp_path / "shm").rglob("slot*"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["sqlite", pytest.param("zookeeper", marks=pytest.mark.zookeeper)])
def test_takeover_with_nodes_sleeping_owner_is_refused(
    request: pytest.FixtureRequest, make: Any, kit: Any, tmp_path: Path, start_trainer: Any, kind: str
) -> None:
    url = request.getfixturevalue("zookeeper_url") if kind == "zookeeper" else None
    with StorageCluster(tmp_path / "cluster", 2, coordinator=url) as cluster:
        options = {"num_shards": 1, "persist_every": 0}
        owner = Owner(start_trainer, tmp_path, cluster.coordinator, **options)
        assert owner.save(1) == 1
        database = tmp_path / "cluster/coordinator.db" if kind == "sqlite" else None
        owner.put_agent_to_sleep(database)
        owner.put_trainer_to_sleep(database)
        owner.tell(2)
        manager = make(coordinator=cluster.coordinator, takeover=True, **options)
        assert manager.load()["w"].tobytes() == kit.noise(1).tobytes()
        assert manager.save_async({"w": kit.noise(3)}, "s3").wait(timeout=kit.patience).generation == 3
        owner.signal(signal.SIGCONT)
        assert owner.trainer.line("failed")[:2] == ["2", "FencedError"]
        manager.save_async({"w": kit.noise(4)}, "s4").wait(timeout=kit.patience)
        assert owner.quit() == 0
        assert manager.load()["w"].tobytes() == kit.noise(4).tobytes()
        assert manager.tags() == ["s1", "s3", "s4"]
        manager.close()
