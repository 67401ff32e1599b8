"""Which nodes the saves of an agent go to after some have failed."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from fastcheck_dask.agent.placing import Placing
from fastcheck_dask.config import settings
from fastcheck_dask.coordination.base import NodeInfo
from fastcheck_dask.errors import NodeFullError, NodeRefusedError, NodeUnavailableError, TooFewNodesError
from fastcheck_dask.testing.fakes import FakeCoordinator

NAMES = ("a", "b", "c")


@pytest.fixture
def coordinator() -> Iterator[FakeCoordinator]:
    made = FakeCoordinator()
    for name in NAMES:
        made.register(NodeInfo(name, "fcs://127.0.0.1:1", name, name, 10))
    return made


def names(
    placing: Placing, *, excluded: set[str] | None = None, cause: NodeFullError | None = None
) -> set[str]:
    choice = asyncio.run(placing.choose(None, excluded or set(), cause))
    return {node.name for node in choice.nodes}


def test_suspects_are_left_out_of_the_next_save_unless_there_is_no_other(
    coordinator: FakeCoordinator,
) -> None:
    placing = Placing(settings(measure_links=False), coordinator, wanted_shards=None)
    placing.suspect("a")
    assert names(placing) == {"b", "c"}
    for name in NAMES:
        placing.suspect(name)
    # All have failed a save that is over: they are alive, and better than none.
    assert names(placing) == set(NAMES)


@pytest.mark.parametrize("cause", [NodeFullError("c", 100, 10), NodeUnavailableError("c", "refused")])
def test_automatic_number_all_have_failed_this_save_says_why_none_is_left(
    coordinator: FakeCoordinator, cause: NodeFullError
) -> None:
    placing = Placing(settings(measure_links=False), coordinator, wanted_shards=None)
    assert names(placing) == set(NAMES)
    # Two were replaced in the middle of the save, and then nobody was left.
    for name in NAMES:
        placing.suspect(name)
    choice = asyncio.run(placing.choose(None, {"c"}, cause))
    assert (choice.shards, choice.nodes, choice.cause) == (0, (), cause)
    assert choice.degraded is not None
    assert str(cause) in choice.degraded
    assert "only the object tier" in choice.degraded


def test_explicit_number_tries_those_again_that_were_replaced(coordinator: FakeCoordinator) -> None:
    placing = Placing(settings(measure_links=False), coordinator, wanted_shards=1)
    assert len(names(placing)) == 2
    placing.suspect("a")
    placing.suspect("c")
    assert names(placing, excluded={"c"}, cause=NodeFullError("c", 100, 10)) == {"a", "b"}


def test_explicit_number_no_room_is_not_told_as_too_few_nodes(coordinator: FakeCoordinator) -> None:
    placing = Placing(settings(measure_links=False), coordinator, wanted_shards=2)
    full = NodeFullError("c", 100, 10)
    with pytest.raises(NodeFullError):
        names(placing, excluded={"c"}, cause=full)
    with pytest.raises(NodeRefusedError):
        asyncio.run(placing.choose(None, {"c"}, NodeRefusedError("c", "its data port speaks TLS")))
    with pytest.raises(TooFewNodesError):
        asyncio.run(placing.choose(None, {"c"}, NodeUnavailableError("c", "refused")))
