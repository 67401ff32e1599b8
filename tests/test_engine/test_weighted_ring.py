"""Older generations in the memory of real nodes, while chunks move to other nodes by weight."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest

from fastcheck_dask.engine.recover import Recovery
from fastcheck_dask.testing.cluster import StorageCluster
from fastcheck_dask.tiers.local import LocalTier

RING = 3
EVEN = dict.fromkeys(("n0", "n1", "n2", "n3", "n4"), 10)
SLOW_IN_THE_MIDDLE = {"n0": 40, "n1": 10, "n2": 40, "n3": 5, "n4": 40}
#: The other way round: what moved comes back, as whole chunks where older generations are.
SLOW_AT_THE_ENDS = {"n0": 5, "n1": 40, "n2": 10, "n3": 40, "n4": 10}


class History:
    """What was saved of a run, and whether nodes give it back."""

    def __init__(self, run: Any, states: Any) -> None:
        self.run, self.states = run, states
        self.saved: list[tuple[str, Any]] = []

    def save(self, rates: dict[str, int], *, parity: int = 1, without: tuple[str, ...] = ()) -> Any:
        """Save the next step on nodes of these rates; return what became of it."""
        step = len(self.saved)
        state = self.states.of(1, step=step, arrays=12)
        choice = self.run.choice(3, parity=parity, excluded=frozenset(without))
        weights = tuple(float(rates[node.name]) for node in choice.nodes)
        saved = self.run.save(state, tag=f"t{step}", choice=replace(choice, weights=weights))
        self.saved.append((f"t{step}", state))
        return saved

    def assert_last_are_exact(self, *lost: str) -> None:
        """Load each of the last generations from the memory of the nodes alone, without some of them."""
        self.run.nodes.cut_off = set(lost)
        try:
            for tag, state in self.saved[-1 - RING :]:
                with LocalTier("elsewhere", self.run.local.path / "elsewhere") as local:
                    recovery = Recovery(local, None, self.run.nodes.client)
                    recovered = asyncio.run(recovery.load(self.run.coordinator.commits("run-1"), tag=tag))
                assert recovered is not None
                assert recovered.report.tag == tag
                assert self.states.same(recovered.state, state), (tag, lost)
        finally:
            self.run.nodes.cut_off = set()


@pytest.fixture
def history(tmp_path: Path, rig: Any, states: Any) -> Iterator[History]:
    with StorageCluster(tmp_path / "cluster", 5, ring=RING) as cluster:
        yield History(rig(cluster=cluster), states)


@pytest.mark.slow
def test_older_generations_are_exact_while_chunks_move_and_move_back(history: History) -> None:
    moved: list[int] = []
    stripes: set[int] = set()
    for step in range(18):
        rates = EVEN if step < 2 else SLOW_IN_THE_MIDDLE if step < 8 else SLOW_AT_THE_ENDS
        saved = history.save(rates)
        before, stripes = stripes, {stripe.id for stripe in saved.manifest.layout.stripes}
        if before and before.isdisjoint(stripes):
            moved.append(step)
        if moved and step - moved[-1] <= RING:
            history.assert_last_are_exact()
        if moved and step - moved[-1] in (0, RING):
            for name in saved.record.nodes:
                history.assert_last_are_exact(name)
    assert len(moved) == 2


@pytest.mark.slow
def test_older_generations_survive_the_loss_of_two_nodes_after_a_move(history: History) -> None:
    for step in range(6):
        saved = history.save(EVEN if step < 2 else SLOW_IN_THE_MIDDLE, parity=2)
        for lost in combinations(saved.record.nodes, 2) if step == 5 else ():
            history.assert_last_are_exact(*lost)
    nodes = [record.nodes for record in history.run.coordinator.commits("run-1")]
    assert len(set(nodes)) == 2, "the parity went to other nodes once"


@pytest.mark.slow
def test_older_generations_stay_where_they_are_when_a_node_is_left_out(history: History) -> None:
    """The nodes of a record are those of its own generation, whichever hold the newest."""
    for step in range(12):
        rates = SLOW_IN_THE_MIDDLE if step % 6 < 3 else SLOW_AT_THE_ENDS
        without = ("n3",) if 3 <= step < 7 else ("n1",) if step >= 9 else ()
        saved = history.save(rates, without=without)
        assert not set(without) & set(saved.record.nodes)
        history.assert_last_are_exact()


@pytest.mark.slow
def test_older_generations_survive_a_training_host_that_lost_its_base(history: History) -> None:
    for step in range(5):
        history.save(EVEN if step < 2 else SLOW_IN_THE_MIDDLE)
    # The training goes on on another host: all is sent whole, dealt as before or anew.
    history.run.forget_local()
    for _ in range(3):
        saved = history.save(SLOW_IN_THE_MIDDLE)
        history.assert_last_are_exact()
        history.assert_last_are_exact(saved.record.nodes[0])
    assert saved.stats.deltas > 0
