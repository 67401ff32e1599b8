"""One of two ranks is killed in each phase of a save: the other is told, and all load one checkpoint."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import pytest

from fastcheck_dask.coordination.connect import connect
from fastcheck_dask.coordination.joint import JointView, Rank
from fastcheck_dask.coordination.joint_saves import JointSaves
from fastcheck_dask.manager import FastCheckManager
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.testing.faults import FaultyCluster, wait_until
from fastcheck_dask.testing.training import TrainingHost, assert_is_state, state_at

pytestmark = pytest.mark.slow

PATIENCE = 60.0
#: A node that is held for longer than this would be taken for dead.
OPTIONS: dict[str, Any] = {"num_shards": 1, "grace": "15 s", "world_size": 2}


class Ranks:
    """Two training processes of one run, and what the coordinator knows of their saves."""

    def __init__(self, host: TrainingHost, trainer_of: Callable[..., Any], **options: Any) -> None:
        self.host = host
        self.options = OPTIONS | options
        self.trainers = [trainer_of(host, rank=rank, **self.options) for rank in range(2)]

    def save(self, step: int) -> None:
        for trainer in self.trainers:
            trainer.tell(f"save {step}")
        for trainer in self.trainers:
            trainer.expect(f"peers {step}")

    def kill(self, rank: int) -> None:
        """SIGKILL a trainer and its agent, if they live."""
        trainer = self.trainers[rank]
        trainer.kill()
        if psutil.pid_exists(trainer.agents[0]):
            trainer.kill_agent()

    @contextlib.contextmanager
    def joint(self) -> Iterator[JointSaves]:
        assert self.host.coordinator is not None
        with contextlib.closing(connect(self.host.coordinator)) as coordinator:
            yield JointSaves(coordinator.entries, self.host.run_id, Rank(0, 2))

    def newest(self) -> JointView | None:
        with self.joint() as saves:
            numbers = saves.numbers()
            return saves.read(numbers[-1]) if numbers else None

    def prepared(self, rank: int, step: int) -> bool:
        view = self.newest()
        return view is not None and view.save.tag == f"step{step}" and rank in view.parts

    def restart(self) -> list[FastCheckManager]:
        """Return new managers of both ranks, as after the whole training was started anew."""
        for rank in range(2):
            self.kill(rank)
        with ThreadPoolExecutor(2) as pool:
            made = [pool.submit(self.host.manager, rank=rank, **self.options) for rank in range(2)]
            return [one.result(PATIENCE) for one in made]


def check_next_life(managers: list[FastCheckManager], wanted: int) -> None:
    for manager in managers:
        assert_is_state(manager.load(), wanted)
    handles = [manager.save_async(state_at(9), "step9") for manager in managers]
    for handle in handles:
        handle.wait("peers", timeout=PATIENCE)
    for manager in managers:
        assert_is_state(manager.load(), 9)
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda manager: manager.close(), managers))


@pytest.fixture
def ranks(host: TrainingHost, trainer_of: Callable[..., Any]) -> Ranks:
    made = Ranks(host, trainer_of)
    made.save(1)
    return made


@pytest.mark.parametrize("phase", ["copy", "put", "prepare"])
def test_rank_killed_before_it_has_prepared_other_is_told_at_once(
    faulty: FaultyCluster, ranks: Ranks, phase: str
) -> None:
    victim, other = ranks.trainers
    if phase == "copy":
        victim.tell("stall copy")
        victim.tell("save 2")
        victim.expect("stopped copy")
    else:
        for proxy in faulty.proxies.values():
            proxy.hold(phase)
        victim.tell("save 2")
        victim.expect("local 2")
        wait_until(lambda: any(_is_held(proxy, phase) for proxy in faulty.proxies.values()), "the save")
    other.tell("save 2")
    other.expect("local 2")
    ranks.kill(0)
    faulty.release()
    other.expect("failed 2 CommitConflictError")
    check_next_life(ranks.restart(), 1)


def _is_held(proxy: Any, op: str) -> bool:
    try:
        proxy.wait_held(op, seconds=0.01)
    except TimeoutError:
        return False
    return True


def test_rank_killed_after_it_has_prepared_other_that_comes_later_is_told(ranks: Ranks) -> None:
    victim, other = ranks.trainers
    victim.tell("save 2")
    wait_until(lambda: ranks.prepared(0, 2), "the part of rank 0")
    ranks.kill(0)
    other.tell("save 2")
    other.expect("failed 2 CommitConflictError")
    check_next_life(ranks.restart(), 1)


def test_trainer_killed_after_the_snapshot_its_agent_takes_part(ranks: Ranks) -> None:
    victim, other = ranks.trainers
    victim.tell("save 2")
    victim.expect("local 2")
    victim.kill()
    other.tell("save 2")
    other.expect("peers 2")
    check_next_life(ranks.restart(), 2)


def test_rank_killed_between_decision_and_announcement_nothing_is_lost(
    faulty: FaultyCluster, ranks: Ranks
) -> None:
    for proxy in faulty.proxies.values():
        proxy.hold("commit")
    for trainer in ranks.trainers:
        trainer.tell("save 2")

    def decided() -> bool:
        view = ranks.newest()
        return view is not None and view.save.tag == "step2" and view.outcome is not None

    wait_until(decided, "the decision")
    ranks.kill(0)
    faulty.release()
    ranks.trainers[1].expect("peers 2")
    check_next_life(ranks.restart(), 2)


def test_both_ranks_killed_when_all_is_prepared_and_nothing_announced(
    faulty: FaultyCluster, ranks: Ranks
) -> None:
    for proxy in faulty.proxies.values():
        proxy.hold("commit")
    for trainer in ranks.trainers:
        trainer.tell("save 2")

    def all_prepared() -> bool:
        view = ranks.newest()
        if view is None or view.save.tag != "step2":
            return False
        # Parts may be tidied away once the decision is there.
        return view.outcome is not None or set(view.parts) >= {0, 1}

    wait_until(all_prepared, "both parts")
    for rank in range(2):
        ranks.kill(rank)
    for proxy in faulty.proxies.values():
        proxy.heal()
    faulty.release()
    check_next_life(ranks.restart(), 2)


def test_one_rank_started_anew_alone_joins_again(
    host: TrainingHost, trainer_of: Callable[..., Any], ranks: Ranks
) -> None:
    ranks.kill(1)
    ranks.trainers[1] = trainer_of(host, rank=1, **ranks.options)
    ranks.trainers[1].tell("load")
    ranks.trainers[1].expect("loaded 1")
    ranks.save(2)
    check_next_life(ranks.restart(), 2)


@pytest.mark.zookeeper
def test_rank_killed_with_zookeeper_other_is_told_when_its_session_is_over(
    tmp_path: Path, zookeeper_url: str, trainer_of: Callable[..., Any]
) -> None:
    with (
        StorageCluster(tmp_path / "cluster", 2, coordinator=zookeeper_url) as nodes,
        TrainingHost(tmp_path, nodes.coordinator, {"persist_every": 0}) as host,
    ):
        ranks = Ranks(host, trainer_of, session_timeout="3 s")
        ranks.save(1)
        ranks.trainers[1].tell("save 2")
        wait_until(lambda: ranks.prepared(1, 2), "the part of rank 1")
        ranks.kill(0)
        ranks.trainers[1].expect("failed 2 CommitConflictError")
        check_next_life(ranks.restart(), 1)
