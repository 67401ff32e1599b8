"""A node in numbers: what was saved, damaged and repaired is what is told."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from fastcheck_dask.metrics.families import Family
from fastcheck_dask.node.scrubber import Scrubber
from fastcheck_dask.node.shard_store import ShardStore
from fastcheck_dask.node.vitals import MAX_AGE_SECONDS, Vitals, brief_of, families_of
from fastcheck_dask.testing.clock import FakeClock


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def vitals(store: ShardStore, clock: FakeClock) -> Iterator[Vitals]:
    scrubber = Scrubber(store, pause_seconds=3600)
    yield Vitals(store, scrubber, lambda: True, clock)
    scrubber.close()


def values(families: list[Family]) -> dict[tuple[str, ...], float]:
    """Return the values by name and run; all are of one node."""
    found = {}
    for family in families:
        for sample in family.samples:
            name, *runs = (family.name.removeprefix("fastcheck_node_"), sample.labels.get("run"))
            found[(name, *(run for run in runs if run is not None))] = sample.value
    return found


def test_saves_and_their_merges_are_told(vitals: Vitals, author: Any, chunks: Any, clock: FakeClock) -> None:
    author.save({"a": chunks.bits(1)})
    author.save({"a": chunks.nudged(chunks.bits(1), 1)})
    told = values(vitals.families())
    assert told["generation", "run"] == 2
    assert told["commits",] == 2
    assert told["merges_waiting",] == 1
    assert told["used_bytes",] == author.store.used_bytes > 0
    assert told["run_bytes", "run"] > 0
    assert told["limit_bytes",] == author.store.status()["limit_bytes"]
    assert (told["master",], told["damaged_chunks", "run"]) == (1, 0)
    author.store.drain("run")
    assert values(vitals.families())["merges_waiting",] == 1, "a report is not made for every question"
    clock.advance(MAX_AGE_SECONDS + 1)
    assert values(vitals.families())["merges_waiting",] == 0


def test_damage_and_its_repair_are_told(author: Any, chunks: Any, vitals: Vitals, clock: FakeClock) -> None:
    author.save({"a": chunks.bits(1), "b": chunks.bits(2)})
    author.store.quarantine(*author.name, ["a"])
    assert values(vitals.families())["damaged_chunks", "run"] == 1
    assert vitals.brief()["damaged"] == 1
    author.store.repair(*author.name, [chunks.whole("a", chunks.bits(1))])
    clock.advance(MAX_AGE_SECONDS + 1)
    told = values(vitals.families())
    assert (told["damaged_chunks", "run"], told["repaired_chunks",]) == (0, 1)


def test_brief_tells_the_last_commits_and_no_tokens(vitals: Vitals, author: Any, chunks: Any) -> None:
    for seed in range(20):
        author.save({"a": chunks.bits(seed)})
    brief = vitals.brief()
    assert [save["generation"] for save in brief["saves"]] == list(range(5, 21))
    assert all(save["bytes"] > 0 and save["run"] == "run" for save in brief["saves"])
    assert brief["runs"]["run"]["generation"] == 20
    assert "token" not in repr(brief)


def test_staged_run_without_a_commit_has_no_generation(vitals: Vitals, author: Any, chunks: Any) -> None:
    author.stage({"a": chunks.bits(1)})
    assert ("generation", "run") not in values(vitals.families())
    assert vitals.brief()["runs"]["run"]["generation"] is None


def test_times_are_of_this_clock() -> None:
    report = {
        **dict.fromkeys(("name", "used_bytes", "reserved_bytes", "limit_bytes", "master"), 0),
        "runs": {},
        "recent": [{"run": "r", "generation": 3, "received_bytes": 5, "seconds_ago": 10.0}],
    }
    assert brief_of(report, 100.0)["saves"] == [{"run": "r", "generation": 3, "unix": 90.0, "bytes": 5}]


def test_families_have_one_sample_of_each_node_wide_number(vitals: Vitals) -> None:
    families = families_of(vitals.report())
    assert len({family.name for family in families}) == len(families)
    assert all(len(family.samples) == 1 for family in families if family.labels == ("node",))
