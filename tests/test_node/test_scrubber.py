"""Scrubbing: damage is found before anybody needs the chunk."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fastcheck_dask.node.scrubber import Scrubber
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.testing.faults import wait_until


@pytest.fixture
def scrub() -> Iterator[Callable[..., Scrubber]]:
    """Return a function that starts a scrubber, which is closed after the test."""
    started: list[tuple[ShardStore, Scrubber]] = []

    def start(store: ShardStore, **options: Any) -> Scrubber:
        started.append((store, Scrubber(store, **options)))
        return started[-1][1]

    yield start
    for store, scrubber in started:
        store.stop_background()
        scrubber.close()
        scrubber.close()


def passes(scrubber: Scrubber, count: int) -> Callable[[], bool]:
    return lambda: scrubber.report()["scrub"]["passes"] >= count


@pytest.mark.parametrize("where", ["newest", "ring"])
def test_damaged_chunk_is_found_named_and_counts_as_lost(
    make_author: Any, chunks: Any, scrub: Any, caplog: pytest.LogCaptureFixture, where: str
) -> None:
    store = ShardStore("node-1", 2**20, ring=1)
    author = make_author(store)
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    old = author.name
    author.save({key: chunks.nudged(raw, 1) for key, raw in author.state.items()})
    store.drain("run")
    run = store._runs["run"]
    payload = (run.committed.chains["a"][0] if where == "newest" else run.ring[0].steps["a"].delta).payload
    payload.flags.writeable = True
    payload[40] ^= 1
    scrubber = scrub(store, pause_seconds=0.01)
    wait_until(passes(scrubber, 1), "a pass")
    assert scrubber.report()["scrub"]["damaged"] == 1
    (damaged,) = store.report()["runs"]["run"]["damaged"]
    name = author.name if where == "newest" else old
    assert (damaged["generation"], damaged["token"], damaged["keys"]) == (*name[1:], ["a"])
    assert [r.levelno for r in caplog.records] == [logging.ERROR]
    assert f"generation {name[1]}, key a: its payload fails its checksum" in caplog.text
    assert store.read(*name, keys=["a", "b"]).missing == ["a"]
    store.repair(*name, [chunks.whole("a", chunks.bits(1) if where == "ring" else author.state["a"])])
    assert store.report()["runs"]["run"]["damaged"] == []


def test_scrubbing_waits_while_a_load_is_served(
    store: ShardStore, author: Any, chunks: Any, scrub: Any
) -> None:
    author.save({"a": chunks.bits(1)})
    asked = threading.Event()
    listed = store.chunks

    def chunks_of_store() -> Any:
        asked.set()
        return listed()

    store.chunks = chunks_of_store  # type: ignore[method-assign]
    with store.reading():
        scrubber = scrub(store, pause_seconds=0.0)
        assert asked.wait(10)
        assert scrubber.report()["scrub"]["checked_bytes"] == 0
    wait_until(passes(scrubber, 1), "a pass")


def test_rate_bounds_what_is_read(store: ShardStore, author: Any, chunks: Any, scrub: Any) -> None:
    author.save({str(i): chunks.bits(i) for i in range(3)})
    scrubber = scrub(store, pause_seconds=0.0, bytes_per_second=1.0)
    # The first chunk alone takes more than an hour: closing must not wait for it.
    scrubber.close()
    assert scrubber.report()["scrub"]["passes"] == 0


def test_scrubber_that_shall_never_read_ends_at_once(scrub: Any) -> None:
    scrubber = scrub(ShardStore("n", 1000), pause_seconds=math.inf)
    assert scrubber.report()["scrub"]["passes"] == 0
