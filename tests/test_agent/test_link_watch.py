"""When links are measured, and when not; what they give is made up."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest

from fastcheck_dask.agent import link_watch
from fastcheck_dask.agent.link_watch import PAUSE_SECONDS, LinkWatch, is_here
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import NodeUnavailableError
from fastcheck_dask.placement.bandwidth import SHARDS_CAP, Bandwidths
from fastcheck_dask.testing.clock import FakeClock
from fastcheck_dask.tiers.pacing import Pacer


def nodes(count: int, host: str = "10.0.0.1") -> list[NodeInfo]:
    return [NodeInfo(f"n{i}", f"fcs://{host}:{i + 1}", "r", "h", 1) for i in range(count)]


class Bench:
    """A watch whose measurements are counted, and told what to do meanwhile."""

    def __init__(self, **options: Any) -> None:
        self.clock, self.pacer = FakeClock(), Pacer()
        self.watch = LinkWatch(settings(**options), self.pacer, clock=self.clock)
        self.asked: list[list[str]] = []
        self.meanwhile: Callable[[], None] = lambda: None

    async def measure(self, asked: Sequence[NodeInfo], client: Any, **_: Any) -> Bandwidths:
        self.asked.append([node.name for node in asked])
        self.meanwhile()
        return Bandwidths({node.name: 1e8 for node in asked}, {}, 2e8, 0.0)


@pytest.fixture
def on_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def run(test: Callable[[Bench], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            bench = Bench(**options)
            monkeypatch.setattr(link_watch, "measure_out", bench.measure)
            try:
                await test(bench)
            finally:
                bench.pacer.set_busy(False)

        asyncio.run(main())

    return run


def test_links_are_measured_once_for_the_same_nodes_and_again_for_new_ones(on_bench: Any) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.watch.look(nodes(2))
        assert bench.watch.found is not None
        assert bench.watch.found.shards == 2
        bench.clock.advance(2 * PAUSE_SECONDS)
        assert not await bench.watch.look(nodes(2))
        assert not await bench.watch.look(nodes(1))
        assert await bench.watch.look(nodes(3))
        # However often nodes come.
        assert not await bench.watch.look(nodes(4))
        bench.clock.advance(PAUSE_SECONDS)
        assert await bench.watch.look(nodes(4))
        assert [len(asked) for asked in bench.asked] == [2, 3, 4]

    on_bench(test)


def test_links_to_some_nodes_are_enough(on_bench: Any) -> None:
    async def test(bench: Bench) -> None:
        draining = [NodeInfo("x", "fcs://10.0.0.2:9", "r", "h", 1, state="draining")]
        assert not await bench.watch.look([])
        assert not await bench.watch.look(draining)
        assert await bench.watch.look([*draining, *nodes(99)])
        assert bench.asked == [[f"n{i}" for i in range(SHARDS_CAP + 1)]]

    on_bench(test)


@pytest.mark.parametrize(
    ("measure_links", "host", "measured"),
    [
        ("auto", "10.0.0.1", True),
        ("auto", "127.0.0.1", False),
        (True, "127.0.0.1", True),
        (False, "10.0.0.1", False),
    ],
)
def test_links_of_this_machine_are_measured_only_if_it_is_wanted(
    on_bench: Any, measure_links: Any, host: str, *, measured: bool
) -> None:
    async def test(bench: Bench) -> None:
        assert await bench.watch.look(nodes(2, host)) is measured

    on_bench(test, measure_links=measure_links)


def test_links_are_not_measured_while_the_network_is_busy(
    on_bench: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link_watch, "_FREE_SECONDS", 0.0)

    async def test(bench: Bench) -> None:
        bench.pacer.set_busy(True)
        assert not await bench.watch.look(nodes(2))
        assert bench.asked == []
        bench.pacer.set_busy(False)
        assert await bench.watch.look(nodes(2))

    on_bench(test)


def test_links_measured_while_the_training_began_to_communicate_say_nothing(on_bench: Any) -> None:
    async def test(bench: Bench) -> None:
        def communicate() -> None:
            bench.pacer.set_busy(True)
            bench.pacer.set_busy(False)

        bench.meanwhile = communicate
        assert not await bench.watch.look(nodes(2))
        assert bench.watch.found is None
        bench.meanwhile = lambda: None
        assert not await bench.watch.look(nodes(2))
        bench.clock.advance(PAUSE_SECONDS)
        assert await bench.watch.look(nodes(2))

    on_bench(test)


def test_links_to_a_node_that_does_not_answer_keep_nobody(on_bench: Any) -> None:
    async def test(bench: Bench) -> None:
        def fail() -> None:
            raise NodeUnavailableError("n0", "is gone")

        bench.meanwhile = fail
        assert not await bench.watch.look(nodes(2))
        assert bench.watch.found is None

    on_bench(test)


@pytest.mark.parametrize(
    ("host", "here"),
    [("127.0.0.9", True), ("[::1]", True), ("localhost", True), ("10.0.0.1", False), ("node7", False)],
)
def test_node_is_here_by_its_address(host: str, *, here: bool) -> None:
    assert is_here(nodes(1, host)[0]) is here
