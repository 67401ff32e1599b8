"""How many shards an agent chooses, and how large they are to be, by what it knows of the links."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from fastcheck_dask.agent import link_watch
from fastcheck_dask.agent.placing import Placing
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.placement.bandwidth import Bandwidths
from fastcheck_dask.placement.policy import Choice
from fastcheck_dask.testing.fakes import FakeCoordinator

RATES = {"n0": 4e8, "n1": 1e8, "n2": 1e8, "n3": 1e8, "n4": 1e8, "n5": 1e8}


@pytest.fixture
def chosen(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Choose among six nodes, whose links let `ratio` times as much through as one of them takes."""

    def choose(ratio: float, *, wanted: int | None = None, saves: Any = (), **options: Any) -> Choice:
        async def measured(asked: Any, _client: Any, **_: Any) -> Bandwidths:
            return Bandwidths({node.name: RATES[node.name] for node in asked}, {}, 1e8 * ratio, 0.0)

        monkeypatch.setattr(link_watch, "measure_out", measured)
        coordinator = FakeCoordinator()
        for name in RATES:
            coordinator.another().register(NodeInfo(name, f"fcs://10.0.0.1:{name[1]}", name, name, 99))

        async def main() -> Choice:
            placing = Placing(settings(**options), coordinator, wanted_shards=wanted)
            for transfers in saves:
                placing.observe(transfers)
            try:
                return await placing.choose(None, set(), None)
            finally:
                await placing.close()

        return asyncio.run(main())

    return choose


@pytest.mark.parametrize(("ratio", "shards"), [(1.0, 1), (2.9, 3), (4.8, 5), (9.0, 5)])
def test_choice_automatic_takes_as_many_shards_as_the_links_fill(
    chosen: Any, ratio: float, shards: int
) -> None:
    assert chosen(ratio).shards == shards


def test_choice_automatic_is_three_where_nothing_is_measured_and_never_above_the_limit(chosen: Any) -> None:
    assert chosen(1.0, measure_links=False).shards == 3
    assert chosen(5.0, max_shards=2).shards == 2
    assert chosen(1.0, max_shards=2).shards == 1
    assert chosen(5.0, max_shards=4, measure_links=False).shards == 4


def test_choice_that_was_given_stays_whatever_the_links_are(chosen: Any) -> None:
    assert chosen(1.0, wanted=4).shards == 4


def test_choice_weighted_goes_by_measured_links_until_saves_say_more(chosen: Any) -> None:
    choice = chosen(3.0, wanted=5, stripes="weighted")
    weights = {node.name: weight for node, weight in zip(choice.nodes, choice.weights, strict=True)}
    assert weights == pytest.approx(RATES)
    saves = [{name: (10**8, 2.0 if name == "n1" else 1.0) for name in RATES}]
    choice = chosen(3.0, wanted=5, stripes="weighted", saves=saves)
    weights = {node.name: weight for node, weight in zip(choice.nodes, choice.weights, strict=True)}
    assert weights == pytest.approx({**dict.fromkeys(RATES, 1e8), "n1": 5e7})


def test_choice_even_has_no_weights(chosen: Any) -> None:
    assert chosen(3.0, wanted=3).weights == ()


def test_choice_weighted_without_knowledge_weighs_all_alike(chosen: Any) -> None:
    choice = chosen(3.0, wanted=3, stripes="weighted", measure_links=False)
    assert choice.weights == (1.0,) * 4
